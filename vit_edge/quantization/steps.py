"""Values rounded and clipped to the steps of int8 or uint8, as float."""

from torch import Tensor

from vit_edge.quantization.ranges import STEPS, UINT8_MAX, Range

Bounds = tuple[float, float]


def to_int8(values: Tensor, found: Range) -> Tensor:
    """Symmetric, with all 256 steps."""
    return _on_steps(values, found.scale, 0, -STEPS - 1, STEPS)


def to_uint8(values: Tensor, found: Range, bounds: Bounds) -> Tensor:
    """Over what is left of a range within bounds."""
    scale, zero_point = found.between(*bounds).unsigned
    return _on_steps(values, scale, zero_point, 0, UINT8_MAX)


def _on_steps(values: Tensor, scale: float, zero_point: int, lowest: int, highest: int) -> Tensor:
    """Bit for bit torch.fake_quantize_per_tensor_affine, which also makes a mask for training and takes ten times as long."""
    step = values.new_tensor(scale)
    steps = values.mul(1 / step).round_()
    return steps.clamp_(lowest - zero_point, highest - zero_point).mul_(step)
