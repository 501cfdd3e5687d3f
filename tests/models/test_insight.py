"""Insight on cases whose answers are known by hand, and on timm's models beside ours."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vit_edge.models import figures, insight
from vit_edge.models.classifier import Classifier
from vit_edge.models.insight import Tokens
from vit_edge.models.vit import VisionTransformer, ViTConfig
from vit_edge.preprocess import Preprocessing

CPU = torch.device("cpu")
SMALL = ViTConfig(image_size=32, patch_size=8, width=16, depth=2, heads=2, classes=5)


def classifier(backbone: torch.nn.Module) -> Classifier:
    return Classifier(backbone, Preprocessing(image_size=32)).eval()


def images(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def test_distances_are_between_the_patches_centres_in_pixels():
    between = insight.patch_distances((2, 2), 32)
    diagonal = 16 * 2**0.5
    expected = [[0, 16, 16, diagonal], [16, 0, diagonal, 16], [16, diagonal, 0, 16], [diagonal, 16, 16, 0]]
    torch.testing.assert_close(between, torch.tensor(expected, dtype=torch.float32))


def test_mean_distance_of_uniform_attention_and_of_attention_to_itself():
    between = insight.patch_distances((2, 2), 32)
    heads = torch.stack([torch.full((5, 5), 0.2), torch.eye(5)])[None]
    uniform, itself = insight.mean_distance(heads, 1, between)
    assert uniform.item() == pytest.approx((0 + 16 + 16 + 16 * 2**0.5) / 4)
    assert itself.item() == 0


def test_what_goes_to_the_class_token_has_no_distance():
    attention = torch.zeros(1, 1, 3, 3)
    attention[..., 0] = 0.9
    attention[0, 0, 1, 2] = attention[0, 0, 2, 1] = 0.1
    assert insight.mean_distance(attention, 1, insight.patch_distances((1, 2), 32)).item() == pytest.approx(16)


def test_a_model_that_attends_uniformly_has_the_uniform_distance():
    backbone = VisionTransformer(SMALL)
    for block in backbone.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    found = insight.look(classifier(backbone), images(3), CPU)
    np.testing.assert_allclose(found.distances_Lh, np.full((2, 2), found.uniform_distance), rtol=1e-5)


def test_similarity_of_known_positions():
    positions = np.array([[1.0, 0], [0, 2], [-3, 0], [1, 1]])
    similarity = insight.position_similarity(positions, (2, 2))
    np.testing.assert_allclose(similarity[0, 0], [[1, 0], [-1, 0.5**0.5]], atol=1e-12)
    np.testing.assert_allclose(similarity[1, 1, 0, 1], 0.5**0.5)


def test_class_and_register_tokens_have_no_place_in_the_grid():
    config = ViTConfig(**{**SMALL.__dict__, "registers": 3})
    backbone = VisionTransformer(config)
    tokens = insight.tokens_of(backbone)
    assert tokens == Tokens((4, 4), 4)
    np.testing.assert_allclose(insight.patch_positions(backbone, tokens), backbone.pos_embed[0, 4:].detach().double())


def test_components_are_those_of_the_filters():
    random = np.random.default_rng(0)
    first, second = (
        direction / np.linalg.norm(direction) for direction in (random.normal(size=12), random.normal(size=12))
    )
    second -= first * (first @ second)
    second /= np.linalg.norm(second)
    filters = 7 + np.outer(random.normal(size=50) * 10, first) + np.outer(random.normal(size=50), second)
    found = insight.principal_components(torch.from_numpy(filters.reshape(50, 3, 2, 2)), most=2)
    for component, direction in zip(found.components_MPPC, (first, second), strict=True):
        assert abs(component.transpose(2, 0, 1).flatten() @ direction) == pytest.approx(1, abs=0.02)
        assert component.flatten()[np.abs(component).argmax()] > 0
    assert found.count == 50
    assert found.shares_M[0] > 0.95
    assert found.shares_M.sum() == pytest.approx(1)


def test_timms_vit_gives_what_ours_gives_with_its_weights():
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    ).eval()
    ours = VisionTransformer(SMALL)
    ours.load_state_dict(theirs.state_dict())
    of_theirs, of_ours = (insight.look(classifier(model), images(3), CPU) for model in (theirs, ours))
    np.testing.assert_allclose(of_theirs.distances_Lh, of_ours.distances_Lh, rtol=1e-4)
    np.testing.assert_allclose(of_theirs.similarity_RCRC, of_ours.similarity_RCRC)
    assert of_theirs.missing == of_ours.missing == {}
    assert not any(module._forward_pre_hooks for module in theirs.modules())


@pytest.mark.parametrize("name", ["resnet10t", "swin_tiny_patch4_window7_224"])
def test_what_an_architecture_has_not_is_said_and_the_rest_is_drawn(tmp_path, name):
    options = {"img_size": 32} if name.startswith("swin") else {}
    found = insight.look(classifier(timm.create_model(name, num_classes=5, **options)), images(1), CPU)
    assert set(found.missing) == {"positions", "attention"}
    assert not any("\n" in why for why in found.missing.values())
    assert [path.name for path in figures.draw(found, tmp_path, title=name, image_size=32)] == ["filters.png"]


def test_figures_are_pictures(tmp_path):
    found = insight.look(classifier(VisionTransformer(SMALL)), images(2), CPU)
    drawn = figures.draw(found, tmp_path, title="small", image_size=32)
    assert [path.name for path in drawn] == ["filters.png", "positions.png", "attention.png"]
    for path in drawn:
        with Image.open(path) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
