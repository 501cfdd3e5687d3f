"""Graphs in fp16, computed by ONNX Runtime on the CPU, which rounds what passes between the operators to fp16."""

from functools import cache

import numpy as np
import onnx as standard
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common as passes
from torch import nn

from tests.small_models import (
    SIDE,
    Built,
    build,
    built,
    cnn,
    images,
    logits_of,
    operators,
    run_onnx,
    session,
    vit,
    worst,
)
from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.export.graph import array, entry, name_of
from vit_edge.export.half import half_scales, halved
from vit_edge.export.lower import lowered
from vit_edge.export.magnitudes import Magnitude, observe
from vit_edge.export.overflow import LARGEST, MARGIN, kept_in_f32
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer

KINDS = pytest.mark.parametrize("kind", ["vit", "cnn"])
SEEN = 32


@cache
def measured(kind: str, graph: str) -> dict[str, Magnitude]:
    found = built(kind)
    return magnitudes_of(deployable(found.classifier) if graph == "float" else found.quantized)


def magnitudes_of(graph: nn.Module) -> dict[str, Magnitude]:
    return observe(onnx.program(graph, SIDE), images(SEEN))


def magnitude(value: float) -> dict[str, Magnitude]:
    return {name: Magnitude(value, value) for name in ("x", "y", "logits")}


@KINDS
def test_a_float_graph_in_fp16_answers_as_it_did(kind: str) -> None:
    graph, sample = onnx.with_batch(built(kind).floats, 200), images(200, seed=7)
    half = halved(graph, measured(kind, "float"))
    standard.checker.check_model(ir.to_proto(half), full_check=True)
    found, expected = run_onnx(half, sample), run_onnx(graph, sample)
    assert found.dtype == np.float32
    assert worst(found, expected) < 0.01
    assert metrics.agreement(found.argmax(1), expected.argmax(1)) >= 0.995


@KINDS
def test_an_int8_graph_with_fp16_parts_computes_nearly_the_same(kind: str) -> None:
    graph, sample = lowered(onnx.with_batch(built(kind).canonical, 16), {}, "tensorrt"), images(16, seed=7)
    half = halved(graph, measured(kind, "int8"))
    standard.checker.check_model(ir.to_proto(half), full_check=True)
    assert metrics.sqnr_db(run_onnx(graph, sample, optimised=False), run_onnx(half, sample, optimised=False)) > 30
    for node in half.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert entry(node, 1).dtype == ir.DataType.FLOAT16
            assert not array(entry(node, 2)).any()
            assert entry(node, 2).dtype == ir.DataType.INT8


@KINDS
def test_only_the_input_and_the_logits_are_cast(kind: str) -> None:
    graph = onnx.with_batch(built(kind).floats, 1)
    half = halved(graph, measured(kind, "float"))
    assert operators(half)["Cast"] == operators(graph)["Cast"] + 1
    assert not [value for value in half.graph.initializers.values() if value.dtype == ir.DataType.FLOAT]
    assert [name_of(value) for value in half.graph.outputs] == [onnx.OUTPUT]
    assert {node.name for node in graph.graph} < {node.name for node in half.graph}


def test_the_graph_that_is_given_is_not_changed() -> None:
    graph = onnx.with_batch(built("vit").canonical, 1)
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    halved(graph, measured("vit", "int8"))
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before


def planted() -> Built:
    """A ViT whose residual stream is far beyond fp16 in one channel, which its norms take back."""
    model = vit()
    assert isinstance(model.backbone, VisionTransformer)
    with torch.no_grad():
        model.backbone.pos_embed[..., 0] += 9e4
    return build(model)


def test_a_planted_overflow_computes_in_f32_and_answers_as_before() -> None:
    found, sample = planted(), images(64, seed=7)
    graph, seen = onnx.with_batch(found.floats, 64), magnitudes_of(deployable(found.classifier))
    naive, half = (run_onnx(halved(graph, given), sample) for given in (blind(seen), seen))
    expected = run_onnx(graph, sample)
    assert not np.isfinite(naive).all()
    assert worst(half, expected) < 0.02
    assert metrics.agreement(half.argmax(1), expected.argmax(1)) >= 0.995
    kept = kept_in_f32(onnx.with_batch(found.floats, 1), seen)
    assert {"backbone/Add", "blocks.0.norm1/LayerNormalization", "blocks.1/Add#1"} <= set(kept)
    assert not any("attn/" in name or "mlp.act" in name for name in kept), kept


def blind(seen: dict[str, Magnitude]) -> dict[str, Magnitude]:
    return {name: Magnitude(1.0, 1.0) for name in seen}


def test_squares_that_add_up_too_far_keep_the_norm_alone_in_f32() -> None:
    """Values of 200 fit, and so does their sum; 48 of their squares do not."""
    seen = measured("vit", "float") | {"add_138": Magnitude(200.0, 200.0**2 * 48)}
    graph = onnx.with_batch(built("vit").floats, 1)
    assert kept_in_f32(graph, seen) == {"blocks.0.norm2/LayerNormalization": "a sum is too large"}
    half = halved(graph, seen)
    norm = next(node for node in half.graph if node.name == "blocks.0.norm2/LayerNormalization")
    around = [entry(norm, 0).producer(), *norm.outputs[0].consumers()]
    assert [node.op_type for node in around if node is not None] == ["Cast", "Cast"]
    sample = images(1)
    assert worst(run_onnx(half, sample), run_onnx(graph, sample)) < 0.02


def test_magnitudes_are_those_of_the_graphs_values() -> None:
    """Every value that the recorder names, as ONNX Runtime computes it."""
    graph, seen = onnx.with_batch(built("vit").floats, SEEN), measured("vit", "float")
    values = [value for node in graph.graph for value in node.outputs if value.name in seen]
    assert len(values) > 50
    asked = graph.clone()
    by_name = {value.name: value for node in asked.graph for value in node.outputs}
    asked.graph.outputs.extend(by_name[value.name] for value in values if value.name != onnx.OUTPUT)
    names = [name_of(value) for value in asked.graph.outputs]
    for name, found in zip(names, session(asked).run(names, {"images": images(SEEN)}), strict=True):
        assert seen[name].largest == pytest.approx(float(np.abs(found).max()), rel=1e-3), name
        if seen[name].energy is not None:
            assert seen[name].energy == pytest.approx(float(np.square(found).sum(-1).max()), rel=1e-3)


def test_a_value_without_a_record_is_bounded_by_what_follows() -> None:
    graph = onnx.with_batch(built("vit").floats, 1)
    seen = measured("vit", "float") | {"linear_5": Magnitude(LARGEST / MARGIN * 1.01)}
    assert "blocks.0.mlp.fc1/MatMul" in kept_in_f32(graph, seen)


@pytest.mark.parametrize(
    ("node", "constant", "seen", "expected"),
    [
        ("Add", 1.0, 10.0, None),
        ("Add", 1e5, 10.0, "fp16 does not hold its constant"),
        ("Add", 1e-9, 10.0, "fp16 does not hold its constant"),
        ("Add", 1.0, 2e4, "a value is too large"),
        ("Celu", None, 10.0, "the operator has no fp16 form"),
        ("ReduceMean", None, 10.0, None),
        ("ReduceMean", None, 5e3, "a sum is too large"),
        ("ReduceL2", None, 10.0, "a sum is too large"),
    ],
)
def test_what_fp16_would_not_serve(node: str, constant: float | None, seen: float, expected: str | None) -> None:
    graph = one_operator(node, constant)
    assert kept_in_f32(graph, magnitude(seen)).get(node) == expected
    half = ir.to_proto(halved(graph, magnitude(seen)))
    standard.checker.check_model(half, full_check=True)


def one_operator(operator: str, constant: float | None) -> ir.Model:
    helper = standard.helper
    value = helper.make_tensor_value_info
    constants = [] if constant is None else [standard.numpy_helper.from_array(np.float32(constant), "c")]
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["x"], name="Cast", to=standard.TensorProto.FLOAT),
            helper.make_node(operator, ["x", *(one.name for one in constants)], ["y"], name=operator),
            helper.make_node("Flatten", ["y"], ["logits"], name="Flatten"),
        ],
        "one", [value("images", standard.TensorProto.UINT8, [2, 8])],
        [value("logits", standard.TensorProto.FLOAT, [2, None] if operator == "Add" else [None, None])], constants,
    )  # fmt: skip
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    return passes.ShapeInferencePass()(model).model


def test_steps_in_fp16_are_near_and_never_clip() -> None:
    scales = np.exp(np.linspace(np.log(1e-9), np.log(1e2), 5000))
    steps = half_scales(scales).astype(np.float64)
    assert (steps > 0).all()
    assert (steps >= scales * (1 - 2.0**-10)).all()
    normal = scales > 2.0**-14
    assert (np.abs(steps / scales - 1)[normal] <= 2.0**-10).all()


def test_weights_smaller_than_fp16_resolves_keep_their_values() -> None:
    model = cnn()
    layer = model.backbone.expand[0]  # type: ignore[index,union-attr]
    with torch.no_grad():
        layer.weight *= 1e-5  # type: ignore[union-attr]
        model.backbone.expand[1].running_var.mul_(0).add_(1.0)  # type: ignore[index,union-attr]
    found = build(Classifier(model.backbone, model.preprocessing).eval())
    graph, sample = lowered(onnx.with_batch(found.canonical, 8), {}, "tensorrt"), images(8, seed=7)
    half = halved(graph, magnitudes_of(found.quantized))
    assert worst(run_onnx(half, sample, optimised=False), run_onnx(graph, sample, optimised=False)) < 0.02
    assert worst(run_onnx(half, sample, optimised=False), logits_of(found.quantized, sample)) < 0.02
