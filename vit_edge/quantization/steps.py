"""Values rounded and clipped to the steps of int8 or uint8, as float."""

from typing import NamedTuple

from torch import Tensor

from vit_edge.quantization.ranges import STEPS, UINT8_MAX, Range

Bounds = tuple[float, float]


class Steps(NamedTuple):
    """Of real = scale · (stored - zero_point), stored between lowest and highest."""

    scale: float
    zero_point: int
    lowest: int
    highest: int


def to_int8(values: Tensor, found: Range, symmetric: bool = False) -> Tensor:
    """On 256 steps; symmetric: as the canonical graph has them, else finer ones where a lowering would take them."""
    return _on_steps(values, steps_of(found, symmetric))


def steps_of(found: Range, symmetric: bool = False) -> Steps:
    """The same in numbers."""
    if not symmetric and found.finer is not None:
        return Steps(*found.finer, 0, UINT8_MAX)
    return Steps(found.scale, 0, -STEPS - 1, STEPS)


def to_uint8(values: Tensor, found: Range, bounds: Bounds) -> Tensor:
    """Over what is left of a range within bounds."""
    return _on_steps(values, uint8_steps(found, bounds))


def uint8_steps(found: Range, bounds: Bounds) -> Steps:
    """The same in numbers."""
    return Steps(*found.between(*bounds).unsigned, 0, UINT8_MAX)


def _on_steps(values: Tensor, steps: Steps) -> Tensor:
    """Bit for bit torch.fake_quantize_per_tensor_affine, which also makes a mask for training and takes ten times as long."""
    step = values.new_tensor(steps.scale)
    stored = values.mul(1 / step).round_()
    return stored.clamp_(steps.lowest - steps.zero_point, steps.highest - steps.zero_point).mul_(step)
