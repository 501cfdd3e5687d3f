"""Linear layers in true int8."""

import torch
from torch.nn import functional

from vit_edge.quantization import integers, rounding
from vit_edge.quantization.ranges import Range
from vit_edge.quantization.steps import steps_of, to_int8


def test_integers_sum_to_what_the_values_on_their_steps_do() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_OI, bias_O = torch.randn(48, 96, generator=generator), torch.randn(48, generator=generator)
    scales_O = rounding.weight_scales(weight_OI)
    stored_OI = rounding.nearest(weight_OI, scales_O)
    for bias, found in ((bias_O, Range(-3.0, 3.0, 3.0)), (None, Range(-0.3, 3.0, 3.0)), (bias_O, Range(0.0, 3.0, 3.0))):
        inputs = to_int8(2 * torch.randn(2, 7, 96, generator=generator), found)
        expected = functional.linear(inputs.double(), stored_OI.double(), None if bias is None else bias.double())
        made = integers.linear(inputs, steps_of(found), stored_OI, scales_O, bias)
        assert made.shape == (2, 7, 48)
        assert float((made - expected).abs().max()) < 1e-5 * float(expected.std())
