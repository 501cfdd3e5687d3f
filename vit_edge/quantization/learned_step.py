"""Fake quantization whose step sizes are learned with the weights, put into a graph by torchao's PT2E flow.

O output channels of a weight.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.quantizer import QuantizationSpec, QuantizationSpecBase

from vit_edge.quantization.products import Product
from vit_edge.quantization.quantizer import CanonicalQuantizer, per_channel
from vit_edge.quantization.ranges import Range
from vit_edge.quantization.steps import Bounds, Steps, steps_of, uint8_steps


class LearnedStep(FakeQuantizeBase):
    """Rounds and clips to 256 steps and back; the gradient reaches the step too (LSQ, Esser et al. 2020, eqs. 1 to 3).

    What is learned is the logarithm of the step's factor from where it starts: a rate then means the same share of a
    small step and of a large one, under an optimiser such as Adam whose updates do not grow with the gradient.
    """

    start: Tensor
    zero_point: Tensor

    def __init__(self, start: Tensor, quant_min: int, quant_max: int, offset: int = 0, dropped: float = 0.0, **_: Any):
        """start: the step of the whole tensor, (1,), or of each channel of its first axis, (O,). offset: the zero point.

        dropped: share of the training batches that pass as they are (QDrop, Wei et al. 2022).
        """
        super().__init__()
        self.dropped = dropped
        self.low, self.high, self.offset, self.per_channel = quant_min, quant_max, offset, start.numel() > 1
        self.register_buffer("start", start.clone())
        self.register_buffer("zero_point", torch.full_like(start, offset))
        self.log_factor = nn.Parameter(torch.zeros_like(start))

    @property
    def step(self) -> Tensor:
        return self.start * self.log_factor.exp()

    @property
    def steps(self) -> Steps:
        """Of a whole tensor, as learned so far."""
        return Steps(float(self.step), self.offset, self.low, self.high)

    def forward(self, values: Tensor) -> Tensor:
        if self.training and self.dropped and float(torch.rand(())) < self.dropped:
            return values
        bounds = self.low, self.high, 1.0
        if self.per_channel:
            return torch._fake_quantize_learnable_per_channel_affine(values, self.step, self.zero_point, 0, *bounds)
        return torch._fake_quantize_learnable_per_tensor_affine(values, self.step, self.zero_point, *bounds)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.step.detach(), self.zero_point.int()


class LearningQuantizer(CanonicalQuantizer):
    """The canonical graph's places, with steps that are learned from those of `ranges` and `scales` on.

    symmetric: without the finer steps that lowerings take (steps.py). exact: names of tensors that int8 holds without
    error, whose step stays. outputs: those of convolutions that are uint8 as well (outputs.py), in a share of the targets.
    """

    def __init__(
        self, ranges: Mapping[str, Range], float_layers: Collection[str], scales: Mapping[str, Tensor], symmetric: bool,
        exact: Collection[str], outputs: Mapping[str, Bounds], share: float,
    ):  # fmt: skip
        super().__init__(ranges, float_layers, scales)
        self.symmetric, self.exact, self.outputs, self.share = symmetric, frozenset(exact), outputs, share

    def activation_spec(self, product: Product) -> QuantizationSpecBase:
        name = product.inputs[0].name
        if name in self.exact:
            return super().activation_spec(product)
        return _learned(steps_of(self.ranges[name], self.symmetric))

    def output_spec(self, product: Product) -> QuantizationSpecBase | None:
        bounds = self.outputs.get(product.node.name)
        if bounds is None:
            return None
        return _learned(uint8_steps(self.ranges[product.node.name], bounds), dropped=1 - self.share)

    def weight_spec(self, product: Product) -> QuantizationSpecBase:
        return per_channel(LearnedStep.with_args(start=self.scales[product.name]))


def _learned(steps: Steps, dropped: float = 0.0) -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8 if steps.lowest < 0 else torch.uint8,
        quant_min=steps.lowest,
        quant_max=steps.highest,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=LearnedStep.with_args(
            start=torch.tensor([steps.scale]), offset=steps.zero_point, dropped=dropped
        ),
    )
