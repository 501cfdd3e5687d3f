"""The list of models: what each is, what it costs, and where int8 is proven."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from vit_edge.errors import UserError
from vit_edge.models import sizes, zoo
from vit_edge.models.classifier import multiply_adds
from vit_edge.recipe import ModelConfig

CLASSES = 1000
PROVEN_INT8: dict[str, tuple[str, ...]] = {
    "vit_(ti|s|b|l|h)[0-9]+": ("onnxruntime", "openvino"),
    "deit_(ti|s|b|l|h)[0-9]+": ("onnxruntime", "openvino"),
    "swin_(tiny|small|base|large)_.*": ("onnxruntime", "openvino"),
    "deit3_.*": ("onnxruntime", "openvino"),
    "resnet[0-9]+[a-z]?": ("onnxruntime", "openvino"),
    "mobilenetv3_(small|large)_[0-9]+": ("onnxruntime", "openvino"),
    "efficientnet_lite[0-9]": ("onnxruntime", "openvino"),
    "repvit_.*": ("onnxruntime", "openvino"),
}
"""Runtimes on which tests/test_families.py takes a member of the family, matched by its whole name, through int8 and the gate."""


@dataclass(frozen=True)
class Listed:
    """A line of `vit-edge models`.

    image_size: side in pixels that the other numbers are of. parameters: with 1000 classes. multiply_adds: of one image.
    int8_proven: runtimes. problem: why the architecture cannot be had at this size; then the counts are None.
    """

    name: str
    family: str
    parameters: int | None
    multiply_adds: int | None
    image_size: int
    int8_proven: tuple[str, ...]
    problem: str | None = None


def names(query: str | None = None) -> list[str]:
    """Ours; with a `query`, ours and timm's with it in their name, or that match its wildcards."""
    if query is None:
        return list(zoo.OURS)
    pattern = query if any(sign in query for sign in "*?[") else f"*{query}*"
    return [name for name in zoo.known_names() if fnmatch(name, pattern)]


def listed(name: str, image_size: int | None = None) -> Listed:
    """The line of the model called `name`, at its native size unless another is given. Nothing is computed.

    Ours are counted from their geometry, but for the one with a ResNet; that and timm's by one image without memory.
    """
    config = ModelConfig(name=name)
    side = image_size or zoo.native_image_size(config)
    proven = proven_int8(name)
    try:
        if name in zoo.OURS and name != zoo.RESNET_HYBRID:
            geometry = zoo.vit_config(config, CLASSES, side)
            parameters, cost = sizes.parameters(geometry), sizes.multiply_adds(geometry)
        else:
            with torch.device("meta"):
                model = zoo.create(config, CLASSES, side)
            parameters, cost = sum(p.numel() for p in model.parameters()), multiply_adds(model, side)
    except UserError as err:
        return Listed(name, _family(name), None, None, side, proven, err.problem)
    return Listed(name, _family(name), parameters, cost, side, proven)


def proven_int8(name: str) -> tuple[str, ...]:
    """Runtimes on which a test proves int8 for the family of `name`."""
    return next((runtimes for pattern, runtimes in PROVEN_INT8.items() if re.fullmatch(pattern, name)), ())


def _family(name: str) -> str:
    if name in zoo.OURS:
        return name.partition("_")[0]
    import timm

    return f"timm {timm.models.model_entrypoint(name).__module__.rpartition('.')[2]}"
