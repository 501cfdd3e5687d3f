"""Linear layers in true int8, where the processor has instructions for it: the sums of the simulation, four times as fast."""

from functools import cache

import torch
from torch import Tensor

from vit_edge.quantization.steps import Steps
from vit_edge.runtimes.machine import has_dot_products


@cache
def run_here() -> bool:
    """Elsewhere torch sums them one by one."""
    return has_dot_products()


def linear(inputs: Tensor, steps: Steps, weight_OI: Tensor, scales_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Of inputs (…, I) and a weight that are on their steps already, both as float; summed in int32."""
    middle = (steps.lowest + steps.highest + 1) // 2 - steps.zero_point  # of the steps that the inputs take
    stored_RI = inputs.flatten(0, -2).mul(1 / inputs.new_tensor(steps.scale)).round_().sub_(middle).to(torch.int8)
    weight_OI = (weight_OI / scales_O[:, None]).round_()
    sums_RO = torch._int_mm(stored_RI, weight_OI.to(torch.int8).T)
    factor_O, offset_O = scales_O * steps.scale, middle * weight_OI.sum(dim=1)
    output_RO = (sums_RO + offset_O) * factor_O if middle else sums_RO * factor_O
    output_RO = output_RO if bias_O is None else output_RO.add_(bias_O)
    return output_RO.unflatten(0, inputs.shape[:-1])
