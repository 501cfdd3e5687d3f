"""A tiny real model of the digits, its evaluation, and bundles made of them by the real runtimes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.tiny_model import TinyModel, digits
from vit_edge import bundle, evaluation, target
from vit_edge.evaluation import Reference
from vit_edge.runtimes import registry

# ONNX Runtime would merge MatMul and Add to a Gemm with a float bias, which never becomes int8.
KEEP_MATMUL = {"optimization.disable_specified_optimizers": "MatMulAddFusion"}
QUICK = {"warmup": 2, "seconds": 0.2, "min_queries": 16, "max_queries": 200}


def missing(name: str, reason: str) -> NoReturn:
    """A skip that says what is not here; a failure where VIT_EDGE_REQUIRE names it."""
    if name in os.environ.get("VIT_EDGE_REQUIRE", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


def require(module: str, name: str) -> Any:
    """The module, or a skip that says why; a failure where VIT_EDGE_REQUIRE names it."""
    try:
        return __import__(module)
    except ImportError as err:
        missing(name, f"{name} is not installed: {err}")


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="session")
def tiny_evaluation(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> Path:
    """An evaluation of 597 digits with the numpy model's logits as reference."""
    images_NHWC, labels_N = (part[1200:] for part in digits())
    folder = tmp_path_factory.mktemp("evaluation")
    logits_NK = tiny.logits(images_NHWC)
    top1 = float(np.mean(logits_NK.argmax(1) == labels_N))
    evaluation.write(
        folder, images_NHWC=images_NHWC, labels_N=labels_N, logits_NK=logits_NK,
        names=[f"digit-{number}.png" for number in range(len(labels_N))], classes=[str(digit) for digit in range(10)],
        data="scikit-learn digits, last 597",
        reference=Reference(device="numpy", kind="cpu", top1=top1, latency_ms={"p50": 1.0, "p90": 1.1, "p99": 1.2, "n": 100}),
    )  # fmt: skip
    return folder


MakeBundle = Callable[..., Path]


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel, tiny_evaluation: Path) -> MakeBundle:
    """Makes a bundle for a target.

    Keywords are fields of the manifest; int8: options of TinyModel.save; float_model: another one than int8's.
    """

    def make(
        target_name: str, *, int8: dict[str, Any] | None = None, with_evaluation: bool = True,
        target_fields: dict[str, Any] | None = None, float_model: TinyModel = tiny, **fields: Any,
    ) -> Path:  # fmt: skip
        aimed = target.load(target_name)
        protocol = aimed.protocol.model_copy(update=QUICK)
        aimed = aimed.model_copy(update={"threads": 1, "protocol": protocol, **(target_fields or {})})
        folder, runtime = tmp_path_factory.mktemp("bundle"), registry.load(aimed.runtime)
        models = tmp_path_factory.mktemp("onnx")
        onnx_files = {
            "int8": tiny.save(models / "int8.onnx", batch=aimed.fixed_batch, int8=True, **(int8 or {})),
            "float": float_model.save(models / "float.onnx", batch=aimed.fixed_batch),
        }
        files = {kind: runtime.build(path, aimed, folder / kind) for kind, path in onnx_files.items()}
        names = {kind: [path.relative_to(folder).as_posix() for path in paths] for kind, paths in files.items()}
        manifest = {
            "target": aimed.model_dump(mode="json"),
            "model": {"name": "tiny", "parameters": 21_000, "multiply_adds": 27_000},
            "classes": [str(digit) for digit in range(10)],
            "preprocessing": {"image_size": 8},
            "int8_files": names["int8"],
            "float_files": {"f32": names["float"]},
            **fields,
        }
        bundle.write(folder, manifest, tiny_evaluation if with_evaluation else None)
        return folder

    return make


@pytest.fixture(scope="session")
def ort_bundle(make_bundle: MakeBundle) -> Path:
    """A bundle for ONNX Runtime whose matrix products run in int8 by a session option; never change it."""
    require("onnxruntime", "onnxruntime")
    return make_bundle(
        "onnxruntime", int8={"conv_in_float": True}, expected_int8=["hidden", "head"], session_options=KEEP_MATMUL
    )


@pytest.fixture(scope="session")
def openvino_bundle(make_bundle: MakeBundle) -> Path:
    """A bundle for OpenVINO that expects every product in int8; never change it."""
    require("openvino", "openvino")
    return make_bundle("openvino", expected_int8=["conv", "hidden", "head"])
