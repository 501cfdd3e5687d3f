"""The rewrites of windowed attention, on a small Swin whose second block shifts its windows, in ONNX Runtime."""

from functools import cache

import onnx_ir as ir
import torch
from timm.models.swin_transformer import SwinTransformer

from tests.small_models import Built, build, classifier, images, operators, run_onnx, worst
from vit_edge.export import attention, lower, onnx, windows

SIDE = 32


@cache
def built() -> Built:
    torch.manual_seed(0)
    swin = SwinTransformer(SIDE, 4, window_size=4, embed_dim=24, depths=(2,), num_heads=(2,), num_classes=10)
    return build(classifier(swin, SIDE))


def canonical(batch: int = 1) -> ir.Model:
    return onnx.with_batch(built().canonical, batch)


def test_bias_and_mask_become_one_constant_and_change_nothing() -> None:
    graph, sample = canonical(), images(1, SIDE, seed=3)
    assert len(attention.attentions(graph)) == 1  # the one without a mask
    before = run_onnx(graph, sample, optimised=False)
    windows.add_bias_once(graph, {})
    onnx.tidy(graph)
    found = attention.attentions(graph)
    assert [list(one.bias.shape) for one in found if one.bias is not None and one.bias.shape is not None] == [
        [1, 2, 16, 16],
        [4, 2, 16, 16],
    ]
    assert worst(run_onnx(graph, sample, optimised=False), before) < 1e-4


def test_a_mask_of_several_images_stays_as_it_is() -> None:
    graph = canonical(batch=3)
    windows.add_bias_once(graph, {})
    assert len(attention.attentions(graph)) == 1


def test_paddings_by_nothing_are_gone() -> None:
    graph = canonical()
    assert operators(graph)["Pad"]
    windows.drop_empty_pads(graph, {})
    assert not operators(graph)["Pad"]


def test_packed_heads_become_three_layers_and_change_nothing() -> None:
    graph, sample = canonical(), images(1, SIDE, seed=3)
    before = run_onnx(graph, sample, optimised=False)
    windows.unpack_heads(graph, {})
    onnx.tidy(graph)
    assert operators(graph)["Squeeze"] == 0
    assert operators(graph)["MatMul"] == operators(canonical())["MatMul"] + 2 * 2
    assert worst(run_onnx(graph, sample, optimised=False), before) < 1e-4


def test_onnxruntime_runs_it_as_one_operator_each() -> None:
    sample = images(1, SIDE, seed=3)
    before = run_onnx(lower.lowered(canonical(), built().by_value, "onnxruntime", "standard operators"), sample)
    graph = lower.lowered(canonical(), built().by_value, "onnxruntime")
    assert operators(graph)["MultiHeadAttention"] == 2
    assert worst(run_onnx(graph, sample), before) < 0.05  # biases were rounded to int32
