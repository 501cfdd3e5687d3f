"""TensorRT as far as it goes without a GPU: parsing and building."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeBundle, require
from tests.safety import mutations
from tests.tiny_model import PRODUCTS, TinyModel
from vit_edge import target
from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, registry, tensorrt_layers
from vit_edge.runtimes.tensorrt import TensorRt
from vit_edge.stages.gate import gate_bundle
from vit_edge.target import Target


@pytest.fixture
def tensorrt() -> TensorRt:
    require("tensorrt_rtx_bindings", "tensorrt")
    return TensorRt()


def aimed(**fields: Any) -> Target:
    return target.load("tensorrt").model_copy(update={"compute_capabilities": ("8.6",), **fields})


@pytest.mark.parametrize("int8", [False, True])
def test_parses_and_builds_without_a_gpu(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path, int8: bool) -> None:
    [copy] = tensorrt.build(tiny.save(tmp_path / "m.onnx", int8=int8), aimed(), tmp_path / "built")
    assert copy.read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert list((tmp_path / "built").iterdir()) == [copy]
    assert "builds for 8.6" in tensorrt.prove([copy], aimed())


def test_names_the_operator_that_it_cannot_parse(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "m.onnx", operator="Det")
    with pytest.raises(UserError, match=r"cannot parse .* operator Det"):
        tensorrt.build(path, aimed(), tmp_path / "built")


def test_an_architecture_that_it_does_not_know_is_replaced_and_told(
    tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path
) -> None:
    path = tiny.save(tmp_path / "m.onnx")
    told = tensorrt.prove([path], aimed(compute_capabilities=("8.7", "9.0")))
    assert "8.6 in place of 8.7" in told
    assert "none in place of 9.0" in told


def test_a_graph_of_another_batch_is_refused(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes 1 images at once"):
        tensorrt.build(tiny.save(tmp_path / "m.onnx"), aimed(batch=8), tmp_path / "built")


def test_session_options_have_no_effect_and_are_refused(tensorrt: TensorRt, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no session options"):
        tensorrt.open([tmp_path / "m.onnx"], aimed(), {"fp16": "1"})


@pytest.mark.skipif(cuda.missing_gpu() is None, reason="a GPU is here: the gate measures")
def test_without_a_gpu_the_gate_is_unmeasured_and_says_what_is_missing(
    tensorrt: TensorRt, make_bundle: MakeBundle
) -> None:
    report = gate_bundle(make_bundle("tensorrt", target_fields={"compute_capabilities": ("8.6",)})).report
    assert (report.verdict, report.exit_code, report.blame) == ("unmeasured", 3, "parity")
    assert [check.verdict for check in report.checks] == ["pass", *["unmeasured"] * 4]
    assert "parses" in report.checks[0].detail
    assert "GPU" in report.checks[1].detail or "driver" in report.checks[1].detail
    assert report.accuracy is report.latency is report.coverage is report.parity is None


@pytest.mark.skipif(cuda.missing_gpu() is not None, reason=f"needs a GPU: {cuda.missing_gpu()}")
def test_with_a_gpu_the_gate_measures(make_bundle: MakeBundle) -> None:
    report = gate_bundle(make_bundle("tensorrt", expected_int8=PRODUCTS)).report
    assert report.accuracy is not None
    assert report.latency is not None
    assert report.checks[1].verdict == "pass", report.checks[1].detail


def test_the_products_of_the_parsed_network_have_the_names_of_their_nodes(
    tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path
) -> None:
    from vit_edge.runtimes.tensorrt import _Build, _library

    _, library = _library()
    build = _Build(library, tiny.save(tmp_path / "m.onnx", int8=True), aimed())
    assert tensorrt_layers.products(library, build.network) == PRODUCTS


def test_precisions_are_read_from_the_inspectors_layers() -> None:
    layers = [
        {"Name": "conv + relu", "LayerType": "CaskConvolution", "Inputs": [{"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}], "Metadata": "[ONNX Layer: conv]\x1e[ONNX Layer: relu]"},
        {"Name": "head_myl0", "LayerType": "gemm", "Inputs": [{"Format/Datatype": "Row major linear FP32"}], "Metadata": "[ONNX Layer: head]"},
    ]  # fmt: skip
    found = tensorrt_layers.coverage({"Layers": layers}, ["conv", "head", "lost"])
    assert [(product.names[0], product.precision) for product in found.products] == [
        ("conv", "int8"), ("head", "f32"), ("lost", "unknown"),
    ]  # fmt: skip


def test_the_probe_says_why_it_cannot_run_here(tensorrt: TensorRt) -> None:
    probe = registry.load("tensorrt").probe()
    assert probe.version is not None
    assert (probe.problem is None) == (cuda.missing_gpu() is None)


def test_a_graph_that_crashes_the_parser_is_the_users_mistake(
    tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path
) -> None:
    """The first changed model of the fuzz test's kind that TensorRT-RTX 1.7 answers with a segmentation fault."""
    content = mutations.of_onnx(tiny.save(tmp_path / "whole.onnx", int8=True).read_bytes(), random.Random(29))
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(UserError):
        tensorrt.prove([tmp_path / "model.onnx"], aimed())
