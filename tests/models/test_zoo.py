"""Models by name: sizes, geometry, and the mistakes that people make with them."""

import subprocess
import sys

import pytest
import timm
import torch

from vit_edge.errors import UserError
from vit_edge.models import catalogue, origin, zoo
from vit_edge.models.classifier import multiply_adds
from vit_edge.models.vit import VisionTransformer
from vit_edge.recipe import ModelConfig


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "published"), zoo.PUBLISHED_AS.items())
def test_parameters_equal_timms(name, published):
    config = ModelConfig(name=name)
    with torch.device("meta"):
        ours = zoo.create(config, 1000, zoo.published_config(published).input_size[-1])
        theirs = timm.create_model(published, num_classes=1000)
    assert parameters(ours) == parameters(theirs)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "millions"),
    [("vit_ti16", 5.7), ("vit_s16", 22.1), ("vit_b16", 86.6), ("vit_b32", 88.2), ("vit_l16", 304), ("vit_l32", 307),
     ("vit_h14", 632)],
)  # fmt: skip
def test_parameters_equal_the_papers(name, millions):
    listed = catalogue.listed(name)
    assert listed.parameters / 1e6 == pytest.approx(millions, rel=0.005)
    assert listed.image_size == 224


def test_hybrid_equals_timms():
    torch.manual_seed(0)
    theirs = timm.create_model("vit_base_r50_s16_224", img_size=64, num_classes=5, depth=1).eval()
    ours = zoo.create(ModelConfig(name="r50_vit_b16", depth=1), 5, 64).eval()
    ours.load_state_dict(theirs.state_dict())
    images_BCHW = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images_BCHW), theirs(images_BCHW), atol=1e-4, rtol=0)


def test_a_stem_of_our_own_before_any_vit():
    model = zoo.create(ModelConfig(name="vit_ti16", stem=(16, 32), width=64, depth=1), 10, 28)
    assert isinstance(model, VisionTransformer)
    assert model.patch_embed.grid == (7, 7)
    assert model(torch.zeros(2, 3, 28, 28)).shape == (2, 10)


def test_geometry_overrides_the_names_own():
    config = ModelConfig(name="vit_s16", patch_size=7, width=128, depth=3, readout="mean", drop_path=0.1)
    geometry = zoo.create(config, 10, 28).config
    assert (geometry.patch_size, geometry.width, geometry.depth, geometry.heads) == (7, 128, 3, 2)
    assert (geometry.readout, geometry.drop_path, geometry.classes) == ("mean", 0.1, 10)


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (128, 2), (96, 2), (80, 1), (48, 1), (100, 2), (320, 5)])
def test_heads_are_64_wide_or_nearly(width, heads):
    assert zoo.vit_config(ModelConfig(name="vit_b16", width=width), 10, 224).heads == heads


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet18", "swin_tiny_patch4_window7_224"])
def test_timm_architectures_at_another_size(name):
    with torch.device("meta"):
        model = zoo.create(ModelConfig(name=name, drop_path=0.1), 10, 64).eval()
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize(
    ("settings", "image_size", "problem", "fix"),
    [
        ({"name": "vit_ti61"}, 224, "unknown model 'vit_ti61'", "vit_ti16"),
        ({"name": "mobilenetv3_smal_050"}, 224, "unknown model", "mobilenetv3_small_050"),
        ({"name": "resnet18.a9_in1k"}, 224, "unknown weights of resnet18 'a9_in1k'", "in1k"),
        ({"name": "vit_ti16"}, 28, "H = W = 28 px is not a multiple of the patch side P = 16", "image_size is 32"),
        ({"name": "r50_vit_b16", "patch_size": 3}, 224, "H = W = 14", "image_size is 240"),
        ({"name": "vit_ti16", "width": 100, "heads": 3}, 224, "width 100 is not a multiple of heads 3", "is 99"),
        ({"name": "resnet18", "width": 100}, 224, "width has no effect on timm's resnet18", "leave it out"),
        ({"name": "resnet18", "readout": "mean"}, 224, "readout has no effect", "leave it out"),
        ({"name": "vgg11", "drop_path": 0.1}, 224, "drop_path has no effect on timm's vgg11", "leave it out"),
        ({"name": "deit_ti16", "readout": "mean"}, 224, "distillation tokens", "vit_ti16"),
        ({"name": "r50_vit_b16", "stem": (8,)}, 224, "has its ResNet", "leave `stem` out"),
        ({"name": "efficientformer_l1"}, 64, "efficientformer_l1 does not take images of 64 px", "its own 224"),
        ({"name": "mvitv2_tiny"}, 28, "mvitv2_tiny does not take images of 28 px", "its own 224"),
    ],
)
def test_mistakes_are_named_with_their_fix(settings, image_size, problem, fix):
    with pytest.raises(UserError) as caught:
        zoo.create(ModelConfig(**settings), 10, image_size)
    assert problem in caught.value.problem
    assert fix in caught.value.fix


def test_preprocessing_from_scratch_takes_the_whole_image():
    ours = origin.preprocessing(ModelConfig(name="vit_ti16"), 28)
    assert (ours.image_size, ours.crop, ours.mean, ours.std) == (28, 1.0, (0.5,) * 3, (0.5,) * 3)
    cnn = origin.preprocessing(ModelConfig(name="resnet18"), 28)
    assert (cnn.crop, cnn.mean) == (1.0, (0.485, 0.456, 0.406))


def test_preprocessing_of_published_weights_is_timms():
    ours = origin.preprocessing(ModelConfig(name="vit_b16", weights="pretrained"), 224)
    assert (ours.crop, ours.mean, ours.interpolation) == (0.9, (0.5,) * 3, "bicubic")
    deit = origin.preprocessing(ModelConfig(name="deit_ti16", weights="pretrained"), 224)
    assert (deit.crop, deit.mean) == (0.9, (0.485, 0.456, 0.406))


def test_multiply_adds_equal_a_count_by_hand():
    tokens, width, heads, depth, patch, classes = 1 + 16, 96, 2, 3, 8, 10
    model = zoo.create(ModelConfig(name="vit_ti16", patch_size=patch, width=width, depth=depth), classes, 32)
    assert model.config.heads == heads
    linear = tokens * (3 * width * width + width * width + 2 * width * 4 * width)
    attention = 2 * tokens * tokens * width
    last = tokens * 2 * width * width + 2 * width * width + 2 * width * 4 * width + 2 * tokens * width
    expected = 16 * 3 * patch * patch * width + (depth - 1) * (linear + attention) + last + width * classes
    assert multiply_adds(model, 32) == expected
    model.set_fused_attention(False)
    assert multiply_adds(model, 32) == expected
    assert model.patch_embed.proj.weight.device.type == "cpu"


def test_multiply_adds_of_a_cnn_are_the_published():
    assert multiply_adds(timm.create_model("resnet18"), 224) / 1e9 == pytest.approx(1.82, abs=0.01)


def test_native_image_size_is_the_weights_own():
    assert zoo.native_image_size(ModelConfig(name="vit_l32")) == 224
    assert zoo.native_image_size(ModelConfig(name="vit_l32", weights="pretrained")) == 384
    assert zoo.native_image_size(ModelConfig(name="swin_base_patch4_window12_384")) == 384


def test_our_models_need_no_timm():
    code = (
        "import sys; sys.modules['timm'] = None\n"
        "from vit_edge.models import origin, zoo\n"
        "from vit_edge.recipe import ModelConfig\n"
        "config = ModelConfig(name='vit_ti16', depth=1)\n"
        "zoo.create(config, 10, 32), origin.preprocessing(config, 32)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
