"""ONNX Runtime and OpenVINO on this machine's CPU, on a tiny real model."""

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import KEEP_MATMUL, require
from tests.tiny_model import PRODUCTS, TinyModel, digits
from vit_edge import metrics, target
from vit_edge.errors import UserError
from vit_edge.runtimes import registry
from vit_edge.target import Target

RUNTIMES = ["onnxruntime", "openvino"]


def generic(name: str, **fields: object) -> Target:
    require(name, name)
    return target.load(name).model_copy(update={"threads": 1, **fields})


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("batch", [1, 4])
def test_runs_any_number_of_images_and_agrees_with_numpy(
    name: str, batch: int, tiny: TinyModel, tmp_path: Path
) -> None:
    aimed, runtime = generic(name, batch=batch, precision="f32"), registry.load(name)
    files = runtime.build(tiny.save(tmp_path / "m.onnx", batch=batch), aimed, tmp_path / "built")
    images_NHWC = digits()[0][:9]
    with runtime.open(files, aimed) as session:
        logits_NK = session.run(images_NHWC)
        described = session.describe()
    assert logits_NK.dtype == np.float32
    assert metrics.logit_error(tiny.logits(images_NHWC), logits_NK) < 1e-4
    assert (described["threads"], described["batch"], described["precision"]) == (1, batch, "f32")


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_device_is_found(name: str) -> None:
    generic(name)
    probe = registry.load(name).probe()
    assert probe.problem is None
    assert probe.devices
    assert probe.float_precisions[0] == "f32"


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_broken_file_is_the_users_mistake(name: str, tmp_path: Path) -> None:
    aimed = generic(name)
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot"):
        registry.load(name).build(tmp_path / "m.onnx", aimed, tmp_path / "built")


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_graph_of_another_batch_is_refused(name: str, tiny: TinyModel, tmp_path: Path) -> None:
    runtime = registry.load(name)
    files = runtime.build(tiny.save(tmp_path / "m.onnx", batch=1), generic(name), tmp_path / "built")
    with pytest.raises(UserError, match="takes 1 images at once"):
        runtime.open(files, generic(name, batch=2))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["f32", "default"])
def test_openvino_says_what_runs_in_int8(threads: int, precision: str, tiny: TinyModel, tmp_path: Path) -> None:
    """With one thread OpenVINO fuses both matrix products into one node: they must be seen inside it."""
    aimed, runtime = generic("openvino", threads=threads, precision=precision), registry.load("openvino")
    covered = {}
    for kind in ("float", "int8"):
        files = runtime.build(tiny.save(tmp_path / f"{kind}.onnx", int8=kind == "int8"), aimed, tmp_path / kind)
        with runtime.open(files, aimed) as session:
            covered[kind] = session.coverage()
    assert (covered["float"].int8, len(covered["float"].floats)) == (0, 3)
    assert (covered["int8"].int8, covered["int8"].int8_share) == (3, 1.0)
    assert all(any(product.came_from(name) for product in covered["int8"].products) for name in PRODUCTS)


def test_openvino_takes_the_precision_that_is_asked_for(tiny: TinyModel, tmp_path: Path) -> None:
    runtime = registry.load("openvino")
    files = runtime.build(tiny.save(tmp_path / "m.onnx"), generic("openvino"), tmp_path / "built")
    for precision in runtime.float_precisions(generic("openvino")):
        with runtime.open(files, generic("openvino", precision=precision)) as session:
            assert session.describe()["precision"] == precision


def test_openvino_names_the_devices_that_are_here(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no device 'GPU\.7'"):
        registry.load("openvino").open([tmp_path / "m.xml"], generic("openvino", device="GPU.7"))


def test_onnxruntime_says_what_runs_in_int8(tiny: TinyModel, tmp_path: Path) -> None:
    aimed, runtime = generic("onnxruntime"), registry.load("onnxruntime")
    files = runtime.build(tiny.save(tmp_path / "m.onnx", int8=True, conv_in_float=True), aimed, tmp_path / "built")
    with runtime.open(files, aimed) as merged, runtime.open(files, aimed, KEEP_MATMUL) as kept:
        assert merged.coverage().int8 == 0  # MatMul and Add become a Gemm, which stays float
        assert [product.names[0] for product in kept.coverage().products if product.is_int8] == ["hidden", "head"]
        assert kept.describe()["options"] == KEEP_MATMUL


@pytest.mark.parametrize("fields", [{"precision": "bf16"}, {"device": "GPU.0"}])
def test_onnxruntime_refuses_settings_without_effect(fields: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set "):
        registry.load("onnxruntime").open([tmp_path / "m.onnx"], generic("onnxruntime", **fields))
