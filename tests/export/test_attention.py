"""Attention's rewrites, on the small ViT's float graph and on its canonical one, in ONNX Runtime."""

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import pytest

from tests.small_models import built, images, logits_of, operators, run_onnx, worst
from vit_edge.export import attention, onnx
from vit_edge.export.graph import array, entry, producer
from vit_edge.quantization.ranges import Range

Rewrite = Callable[[ir.Model, Mapping[str, Range]], None]
BATCH = 3


def floats() -> ir.Model:
    return onnx.with_batch(built("vit").floats, BATCH)


@pytest.mark.parametrize(
    ("rewrite", "operator"),
    [(attention.fuse_attention, "MultiHeadAttention"), (attention.multiply_by_transposed, "FusedMatMul")],
)
def test_an_exact_rewrite_leaves_the_logits_as_they_are(rewrite: Rewrite, operator: str) -> None:
    graph, sample = floats(), images(BATCH, seed=3)
    before = run_onnx(graph, sample, optimised=False)
    rewrite(graph, {})
    onnx.tidy(graph)
    assert operators(graph)[operator] == 2
    assert worst(run_onnx(graph, sample, optimised=False), before) < 1e-4
    assert worst(before, logits_of(built("vit").classifier, sample)) < 1e-4


def test_fused_attention_needs_no_transposed_copies() -> None:
    graph = floats()
    attention.fuse_attention(graph, {})
    onnx.tidy(graph)
    assert operators(graph)["Transpose"] <= 1  # the patches'
    assert not {"Softmax"} & set(operators(graph))


def test_attention_that_is_made_in_another_way_is_left_as_it_is() -> None:
    graph = floats()
    found = attention.attentions(graph)
    assert len(found) == 2
    transpose = producer(entry(found[0].scores, 0), "Transpose")
    assert transpose is not None
    found[0].scores.replace_input_with(0, entry(found[0].scores, 0))
    cut = producer(entry(transpose, 0), "Reshape")
    assert cut is not None
    twice = ir.node("Identity", [entry(transpose, 0)])
    graph.graph.insert_before(transpose, twice)
    transpose.replace_input_with(0, twice.outputs[0])
    attention.fuse_attention(graph, {})
    assert operators(graph)["MultiHeadAttention"] == 1


def test_operands_are_quantized_by_their_recorded_ranges() -> None:
    graph = onnx.with_batch(built("vit").canonical, BATCH)
    ranges, before = built("vit").by_value, operators(graph)["QuantizeLinear"]
    attention.quantize_scores(graph, ranges)
    attention.quantize_mixing(graph, ranges)
    assert operators(graph)["QuantizeLinear"] == before + 8
    for found in attention.attentions(graph):
        for product, index in ((found.scores, 0), (found.scores, 1), (found.mixed, 1)):
            quantize = _quantize_of(product, index)
            expected = ranges[str(entry(quantize, 0).name)].limit / 127
            assert array(entry(quantize, 1)) == pytest.approx(expected)
            assert array(entry(quantize, 2)).dtype == np.int8


def test_a_tensor_without_a_recorded_range_stays_float() -> None:
    graph = onnx.with_batch(built("vit").canonical, BATCH)
    before = operators(graph)
    attention.quantize_scores(graph, {})
    assert operators(graph) == before


def _quantize_of(product: ir.Node, index: int) -> ir.Node:
    dequantize = producer(entry(product, index), "DequantizeLinear")
    assert dequantize is not None
    quantize = producer(entry(dequantize, 0), "QuantizeLinear")
    assert quantize is not None
    return quantize
