"""Costs from the geometry alone equal those of the built model, and impossible ones are refused before they are built."""

import time

import pytest
import torch

from vit_edge.errors import UserError
from vit_edge.models import sizes, zoo
from vit_edge.models.classifier import multiply_adds
from vit_edge.models.vit import ConvStem, VisionTransformer, ViTConfig
from vit_edge.recipe import ModelConfig

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 7}
VARIANTS = [
    {},
    {"readout": "mean"},
    {"readout": "mean", "class_token": False},
    {"distillation_token": True},
    {"registers": 4, "position_prefix": False, "layer_scale": 0.1},
    {"pre_logits": True, "mlp_ratio": 2.7},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_counts_equal_the_built_models(changes):
    config = ViTConfig(**SMALL | changes)
    with torch.device("meta"):
        model = VisionTransformer(config)
    assert sizes.parameters(config) == sum(p.numel() for p in model.parameters())
    assert sizes.multiply_adds(config) == multiply_adds(model.eval(), 32)


@pytest.mark.parametrize("channels", [(8,), (8, 16), (4, 6, 10)])
def test_counts_with_a_stem_equal_the_built_models(channels):
    config = ModelConfig(name="vit_ti16", stem=channels, patch_size=1, width=48, depth=1, heads=3)
    model = zoo.create(config, 7, 40)
    geometry, side = model.config, zoo.map_side(config, 40)
    built = sum(p.numel() for p in model.parameters())
    assert sizes.parameters(geometry, channels[-1], side) + sizes.stem_parameters(channels) == built
    assert sizes.stem_parameters(channels) == sum(p.numel() for p in ConvStem(channels).parameters())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"depth": 100_000_000}, "depth 100000000, patch_size 8 would have 4.4e+13 parameters, more than 3e+09"),
        ({"width": 900_000_000}, "parameters, more than"),
        ({"stem": (900_000_000, 900_000_000), "patch_size": 1}, "parameters, more than"),
        ({"depth": 20_000, "width": 48}, "has more than 1000 blocks"),
        ({"patch_size": 1, "width": 48, "image_size": 2048}, "GiB for the attention of one block"),
    ],
)
def test_what_would_eat_the_memory_is_refused_at_once(changes, problem):
    config = ModelConfig(**{"name": "vit_ti16", "patch_size": 8} | changes)
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        zoo.create(config, 10, config.image_size or 32)
    assert problem in caught.value.problem
    assert time.process_time() - started < 1
