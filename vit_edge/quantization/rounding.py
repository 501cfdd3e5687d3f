"""Weights on the int8 grid, one scale for each output channel, with or without compensation of the rounding error.

O output and I input channels (or I·h·w inputs of a convolution), R rows of inputs.
"""

import torch
from torch import Tensor

from vit_edge.quantization.ranges import STEPS

DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to it (Frantar et al. 2022, §3.3)."""
BLOCK = 64


def weight_scales(weight: Tensor) -> Tensor:
    """(O,): the largest magnitude of each output channel is 127 steps."""
    return (weight.detach().flatten(1).abs().amax(dim=1) / STEPS).clamp_min(torch.finfo(torch.float32).eps)


def nearest(weight: Tensor, scales_O: Tensor) -> Tensor:
    """The weight on its grid, as float."""
    steps = scales_O.reshape(-1, *[1] * (weight.ndim - 1))
    return (weight / steps).round().clamp(-STEPS, STEPS) * steps


def compensated(weight_OI: Tensor, scales_O: Tensor, inputs_RI: Tensor) -> Tensor:
    """The weight on its grid, each column's error taken up by the columns after it (GPTQ, Frantar et al. 2022).

    inputs_RI: what the weight is multiplied with on calibration images, after its own quantization.
    """
    hessian_II = inputs_RI.T @ inputs_RI
    diagonal = hessian_II.diagonal()
    hessian_II.diagonal().add_(DAMPING * diagonal.mean().clamp_min(1e-9))
    order = hessian_II.diagonal().argsort(descending=True)
    factor_II = _inverse_factor(hessian_II[order][:, order])
    rounded = _by_columns(weight_OI[:, order].clone(), scales_O[:, None], factor_II)
    return rounded[:, order.argsort()]


def _inverse_factor(hessian_II: Tensor) -> Tensor:
    """Upper triangular U with UᵀU = H⁻¹."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian_II.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _by_columns(weight_OI: Tensor, step_O1: Tensor, factor_II: Tensor) -> Tensor:
    rounded_OI = torch.empty_like(weight_OI)
    for start in range(0, weight_OI.shape[1], BLOCK):
        stop = min(start + BLOCK, weight_OI.shape[1])
        errors = weight_OI.new_empty(len(weight_OI), stop - start)
        for j in range(start, stop):
            column = weight_OI[:, j : j + 1]
            rounded = (column / step_O1).round().clamp(-STEPS, STEPS) * step_O1
            error = (column - rounded) / factor_II[j, j]
            weight_OI[:, j + 1 : stop] -= error @ factor_II[j : j + 1, j + 1 : stop]
            rounded_OI[:, j : j + 1], errors[:, j - start : j - start + 1] = rounded, error
        weight_OI[:, stop:] -= errors @ factor_II[start:stop, stop:]
    return rounded_OI
