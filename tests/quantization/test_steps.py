"""Rounding to the steps of int8 and uint8."""

import pytest
import torch

from vit_edge.quantization.ranges import Range
from vit_edge.quantization.steps import to_int8, to_uint8

EVERYTHING = (-float("inf"), float("inf"))


@pytest.mark.parametrize("limit", [1e-6, 0.37, 3.0, 4321.0])
def test_the_values_are_those_of_torchs_own_fake_quantization_bit_for_bit(limit: float) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * limit
    found = Range(-0.4 * limit, 1.7 * limit, limit)
    int8 = torch.fake_quantize_per_tensor_affine(values, found.scale, 0, -128, 127)
    uint8 = torch.fake_quantize_per_tensor_affine(values, *found.unsigned, 0, 255)
    finer = torch.fake_quantize_per_tensor_affine(values, 1.4 * limit / 255, 73, 0, 255)
    assert torch.equal(to_int8(values, found, symmetric=True), int8)
    assert torch.equal(to_int8(values, found), finer)
    assert torch.equal(to_uint8(values, found, EVERYTHING), uint8)
    assert len(int8.unique()) == len(uint8.unique()) == 256
