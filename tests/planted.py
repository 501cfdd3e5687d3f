"""A trained ViT with outliers planted: the same float function, with int8's ranges spoilt.

After each norm a few channels are `factor` times as large, and what reads them takes that back: what SmoothQuant and
its like fold away. Among the inputs of each fc2 a few are as much larger than all others, and no fold reaches them:
nothing passes a GELU but a straight line. A unit's GELU(z) is GELU(-z) + z, and z comes through a spare unit as
GELU(s·z + offset) = s·z + offset, far on the positive side.

The spare units are the ones that matter least, taken out first with their mean left in the bias (`thinned`).
N images, T tokens, U hidden units.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import Block, VisionTransformer

FACTOR, COUNT = 300.0, 4
"""Where plain int8 fails on three trained blocks: it answers 84 % as float does, at × 100 96 %, at × 30 97 %."""
MARGIN = 1.5
"""How far beyond what `images` show the straight line still holds."""


@torch.no_grad()
def thinned(classifier: Classifier, pixels_NCHW: Tensor, count: int = COUNT) -> Classifier:
    """A copy without the `count` hidden units of each block that change its output least."""
    model = copy.deepcopy(classifier).eval()
    for block in _blocks(model):
        hidden_RU = _hidden(model, block, pixels_NCHW)
        unused = _matters(block, hidden_RU).argsort()[:count]
        fc2 = block.mlp.fc2
        fc2.bias += fc2.weight[:, unused] @ hidden_RU.mean(dim=0)[unused]
        fc2.weight[:, unused] = 0
    return model


@torch.no_grad()
def planted(model: Classifier, pixels_NCHW: Tensor, factor: float = FACTOR, count: int = COUNT) -> Classifier:
    """A copy of a `thinned` model with outliers: its answers are the same."""
    model = copy.deepcopy(model).eval()
    backbone = cast(VisionTransformer, model.backbone)
    for block in _blocks(model):
        _swell_units(block, _hidden(model, block, pixels_NCHW), factor, count)
        _swell_channels(block.norm1, block.attn.qkv, factor, count)
        _swell_channels(block.norm2, block.mlp.fc1, factor, count)
    if isinstance(backbone.norm, nn.LayerNorm):
        _swell_channels(backbone.norm, backbone.head, factor, count)
    return model


def _swell_channels(norm: nn.LayerNorm, reader: nn.Linear, factor: float, count: int) -> None:
    large = norm.weight.abs().argsort(descending=True)[:count]
    norm.weight[large] *= factor
    norm.bias[large] *= factor
    reader.weight[:, large] /= factor


def _swell_units(block: Block, hidden_RU: Tensor, factor: float, count: int) -> None:
    fc1, fc2 = block.mlp.fc1, block.mlp.fc2
    spare = (fc2.weight.abs().amax(dim=0) == 0).nonzero().flatten()[:count]
    assert len(spare) == count, "give a thinned model"
    units = _matters(block, hidden_RU).argsort(descending=True)[:count]
    bounds = MARGIN * hidden_RU.amax(dim=0)[units]
    slope = factor * hidden_RU.max() / (2 * bounds)
    offset = slope * bounds + 6
    fc1.weight[spare], fc1.bias[spare] = slope[:, None] * fc1.weight[units], slope * fc1.bias[units] + offset
    fc2.weight[:, spare] = fc2.weight[:, units] / slope
    fc2.bias -= fc2.weight[:, spare] @ offset
    fc1.weight[units] *= -1
    fc1.bias[units] *= -1


def _matters(block: Block, hidden_RU: Tensor) -> Tensor:
    return hidden_RU.std(dim=0) * block.mlp.fc2.weight.norm(dim=0)


def _hidden(model: Classifier, block: Block, pixels_NCHW: Tensor) -> Tensor:
    """What fc2 reads of every token (R, U); the last block computes the tokens that are read alone."""
    seen: list[Tensor] = []
    handle = block.mlp.fc2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    model(pixels_NCHW)
    handle.remove()
    return seen[0]


def _blocks(model: Classifier) -> list[Block]:
    return cast(list[Block], list(cast(VisionTransformer, model.backbone).blocks))
