import numpy as np
import pytest
import torch
from torch import nn

from tests.small_models import SIDE, classifier, cnn, images, logits_of, vit, worst
from vit_edge.errors import UserError
from vit_edge.export import served_vit
from vit_edge.export.fold import deployable, exported
from vit_edge.models.vit import LayerScale
from vit_edge.quantization.products import products

aten = torch.ops.aten
VARIANTS = {
    "token": {},
    "distillation token": {"distillation_token": True},
    "mean": {"readout": "mean"},
    "mean, no class token": {"readout": "mean", "class_token": False},
    "registers": {"registers": 2, "position_prefix": False},
    "layer scale": {"layer_scale": 0.5},
    "hidden layer in the head": {"pre_logits": True},
    "convolutional stem": {"stem": True, "patch_size": 2},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_served_vit_equals_the_trained_one(variant: dict[str, object]) -> None:
    model = vit(**variant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    served = deployable(model)
    for n in (1, 3):
        assert worst(logits_of(served, images(n)), logits_of(model, images(n))) < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_served_cnn_equals_the_trained_one() -> None:
    model = cnn()
    served = deployable(model)
    assert worst(logits_of(served, images(3)), logits_of(model, images(3))) < 1e-4
    left = {node.target for node in served.graph.nodes}
    assert not left & {aten.batch_norm.default, aten.dropout.default, aten.adaptive_avg_pool2d.default}


@pytest.mark.parametrize(("padding", "operators"), [(0, 0), (1, 2)])
def test_normalisation_goes_into_an_unpadded_convolution_only(padding: int, operators: int) -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4, padding), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    backbone(torch.zeros(1, 3, SIDE, SIDE))
    model = classifier(backbone)
    served = deployable(model)
    assert worst(logits_of(served, images(3)), logits_of(model, images(3))) < 1e-4
    assert sum(node.target in (aten.mul.Tensor, aten.add.Tensor) for node in served.graph.nodes) == operators


def test_a_standardised_weight_becomes_a_constant() -> None:
    from timm.layers import StdConv2d

    model = classifier(
        nn.Sequential(StdConv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    )
    served = deployable(model)
    assert worst(logits_of(served, images(3)), logits_of(model, images(3))) < 1e-4
    assert [(p.kind, p.obstacle) for p in products(served)] == [("conv", None), ("linear", None)]


def test_the_last_block_computes_the_tokens_that_are_read_alone() -> None:
    served = deployable(vit(distillation_token=True))
    shapes = {p.name: tuple(p.inputs[0].meta["val"].shape)[1:] for p in products(served)}
    assert shapes["blocks.0.mlp.fc1"] == (18, 48)
    assert shapes["blocks.1.attn.q"] == shapes["blocks.1.mlp.fc1"] == (2, 48)
    assert shapes["blocks.1.attn.k"] == (18, 48)


@pytest.mark.parametrize("rows", [1, 2])
def test_norm_folds_into_the_next_layer(rows: int) -> None:
    torch.manual_seed(0)
    norm, linear, tokens = nn.LayerNorm(6, eps=1e-6), nn.Linear(6 * rows, 4), torch.rand(5, rows, 6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    folded = served_vit.after_norm(norm, linear)(served_vit.plain_norm(norm)(tokens).flatten(1))
    assert torch.allclose(folded, linear(norm(tokens).flatten(1)), atol=1e-6)


def test_layer_scale_folds_into_the_layer_before() -> None:
    linear, scale, tokens = nn.Linear(6, 4), LayerScale(4, 0.1), torch.rand(5, 6)
    nn.init.normal_(scale.gamma)
    assert torch.allclose(served_vit.before_scale(linear, scale)(tokens), scale(linear(tokens)), atol=1e-6)
    assert served_vit.before_scale(linear, nn.Identity()) is linear


def test_two_heads_are_one_linear_layer() -> None:
    first, second, tokens = nn.Linear(6, 4), nn.Linear(6, 4), torch.rand(5, 2, 6)
    expected = (first(tokens[:, 0]) + second(tokens[:, 1])) / 2
    assert torch.allclose(served_vit.merged_heads(first, second)(tokens.flatten(1)), expected, atol=1e-6)


def test_patches_of_pixels_equal_the_convolution_on_normalised_images() -> None:
    conv = nn.Conv2d(3, 5, 4, 4).double()
    scale, shift = torch.rand(3).double() + 0.1, torch.rand(3).double()
    pixels = torch.from_numpy(images(2).astype(np.float64) - 128)
    expected = conv(pixels.permute(0, 3, 1, 2) * scale[:, None, None] + shift[:, None, None])
    found = served_vit.LinearPatches(conv, scale, shift)(pixels)
    assert torch.allclose(found, expected.flatten(2).transpose(1, 2), atol=1e-9)


class Undecided(torch.nn.Module):
    """Takes a way that depends on the pixels: torch.export cannot follow it."""

    def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        return images_BHWC.float() if images_BHWC.sum() > 0 else -images_BHWC.float()


def test_an_architecture_that_cannot_be_exported_says_why_in_a_line():
    with pytest.raises(UserError) as caught:
        exported(Undecided(), torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
    assert caught.value.problem.startswith("this architecture cannot be exported: ")
    assert "data-dependent" in caught.value.problem.lower()
    assert "\n" not in caught.value.problem
