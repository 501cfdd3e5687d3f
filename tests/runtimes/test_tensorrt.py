"""TensorRT as far as it goes without a GPU: parsing and building."""

import random
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import MakeBundle, require
from tests.safety import mutations
from tests.tiny_model import PRODUCTS, TinyModel
from vit_edge import target
from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, registry, tensorrt_apart, tensorrt_build, tensorrt_layers
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


def test_other_session_options_are_refused(tensorrt: TensorRt, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no session options but attention: unfused"):
        tensorrt.open([tmp_path / "m.onnx"], aimed(), {"fp16": "1"})


def test_bf16_is_refused(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bf16"):
        tensorrt.build(tiny.save(tmp_path / "m.onnx"), aimed(precision="bf16"), tmp_path / "built")
    assert not (tmp_path / "built").exists()


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


def test_a_record_of_the_network_says_what_the_engine_does_not(
    tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path
) -> None:
    _, library = tensorrt_build.installed()
    build = tensorrt_build.Build(library, tiny.save(tmp_path / "m.onnx", int8=True), aimed())
    assert build.record() == {"output": "logits", "products": PRODUCTS, "precision": "f32"}


def attention(path: Path, dtype: int) -> Path:
    """softmax(x·xᵀ)·x of 8 heads, in f32 or fp16."""
    helper = onnx.helper
    nodes = [
        helper.make_node("Cast", ["images"], ["x"], to=dtype),
        helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["x", "xt"], ["logits_of_pairs"], name="qk"),
        helper.make_node("Softmax", ["logits_of_pairs"], ["shares"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "x"], ["mixed"], name="pv"),
        helper.make_node("Cast", ["mixed"], ["logits"], to=onnx.TensorProto.FLOAT),
    ]
    sizes = [1, 8, 64, 64]
    given, result = (
        helper.make_tensor_value_info(name, kind, sizes)
        for name, kind in (("images", onnx.TensorProto.UINT8), ("logits", onnx.TensorProto.FLOAT))
    )
    graph = helper.make_graph(nodes, "attention", [given], [result])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.mark.parametrize(("dtype", "precision"), [(onnx.TensorProto.FLOAT, "f32"), (onnx.TensorProto.FLOAT16, "fp16")])
def test_unfused_attention_gives_out_what_is_inside_it(
    tensorrt: TensorRt, tmp_path: Path, dtype: int, precision: str
) -> None:
    _, library = tensorrt_build.installed()
    path = attention(tmp_path / "m.onnx", dtype)
    fused, unfused = (tensorrt_build.Build(library, path, aimed(), unfused=unfused) for unfused in (False, True))
    assert [build.network.num_outputs for build in (fused, unfused)] == [1, 2]
    assert fused.record() == unfused.record() == {"output": "logits", "products": ["qk", "pv"], "precision": precision}
    assert fused.serialized("8.6") != unfused.serialized("8.6")


def test_asking_for_care_twice_brings_nothing_new(tensorrt: TensorRt) -> None:
    asked = tensorrt.careful({})
    assert asked == {"attention": "unfused"}
    assert tensorrt.careful(asked) is None


def test_precisions_are_read_from_the_inspectors_layers() -> None:
    layers = [
        {"Name": "conv + relu", "LayerType": "CaskConvolution", "Inputs": [{"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}], "Metadata": "[ONNX Layer: conv]\x1e[ONNX Layer: relu]"},
        {"Name": "head_myl0", "LayerType": "gemm", "Inputs": [{"Format/Datatype": "Row major linear FP32"}], "Metadata": "[ONNX Layer: head]"},
        {"Name": "weights_myl1", "LayerType": "kgen", "Inputs": [], "Metadata": "[ONNX Layer: fc]"},
        {"Name": "fc_myl2", "LayerType": "gemm", "Inputs": [{"Format/Datatype": "Half"}, {"Format/Datatype": "Int8"}], "Metadata": "[ONNX Layer: fc]\x1e[ONNX Layer: gelu]"},
        {"Name": "new", "LayerType": "gemm", "Inputs": [{"Name": "x", "Format": "kLINEAR", "DataType": "Half"}], "Metadata": ""},
    ]  # fmt: skip
    found = tensorrt_layers.coverage({"Layers": layers}, ["conv", "head", "fc", "new", "lost"])
    assert [(product.names[0], product.precision) for product in found.products] == [
        ("conv", "int8"), ("head", "f32"), ("fc", "int8"), ("new", "fp16"), ("lost", "unknown"),
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


def test_a_build_that_does_not_end_is_the_users_mistake(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did not come to an end .* in 0.05 s"):
        tensorrt_apart.prove(tiny.save(tmp_path / "m.onnx"), aimed(), limit_s=0.05)


def test_modules_in_the_current_folder_are_not_imported_by_the_build(
    tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)", encoding="utf-8")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "builds for 8.6" in tensorrt.prove([tiny.save(tmp_path / "m.onnx")], aimed())


@pytest.mark.skipif(cuda.missing_gpu() is None, reason="a GPU is here: the engine is built")
def test_an_engine_without_its_gpu_is_refused_in_words(tensorrt: TensorRt, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot run here"):
        tensorrt.open([tiny.save(tmp_path / "m.onnx")], aimed())
