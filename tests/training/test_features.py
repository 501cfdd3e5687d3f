"""Features of a ViT and of CNNs on the same places, and a student that learns from them."""

from pathlib import Path

import pytest
import torch

from tests.training.small import MODEL, metrics_of, small, weights
from vit_edge.errors import UserError
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.pipeline import Pipeline
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig
from vit_edge.training.features import feature_shape, last_features, places


def classifier(size: int = 32, **config: object) -> Classifier:
    torch.manual_seed(0)
    backbone = zoo.create(ModelConfig(**config), 10, size)
    return Classifier(backbone, Preprocessing(image_size=size)).eval()


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"name": "vit_ti16", "patch_size": 8, "width": 32, "depth": 1, "heads": 2}, (32, 4)),
        ({"name": "deit_ti16", "patch_size": 8, "width": 32, "depth": 1, "heads": 2}, (32, 4)),
        ({"name": "vit_ti16", "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "readout": "mean"}, (32, 4)),
        ({"name": "mobilenetv4_conv_small_035"}, (960, 1)),
        ({"name": "resnet10t"}, (512, 1)),
        ({"name": "test_vit"}, (64, 2)),
        ({"name": "swin_tiny_patch4_window7_224"}, (768, 7)),
    ],
)
def test_every_kind_of_model_has_a_map(config: dict, shape: tuple[int, int]) -> None:
    model = classifier(224 if "swin" in config["name"] else 32, **config)
    found = feature_shape(model)
    assert found[1] == shape[1]
    pixels = torch.randint(0, 256, (2, 3, model.image_size, model.image_size), dtype=torch.uint8)
    with torch.no_grad():
        logits, map_BDhw = last_features(model, pixels)
        torch.testing.assert_close(logits, model(pixels), atol=1e-5, rtol=1e-4)
    assert map_BDhw.shape == (2, found[0], *([found[1]] * 2))


def test_a_place_holds_what_its_patch_shows() -> None:
    """Of a ViT without attention's mixing, the token of the patch in the second row and first column."""
    model = classifier(name="vit_ti16", patch_size=8, width=32, depth=1, heads=2)
    grey = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    lit = grey.clone()
    lit[:, :, 8:16, 0:8] = 255
    with torch.no_grad():
        change = (last_features(model, lit)[1] - last_features(model, grey)[1]).abs().sum(dim=1)[0]
    assert divmod(int(change.argmax()), 4) == (1, 0)


def test_places_average() -> None:
    map_BDhw = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert places(map_BDhw, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert places(map_BDhw, None).flatten().tolist() == [7.5]


@pytest.mark.parametrize("kind", ["tokens", "pooled"])
@pytest.mark.parametrize("student", [MODEL, {"name": "mobilenetv4_conv_small_035"}])
def test_a_student_learns_from_features(tmp_path: Path, kind: str, student: dict) -> None:
    distillation = {"labels": 0.0, "kl": 0.0, "dist": 0.0, "features": 1.0, "feature_kind": kind, "cache": False}
    Pipeline(small(student__model=student, student__distillation=distillation), tmp_path, "cpu").run("student")
    losses = [line["loss"] for line in metrics_of(tmp_path)]
    assert losses[-1] < losses[0] - 0.02
    assert not [name for name in weights(tmp_path) if "projection" in name]


def test_a_model_without_a_map_is_refused() -> None:
    model = classifier(name="vit_ti16", patch_size=8, width=32, depth=1, heads=2)
    whole = model.backbone.forward_features
    model.backbone.forward_features = lambda images: whole(images)[:, :-1]
    with pytest.raises(UserError, match=r"gives no feature map.*15 tokens are no square map.*\n.*features to 0"):
        feature_shape(model)
