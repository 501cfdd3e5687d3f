"""From pixels to logits, and saved models."""

import json

import pytest
import torch
import torch.nn.functional as F

from vit_edge.errors import UserError
from vit_edge.models import origin, zoo
from vit_edge.models.card import read_card
from vit_edge.models.classifier import Classifier, load, save
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig

CONFIG = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=1)
CLASSES = ["ant", "bee", "cat"]


def classifier(size: int = 32, **changes) -> Classifier:
    torch.manual_seed(0)
    preprocessing = Preprocessing(image_size=size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), **changes)
    return Classifier(zoo.create(CONFIG, len(CLASSES), size), preprocessing).eval()


def pixels(size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_pixels_are_normalised_by_the_models_own_statistics():
    model = classifier()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    expected_BCHW = (pixels() / 255 - mean) / std
    torch.testing.assert_close(model.normalise(pixels()), expected_BCHW)
    torch.testing.assert_close(model(pixels()), model.backbone(expected_BCHW), atol=1e-5, rtol=0)
    torch.testing.assert_close(model(pixels()), model(pixels().float()))


@pytest.mark.parametrize(("interpolation", "mode"), [("bicubic", "bicubic"), ("bilinear", "bilinear")])
def test_a_view_of_another_size_is_resized(interpolation, mode):
    model = classifier(interpolation=interpolation)
    resized = F.interpolate(pixels(48).float(), size=(32, 32), mode=mode, antialias=True).clamp(0, 255)
    torch.testing.assert_close(model(pixels(48)), model(resized))


def test_a_saved_model_comes_back_the_same(tmp_path):
    model = classifier()
    save(tmp_path, model, CONFIG, CLASSES)
    loaded = load(tmp_path)
    assert torch.equal(loaded.classifier(pixels()), model(pixels()))
    assert (loaded.config, loaded.classes, loaded.preprocessing) == (CONFIG, CLASSES, model.preprocessing)
    assert not loaded.classifier.training


def test_a_saved_timm_model_comes_back_the_same(tmp_path):
    config = ModelConfig(name="mobilenetv3_small_050")
    model = Classifier(zoo.create(config, 3, 32), origin.preprocessing(config, 32))
    model.train()(pixels(32).repeat(4, 1, 1, 1))
    save(tmp_path, model.eval(), config, CLASSES)
    loaded = load(tmp_path).classifier
    torch.testing.assert_close(loaded(pixels()), model(pixels()), atol=1e-6, rtol=0)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_the_card_does_not_depend_on_where_the_weights_came_from(tmp_path):
    source = tmp_path / "weights.pth"
    source.write_bytes(b"x")
    save(tmp_path, classifier(), CONFIG.model_copy(update={"weights": str(source)}), CLASSES)
    source.unlink()
    assert read_card(tmp_path).model == CONFIG


def test_weights_of_a_saved_model_bring_its_preprocessing(tmp_path):
    save(tmp_path, classifier(), CONFIG, CLASSES)
    config = CONFIG.model_copy(update={"weights": str(tmp_path / "model.safetensors")})
    found = origin.preprocessing(config, 64)
    assert found == classifier().preprocessing.model_copy(update={"image_size": 64})


def break_card(folder):
    (folder / "model.json").write_text('{"schema": "vit-edge/model/1", "model": 3}')


def name_another_model(folder):
    card = json.loads((folder / "model.json").read_text())
    card["model"]["width"] = 64
    (folder / "model.json").write_text(json.dumps(card))


def truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "model.json").unlink(), "holds no model.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (break_card, "model.json is not valid: model"),
        (name_another_model, "does not hold the weights of vit_ti16"),
        (truncate_weights, "cannot be read"),
    ],
)
def test_a_broken_saved_model_is_refused(tmp_path, damage, problem):
    save(tmp_path, classifier(), CONFIG, CLASSES)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert problem in caught.value.problem


def test_attention_of_timms_models_can_be_made_explicit():
    config = ModelConfig(name="vit_tiny_patch16_224")
    model = Classifier(zoo.create(config, 3, 32), origin.preprocessing(config, 32)).eval()
    fused = model(pixels())
    model.set_fused_attention(False)
    assert not model.backbone.blocks[0].attn.fused_attn
    torch.testing.assert_close(model(pixels()), fused, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["deit_ti16", "mobilenetv3_small_050", "swin_tiny_patch4_window7_224"])
def test_exports_from_pixels_with_any_batch(name):
    config = ModelConfig(name=name, depth=1 if name in zoo.OURS else None)
    model = Classifier(zoo.create(config, 3, 64), origin.preprocessing(config, 64)).eval()
    model.set_fused_attention(False)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    exported = torch.export.export(model, (pixels(64),), dynamic_shapes=(batch,), strict=False).module()
    five = pixels(64).repeat(3, 1, 1, 1)[:5]
    torch.testing.assert_close(exported(five), model(five))
