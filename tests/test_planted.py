"""Planted outliers leave the float function and spoil int8's ranges."""

import torch

from tests.planted import planted, thinned
from tests.small_models import build, images, logits_of, vit, worst
from vit_edge import metrics


def test_outliers_leave_the_float_function_and_spoil_int8() -> None:
    pixels_NCHW = torch.from_numpy(images(64)).permute(0, 3, 1, 2)
    plain = thinned(vit(), pixels_NCHW)
    spoilt = planted(plain, pixels_NCHW)
    sample = images(64, seed=7)
    reference = logits_of(plain, sample)
    assert worst(logits_of(spoilt, sample), reference) < 1e-5
    noise_db = [metrics.sqnr_db(reference, logits_of(build(model).quantized, sample)) for model in (plain, spoilt)]
    assert noise_db[1] < noise_db[0] - 10


def test_the_outliers_are_as_large_as_asked_for() -> None:
    pixels_NCHW = torch.from_numpy(images(64)).permute(0, 3, 1, 2)
    plain = thinned(vit(), pixels_NCHW)
    limits = []
    for model in (plain, planted(plain, pixels_NCHW, factor=50)):
        made = build(model)
        (inputs,) = (p.inputs[0] for p in made.products if p.name == "blocks.0.mlp.fc2")
        limits.append(made.by_node[inputs.name].high)
    assert limits[1] > 25 * limits[0]
