"""What is known of how weights' images were prepared, where it is known from, and that the rest is asked for."""

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as TorchvisionViT

from tests.models.foreign import as_jax, as_transformers_4
from vit_edge.errors import UserError
from vit_edge.models import zoo
from vit_edge.models.origin import preprocessing
from vit_edge.recipe import ModelConfig

SMALL = {"name": "vit_ti16", "patch_size": 8, "width": 48, "depth": 1, "heads": 3}
IMAGENET, HALF = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3)


def state(**changes):
    return zoo.create(ModelConfig(**SMALL | changes), 7, 32).state_dict()


def known(path, **changes):
    found = preprocessing(ModelConfig(**SMALL | {"weights": str(path)} | changes), 32)
    return found.mean, found.std


def written(path, tensors):
    torch.save(tensors, path) if path.suffix == ".pth" else save_file(tensors, path)
    return path


def test_what_is_given_comes_first(tmp_path):
    given = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    assert known(written(tmp_path / "w.pth", state()), **given) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    found = preprocessing(ModelConfig(name="vit_b16", weights="pretrained", crop=1.0, interpolation="bilinear"), 224)
    assert (found.crop, found.interpolation, found.mean) == (1.0, "bilinear", HALF[0])


def test_layouts_of_one_system_tell(tmp_path):
    theirs = TorchvisionViT(32, patch_size=8, num_layers=1, num_heads=3, hidden_dim=48, mlp_dim=192)
    assert known(written(tmp_path / "torchvision.pth", theirs.state_dict())) == IMAGENET
    np.savez(tmp_path / "jax.npz", **as_jax(state(), heads=3))
    assert known(tmp_path / "jax.npz") == HALF
    assert known(written(tmp_path / "deit.pth", state(name="deit_ti16")), name="deit_ti16") == IMAGENET
    mae = {**state(), "decoder_pos_embed": torch.zeros(1)}
    assert known(written(tmp_path / "mae.pth", mae)) == IMAGENET


def test_files_beside_the_weights_tell(tmp_path):
    names = as_transformers_4(state())
    written(tmp_path / "model.safetensors", {key: tensor.contiguous() for key, tensor in names.items()})
    config = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3, "resample": 2, "do_center_crop": True,
              "size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    found = preprocessing(ModelConfig(**SMALL, weights=str(tmp_path)), 32)
    assert (found.mean, found.interpolation, found.crop) == ((0.1,) * 3, "bilinear", 0.875)
    assert known(tmp_path / "model.safetensors") == ((0.1,) * 3, (0.2,) * 3)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"mean": [0.3] * 3, "std": [0.4] * 3}}))
    assert known(tmp_path) == ((0.3,) * 3, (0.4,) * 3)
    written(tmp_path / "another.pth", names)
    with pytest.raises(UserError, match="is not known"):
        known(tmp_path / "another.pth")


def test_a_broken_file_beside_the_weights_is_named(tmp_path):
    written(tmp_path / "model.safetensors", state())
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.5]}')
    with pytest.raises(UserError, match="preprocessor_config"):
        known(tmp_path)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("deit3_small_patch16_224", 0.485), ("mobilenetv3_small_050", 0.485), ("vit_base_patch16_224.mae", 0.485),
     ("vit_base_patch16_224.augreg_in21k", 0.5), ("vit_base_patch32_224", 0.5), ("vit_b32", 0.5)],
)  # fmt: skip
def test_timms_configuration_tells_where_all_that_is_published_agrees(tmp_path, name, mean):
    path = written(tmp_path / "w.pth", {"a": torch.ones(1)})
    assert preprocessing(ModelConfig(name=name, weights=str(path)), 224).mean[0] == mean


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "vit_b16"}, "the published weights of vit_b16 differ (mean 0.48"),
        ({"name": "vit_ti16"}, "the published weights of vit_ti16 differ (mean 0.485 or 0.5)"),
        ({"name": "vit_base_patch16_224"}, "the published weights of vit_base_patch16_224 differ"),
        (SMALL, "no weights of this vit_ti16 are published"),
        ({"name": "deit_l32"}, "no weights of this deit_l32 are published"),
    ],
)
def test_what_nothing_tells_is_asked_for(tmp_path, changes, problem):
    path = written(tmp_path / "w.pth", state())
    with pytest.raises(UserError) as caught:
        preprocessing(ModelConfig(**changes, weights=str(path)), 224, "teacher.model.")
    assert problem in caught.value.problem
    assert "--set teacher.model.mean=[0.5,0.5,0.5] --set teacher.model.std=[0.5,0.5,0.5]" in caught.value.fix
    assert "[0.485,0.456,0.406]" in caught.value.fix


def test_weights_that_nobody_published_are_refused_at_once():
    with pytest.raises(UserError, match="no published weights of deit_b32"):
        preprocessing(ModelConfig(name="deit_b32", weights="pretrained"), 224)


def test_names_with_the_same_tensors_have_the_same_tensors():
    for ours, theirs in zoo.SAME_TENSORS.items():
        with torch.device("meta"):
            own, published = zoo.create(ModelConfig(name=ours), 1000, 224), timm.create_model(theirs)
        shapes = {key: tensor.shape for key, tensor in own.state_dict().items()}
        assert shapes == {key: tensor.shape for key, tensor in published.state_dict().items()}


def test_only_our_own_weights_are_the_cards(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(UserError, match="is not known"):
        known(written(tmp_path / "another.pth", state()))
