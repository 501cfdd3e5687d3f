"""Weights from other systems give the very logits that they gave there, and what cannot be placed is said."""

import argparse
import re

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT

from tests.models.foreign import as_jax, as_jax_resnet, as_transformers_4
from vit_edge.errors import UserError
from vit_edge.models import origin, zoo
from vit_edge.models.checkpoints import load_weights
from vit_edge.models.classifier import Classifier, load, save
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig

CONFIG = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=2, heads=3)
DEIT = CONFIG.model_copy(update={"name": "deit_ti16"})
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def ours(config: ModelConfig = CONFIG, size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return randomised(zoo.create(config, 7, size))


def loaded(source, config=CONFIG, classes=7, size=32, role="teacher"):
    """A fresh model with the weights, and what was said."""
    torch.manual_seed(3)
    model, said = zoo.create(config, classes, size).eval(), []
    names = [str(k) for k in range(classes)]
    load_weights(model, str(source), config=config, classes=names, role=role, say=said.append)
    return model, "\n".join(said)


def refusal(source, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        loaded(source, **options)
    for line in (caught.value.problem, caught.value.fix):
        assert "\n" not in line
        assert len(line) < 400
    return caught.value


def assert_same(model: nn.Module, expected: nn.Module, images=IMAGES) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected(images), atol=1e-4, rtol=0)


def test_our_own_folder(tmp_path):
    model = ours()
    save(tmp_path, Classifier(model, origin.preprocessing(CONFIG, 32)), CONFIG, [str(i) for i in range(7)])
    assert_same(loaded(tmp_path)[0], model)
    assert_same(loaded(tmp_path / "model.safetensors")[0], model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1), "epoch": 3},
        lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}, "optimizer": {"state": {}}},
        lambda state: {"model_ema": {f"module._orig_mod.{k}": v for k, v in state.items()}, "model": {"other": 1}},
    ],
)
def test_a_training_programs_checkpoint(tmp_path, wrap):
    model = ours()
    torch.save(wrap(model.state_dict()), tmp_path / "checkpoint.pth")
    assert_same(loaded(tmp_path / "checkpoint.pth")[0], model)


def test_the_old_format_of_torch(tmp_path):
    model = ours()
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert_same(loaded(tmp_path / "old.pth")[0], model)


def test_torchvision(tmp_path):
    theirs = randomised(
        TorchvisionViT(32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=192, num_classes=7)
    )
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    model, said = loaded(tmp_path / "vit.pth")
    assert_same(model, theirs)
    assert "torchvision's layout" in said


def test_torchvisions_old_mlp_names(tmp_path):
    theirs = randomised(
        TorchvisionViT(32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=192, num_classes=7)
    )
    old = {re.sub(r"mlp\.(\d)", lambda m: f"mlp.linear_{'1' if m[1] == '0' else '2'}", k): v
           for k, v in theirs.state_dict().items()}  # fmt: skip
    torch.save(old, tmp_path / "vit.pth")
    assert_same(loaded(tmp_path / "vit.pth")[0], theirs)


@pytest.mark.parametrize(("config", "prefix"), [(CONFIG, "vit."), (DEIT, "deit.")])
def test_transformers_published_names(tmp_path, config, prefix):
    model = ours(config)
    save_file({k: v.contiguous() for k, v in as_transformers_4(model.state_dict(), prefix).items()},
              tmp_path / "model.safetensors")  # fmt: skip
    assert_same(loaded(tmp_path, config=config)[0], model)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize(("name", "config"), [("ViT", CONFIG), ("DeiT", DEIT), ("ViTMAE", CONFIG), ("Dinov2", CONFIG)])
def test_transformers_installed_names(tmp_path, name, config, size):
    import transformers

    geometry = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 192,
                "image_size": size, "patch_size": 8, "num_labels": 7}  # fmt: skip
    task = {"DeiT": "ForImageClassificationWithTeacher", "ViTMAE": "ForPreTraining", "Dinov2": "Model"}
    model_class = getattr(transformers, name + task.get(name, "ForImageClassification"))
    theirs = randomised(model_class(getattr(transformers, f"{name}Config")(**geometry)))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    model, _ = loaded(tmp_path / "theirs.pth", config=config, size=size, role="finetune")
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if name in ("ViT", "DeiT"):
            torch.testing.assert_close(model(images), theirs(images).logits, atol=1e-5, rtol=0)
            return
        if name == "ViTMAE":
            theirs = theirs.vit
            theirs.embeddings.config.mask_ratio = 0.0
            expected = theirs(images, noise=torch.arange((size // 8) ** 2)[None].expand(2, -1)).last_hidden_state
        else:
            expected = theirs(images).last_hidden_state
        _, record = model(images, intermediates=True)
        torch.testing.assert_close(record["encoded"], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3])
def test_the_epsilon_of_the_norms_comes_with_transformers_weights(tmp_path, epsilon):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, image_size=32, patch_size=8,
        num_labels=7, layer_norm_eps=epsilon,
    )  # fmt: skip
    theirs = randomised(transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path / "theirs")
    given = CONFIG.model_copy(update={"mean": (0.5,) * 3, "std": (0.5,) * 3})
    model, _ = loaded(tmp_path / "theirs", config=given)
    images = 1e-2 * torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(images).logits
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=0)
        (tmp_path / "saved").mkdir()
        save(tmp_path / "saved", Classifier(model, Preprocessing(image_size=32)), given, list("abcdefg"))
        again = load(tmp_path / "saved").classifier.backbone
        torch.testing.assert_close(again(images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [32, 48])
def test_jax_archives_give_what_timms_reader_gives(tmp_path, size):
    arrays = as_jax(ours().state_dict(), heads=3)
    np.savez(tmp_path / "vit.npz", **arrays)
    model, said = loaded(tmp_path / "vit.npz", size=size)
    if size == 32:
        theirs = TimmViT(**TIMM).eval()
        with torch.no_grad():
            theirs.load_pretrained(str(tmp_path / "vit.npz"))
        assert_same(model, theirs)
        assert_same(model, ours())
    assert ("positions resampled from 4×4 to 6×6" in said) == (size == 48)


def test_the_hybrids_jax_archive_gives_what_timms_reader_gives(tmp_path):
    config = ModelConfig(name="r50_vit_b16", depth=1, width=48, heads=3)
    model = randomised(zoo.create(config, 7, 32))
    state = model.state_dict()
    transformer = {key: tensor for key, tensor in state.items() if "backbone" not in key}
    arrays = as_jax(transformer, heads=3) | as_jax_resnet(state)
    np.savez(tmp_path / "hybrid.npz", **arrays)
    theirs = timm.create_model(
        "vit_base_r50_s16_224", img_size=32, num_classes=7, depth=1, embed_dim=48, num_heads=3
    ).eval()
    with torch.no_grad():
        theirs.load_pretrained(str(tmp_path / "hybrid.npz"))
    assert_same(theirs, model)
    assert_same(loaded(tmp_path / "hybrid.npz", config=config)[0], model)


def test_dinov2_with_layer_scale_folded(tmp_path):
    theirs = randomised(TimmViT(**TIMM, init_values=0.3))
    state = {**theirs.state_dict(), "mask_token": torch.zeros(1, 48)}
    torch.save(state, tmp_path / "dinov2.pth")
    model, said = loaded(tmp_path / "dinov2.pth")
    assert_same(model, theirs)
    assert "folded LayerScale" in said
    assert "left out" in said
    assert "mask_token" in said


def test_deit_3_whose_class_token_has_no_position(tmp_path):
    theirs = randomised(TimmViT(**TIMM, init_values=0.3, no_embed_class=True))
    torch.save({"model": theirs.state_dict()}, tmp_path / "deit3.pth")
    assert_same(loaded(tmp_path / "deit3.pth")[0], theirs)


def test_dino_with_its_projection_head(tmp_path):
    theirs = ours()
    encoder = {f"module.backbone.{k}": v for k, v in theirs.state_dict().items() if not k.startswith("head")}
    projection = {"module.head.mlp.0.weight": torch.ones(9, 48), "module.head.last_layer.weight_v": torch.ones(9, 9)}
    torch.save({"student": {}, "teacher": encoder | projection}, tmp_path / "dino.pth")
    model, said = loaded(tmp_path / "dino.pth", role="finetune")
    assert "left out" in said
    assert "head.mlp.0.weight" in said
    assert "has no head: replaced by a new one for 7 classes" in said
    assert_encoder_same(model, theirs)


def test_mae_with_its_decoder_into_a_mean_readout(tmp_path):
    theirs = ours()
    encoder = {k: v for k, v in theirs.state_dict().items() if not k.startswith("head")}
    decoder = {"mask_token": torch.ones(1, 1, 9), "decoder_pos_embed": torch.ones(1, 17, 9),
               "decoder_blocks.0.norm1.weight": torch.ones(9)}  # fmt: skip
    torch.save({"model": encoder | decoder}, tmp_path / "mae.pth")
    model, said = loaded(tmp_path / "mae.pth", role="finetune")
    assert_encoder_same(model, theirs)
    assert "decoder_pos_embed" in said
    mean = CONFIG.model_copy(update={"readout": "mean"})
    model, said = loaded(tmp_path / "mae.pth", config=mean, role="finetune")
    assert "the final norm" in said
    assert torch.equal(model.fc_norm.weight, theirs.norm.weight)


def assert_encoder_same(model: nn.Module, expected: nn.Module) -> None:
    with torch.no_grad():
        (_, found), (_, wanted) = model(IMAGES, intermediates=True), expected(IMAGES, intermediates=True)
    torch.testing.assert_close(found["encoded"], wanted["encoded"])


def test_timm_architectures_with_their_own_filter(tmp_path):
    config = ModelConfig(name="swin_tiny_patch4_window7_224")
    theirs = timm.create_model(config.name, img_size=64, num_classes=7).eval()
    torch.save({"model": theirs.state_dict()}, tmp_path / "swin.pth")
    model, said = loaded(tmp_path / "swin.pth", config=config, size=64)
    assert_same(model, theirs, torch.randn(1, 3, 64, 64))
    model, said = loaded(tmp_path / "swin.pth", config=config, size=128, classes=3, role="finetune")
    assert "timm resampled" in said
    assert "replaced by a new one for 3 classes" in said


def test_timms_dinov2_from_the_original_names(tmp_path):
    config = ModelConfig(name="vit_small_patch14_reg4_dinov2")
    theirs = randomised(timm.create_model(config.name, img_size=28, num_classes=7))
    state = theirs.state_dict()
    cls_token = state.pop("cls_token") - 0.5
    state["pos_embed"] = torch.cat([torch.full((1, 1, 384), 0.5), state["pos_embed"]], dim=1)
    state["register_tokens"] = state.pop("reg_token")
    torch.save({**state, "cls_token": cls_token, "mask_token": torch.zeros(1, 384)}, tmp_path / "dinov2.pth")
    assert_same(loaded(tmp_path / "dinov2.pth", config=config, size=28)[0], theirs, IMAGES[:, :, :28, :28])


def test_a_cnns_head_is_replaced_for_other_classes(tmp_path):
    config = ModelConfig(name="mobilenetv3_small_050")
    torch.save(timm.create_model(config.name, num_classes=1000).state_dict(), tmp_path / "cnn.pth")
    model, said = loaded(tmp_path / "cnn.pth", config=config, role="finetune")
    assert "has a head for 1000 classes" in said
    assert not model.classifier.weight.any()


def test_another_head_is_refused_for_a_teacher(tmp_path):
    torch.save(randomised(TimmViT(**{**TIMM, "num_classes": 10})).state_dict(), tmp_path / "ten.pth")
    error = refusal(tmp_path / "ten.pth")
    assert "a head for 10 classes" in error.problem
    assert "expected one for 7 classes" in error.problem
    assert "fine-tune the teacher" in error.fix


def test_a_pre_training_head_goes_with_the_head_it_belongs_to(tmp_path):
    state = ours().state_dict() | {"pre_logits.fc.weight": torch.eye(48), "pre_logits.fc.bias": torch.zeros(48)}
    torch.save(state, tmp_path / "vit.pth")
    assert "no place for pre_logits.fc.weight" in refusal(tmp_path / "vit.pth").problem
    _, said = loaded(tmp_path / "vit.pth", classes=3, role="finetune")
    assert "replaced" in said


@pytest.mark.parametrize(
    ("config", "problem", "fix"),
    [
        ({"width": 96, "heads": 3}, "another shape: cls_token 1×1×48, expected 1×1×96", "width 48, depth 2"),
        ({"depth": 3}, "nothing for 12 of 42: blocks.2.norm1.weight", "depth 2"),
        ({"depth": 1}, "no place for blocks.1.norm1.weight", "depth 2"),
        ({"patch_size": 16}, "patch_embed.proj.weight 48×3×8×8, expected 48×3×16×16", "patch_size 8"),
    ],
)
def test_another_geometry_is_refused_with_the_files_own(tmp_path, config, problem, fix):
    torch.save(ours().state_dict(), tmp_path / "vit.pth")
    error = refusal(tmp_path / "vit.pth", config=CONFIG.model_copy(update=config))
    assert problem in error.problem
    assert fix in error.fix


def test_another_architecture_is_refused_with_its_name(tmp_path):
    torch.save(zoo.create(ModelConfig(name="deit_ti16", depth=12), 7, 32).state_dict(), tmp_path / "deit.pth")
    assert "deit_ti16" in refusal(tmp_path / "deit.pth", config=ModelConfig(name="vit_ti16")).fix
    torch.save(timm.create_model("resnet18", num_classes=7).state_dict(), tmp_path / "cnn.pth")
    assert "does not fit vit_ti16" in refusal(tmp_path / "cnn.pth").problem
    assert "looks like a ResNet" in refusal(tmp_path / "cnn.pth").fix
    assert "mobilenetv3" in refusal(tmp_path / "cnn.pth", config=ModelConfig(name="mobilenetv3_small_050")).problem
    swin = ModelConfig(name="swin_tiny_patch4_window7_224")
    assert "swin_tiny" in refusal(tmp_path / "cnn.pth", config=swin, size=64).problem


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mobilenetv3_small_050", "a MobileNet or an EfficientNet"),
        ("convnext_atto", "a ConvNeXt"),
        ("repvit_m0_9", "a RepViT"),
        ("swin_tiny_patch4_window7_224", "a Swin Transformer"),
    ],
)
def test_the_family_is_told(tmp_path, name, family):
    with torch.device("meta"):
        shapes = timm.create_model(name).state_dict()
    torch.save({key: torch.zeros(1) for key in shapes}, tmp_path / "file.pth")
    assert f"looks like {family}:" in refusal(tmp_path / "file.pth").fix


def test_nan_weights_are_refused(tmp_path):
    state = ours().state_dict()
    state["blocks.1.mlp.fc1.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "nan.pth")
    assert "NaN or infinite weights: blocks.1.mlp.fc1.weight" in refusal(tmp_path / "nan.pth").problem


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        (lambda key: "qkv.bias" not in key, "nothing for 2 of 30: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias"),
        (lambda key: key.startswith(("patch", "blocks.0", "blocks.1.norm1")), "nothing for"),
    ],
)
def test_a_part_of_a_model_is_told_from_another_geometry(tmp_path, left, problem):
    torch.save({key: tensor for key, tensor in ours().state_dict().items() if left(key)}, tmp_path / "part.pth")
    error = refusal(tmp_path / "part.pth")
    assert problem in error.problem
    assert "agree, in timm's layout: the file is a part (a shard, an adapter)" in error.fix
    assert "save the whole model.state_dict()" in error.fix
