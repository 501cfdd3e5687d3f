"""What TensorRT is given in int8, and that what is given back computes what the weights on int8's grid say."""

import numpy as np
import pytest

from tests.small_models import build, built, cnn, images, run_onnx, vit
from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.lower import lowered
from vit_edge.export.placement import int8_products


@pytest.mark.parametrize(
    ("batch", "floats"),
    [
        (1, {"head", "blocks.1.attn.q", "blocks.1.attn.proj", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2"}),
        (4, {"head"}),  # of ten classes
    ],
)
def test_one_row_and_few_outputs_stay_float_in_a_vit(batch: int, floats: set[str]) -> None:
    graph = onnx.with_batch(built("vit").canonical, batch)
    before = int8_products(graph)
    assert before - int8_products(lowered(graph, {}, "tensorrt")) == floats


def test_convolutions_narrower_than_16_stay_float_unless_their_kernels_are_made_for_it() -> None:
    graph = onnx.with_batch(built("cnn").canonical, 4)
    assert int8_products(lowered(graph, {}, "tensorrt")) == {"stem.0", "depthwise.0", "project.0", "expand.0"}


@pytest.mark.parametrize("model", [vit, cnn])
def test_what_is_given_back_to_float_comes_closer_to_float(model: object) -> None:
    found = build(model())  # type: ignore[operator]
    sample = images(1, seed=3)
    floats, plain = (onnx.with_batch(graph, 1) for graph in (found.floats, found.canonical))
    expected, before = run_onnx(floats, sample), run_onnx(plain, sample, optimised=False)
    after = run_onnx(lowered(plain, {}, "tensorrt"), sample, optimised=False)
    assert metrics.sqnr_db(expected, after) > metrics.sqnr_db(expected, before) - 3
    assert not np.array_equal(after, before)
