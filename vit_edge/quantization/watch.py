"""How well a model that is still being trained would stand int8: a quick probe, no graph and no export.

Of the folded model, every input of a Linear or Conv2d goes through int8 with the range that calibration would choose,
every weight through int8 with one scale a channel, as in the canonical graph. N images, K classes.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_edge import metrics
from vit_edge.export.fold import Served
from vit_edge.models.classifier import Classifier
from vit_edge.quantization import rounding
from vit_edge.quantization.ranges import Range, Statistics
from vit_edge.quantization.simulation import logits
from vit_edge.quantization.steps import to_int8

IMAGES = 256
OUT_OF_REACH = 0.95
"""Agreement of int8 and float below which a model is reported: post-training quantization seldom makes up for more."""
BLOCK_NAMES = ("blocks", "stages", "layers", "layer1", "layer2", "layer3", "layer4", "features")


@dataclass(frozen=True)
class Outliers:
    """Of a block's output: largest magnitude over the standard deviation, and kurtosis (3 for a normal distribution)."""

    max_over_sigma: float
    kurtosis: float


@dataclass(frozen=True)
class Quantizability:
    """Of int8 against float: agreement (share of the images), signal to noise of the logits in dB, each block's outliers."""

    agreement: float
    sqnr_db: float
    blocks: dict[str, Outliers]

    @property
    def worst(self) -> tuple[str, Outliers] | None:
        """The block with the largest outliers."""
        return max(self.blocks.items(), key=lambda item: item[1].max_over_sigma, default=None)


def quantizability(classifier: Classifier, images_NHWC: np.ndarray, device: torch.device) -> Quantizability:
    """Probes with uint8 (N, H, W, 3), prepared for the classifier, which is left as it was."""
    served = Served(copy.deepcopy(classifier).float().eval()).to(device)
    layers = [module for module in served.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    seen = {layer: Statistics() for layer in layers}
    moments: dict[str, _Moments] = {}
    with ExitStack() as hooks:
        for layer, statistics in seen.items():
            hooks.callback(layer.register_forward_pre_hook(partial(_record, statistics)).remove)
        for name, block in _blocks(served.backbone):
            moments[name] = _Moments()
            hooks.callback(block.register_forward_hook(moments[name].hook).remove)
        float_NK = logits(served, images_NHWC, device)
    for layer, statistics in seen.items():
        layer.register_forward_pre_hook(partial(_to_int8, statistics.range("mse")))
        layer.weight.data = rounding.nearest(layer.weight.data, rounding.weight_scales(layer.weight.data))
    int8_NK = logits(served, images_NHWC, device)
    return Quantizability(
        agreement=metrics.agreement(float_NK.argmax(axis=1), int8_NK.argmax(axis=1)),
        sqnr_db=round(min(float(metrics.sqnr_db(float_NK, int8_NK)), 999.0), 2),
        blocks={name: found.outliers() for name, found in moments.items() if found.count},
    )


class _Moments:
    """Sums of powers of a block's output, about zero."""

    def __init__(self) -> None:
        self.count, self.largest = 0, 0.0
        self.sums = torch.zeros(4, dtype=torch.float64)

    def hook(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        values = output.detach().double().flatten().cpu()
        self.count += values.numel()
        self.largest = max(self.largest, float(values.abs().max()))
        self.sums += torch.stack([values.pow(power).sum() for power in (1, 2, 3, 4)])

    def outliers(self) -> Outliers:
        m1, m2, m3, m4 = (float(value) / self.count for value in self.sums)
        variance = max(m2 - m1**2, 1e-30)
        fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4
        return Outliers(round(self.largest / variance**0.5, 2), round(fourth / variance**2, 2))


def _blocks(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of the containers that hold a backbone's blocks or stages."""
    for name, container in backbone.named_children():
        if name in BLOCK_NAMES:
            children = list(container.named_children())
            yield from ((f"{name}.{child}", block) for child, block in children)


def _record(statistics: Statistics, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    statistics.update(inputs[0])


def _to_int8(found: Range, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (to_int8(inputs[0], found), *inputs[1:])
