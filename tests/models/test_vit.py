"""Our ViT: the paper's arithmetic, and equality with timm and torchvision on the same weights.

B batch, T tokens, D width, h heads.
"""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn

from vit_edge.models.layouts import canonical
from vit_edge.models.vit import ConvStem, DropPath, VisionTransformer, ViTConfig, resample_positions

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 7}
TIMM_SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


def small(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    return randomised(VisionTransformer(ViTConfig(**{**SMALL, **changes})))


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter off its initial value, so that no bias is zero and no norm is the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def images(size: int = 32, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(2))


def assert_same_logits(ours: VisionTransformer, theirs: nn.Module, size: int = 32) -> None:
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(images(size)), theirs.eval()(images(size)), atol=1e-4, rtol=0)


def test_worked_example_of_the_specification():
    model = VisionTransformer(ViTConfig(image_size=4, patch_size=2, width=4, depth=1, heads=1, classes=2)).eval()
    model.set_fused_attention(False)
    patches_NC = torch.zeros(4, 12)
    patches_NC[:, :4] = torch.tensor(
        [[0.8, -0.3, 0.5, 1.2], [1.1, 0.2, -0.4, 0.7], [-0.2, 0.9, 0.6, -0.1], [0.5, -0.7, 1.0, 0.3]]
    )
    positions_TD = torch.tensor(
        [[0.0, 0, 0, 0], [0.1, 0, -0.1, 0], [0, 0.1, 0, -0.1], [-0.1, 0, 0.1, 0], [0, -0.1, 0, 0.1]]
    )
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_(torch.eye(12)[:4].reshape(4, 3, 2, 2))
        model.patch_embed.proj.bias.zero_()
        model.cls_token.fill_(0.1)
        model.pos_embed.copy_(positions_TD)
    images_BCHW = nn.functional.fold(patches_NC.T[None], output_size=(4, 4), kernel_size=2, stride=2)
    embedded_TD = model.embed(images_BCHW)[0]
    expected_TD = torch.tensor(
        [
            [0.1, 0.1, 0.1, 0.1],
            [0.9, -0.3, 0.4, 1.2],
            [1.1, 0.3, -0.4, 0.6],
            [-0.3, 0.9, 0.7, -0.1],
            [0.5, -0.8, 1, 0.4],
        ]
    )
    torch.testing.assert_close(embedded_TD, expected_TD)

    attention, record = model.blocks[0].attn, {}
    with torch.no_grad():
        attention.qkv.weight.copy_(torch.eye(4).repeat(3, 1))
        attention.qkv.bias.zero_()
        attention(embedded_TD[None], record, "weights")
    expected_T = torch.tensor([0.02, 0.11, 0.08, 0.06, 0.055]).softmax(0)
    torch.testing.assert_close(record["weights"][0, 0, 0], expected_T, atol=1e-6, rtol=0)
    assert record["weights"][0, 0, 0].min() > 0.19
    assert record["weights"][0, 0, 0].max() < 0.21


@pytest.mark.parametrize("size", [224, 96])
def test_logits_equal_timms(size):
    ours = VisionTransformer(ViTConfig(image_size=size, width=192, heads=3))
    theirs = randomised(timm.create_model("vit_tiny_patch16_224", img_size=size))
    assert_same_logits(ours, theirs, size)


def test_mean_readout_equals_timms():
    assert_same_logits(small(readout="mean"), randomised(TimmViT(**TIMM_SMALL, global_pool="avg")))


def test_mean_readout_without_class_token_equals_timms():
    theirs = randomised(TimmViT(**TIMM_SMALL, global_pool="avg", class_token=False))
    assert_same_logits(small(readout="mean", class_token=False), theirs)


def test_registers_layer_scale_and_positions_of_patches_alone_equal_timms():
    theirs = randomised(TimmViT(**TIMM_SMALL, reg_tokens=4, init_values=1e-5, no_embed_class=True))
    assert_same_logits(small(registers=4, layer_scale=1e-5, position_prefix=False), theirs)


def test_distilled_equals_timms_in_evaluation_and_gives_both_heads_in_training():
    ours, theirs = small(distillation_token=True), randomised(VisionTransformerDistilled(**TIMM_SMALL))
    assert_same_logits(ours, theirs)
    theirs.set_distilled_training(True)
    pair, expected = ours.train()(images()), theirs.train()(images())
    torch.testing.assert_close(pair, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close((pair[0] + pair[1]) / 2, ours.eval()(images()))


@pytest.mark.parametrize("heads", [1, 4])
def test_logits_equal_torchvisions(heads):
    from torchvision.models import VisionTransformer as TorchvisionViT

    theirs = randomised(
        TorchvisionViT(image_size=32, patch_size=8, num_layers=2, num_heads=heads, hidden_dim=48, mlp_dim=192)
    )
    ours = small(classes=1000, heads=heads)
    ours.load_state_dict(canonical(theirs.state_dict()).tensors)
    with torch.no_grad():
        torch.testing.assert_close(ours(images()), theirs(images()), atol=1e-4, rtol=0)


def test_positions_are_resampled_as_timm_does():
    pos_embed_1TD = torch.randn(1, 1 + 49, 8)
    ours = resample_positions(pos_embed_1TD, (12, 10), prefix_tokens=1)
    torch.testing.assert_close(ours, resample_abs_pos_embed(pos_embed_1TD, [12, 10]))
    assert torch.equal(ours[:, :1], pos_embed_1TD[:, :1])


def test_positions_are_resampled_in_two_dimensions_not_along_the_sequence():
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    pos_embed_1TD = torch.stack([rows.flatten(), columns.flatten()], dim=-1)[None]
    resampled = resample_positions(pos_embed_1TD, (12, 12), prefix_tokens=0, mode="bilinear").reshape(12, 12, 2)
    assert resampled[:, :, 0].std(dim=1).max() < 1e-5, "every patch of a row keeps its row"
    assert resampled[:, :, 1].std(dim=0).max() < 1e-5, "every patch of a column keeps its column"

    sequence_1DT = pos_embed_1TD.transpose(1, 2)
    mixed = nn.functional.interpolate(sequence_1DT, size=144, mode="linear").transpose(1, 2).reshape(12, 12, 2)
    assert mixed[:, :, 0].std(dim=1).max() > 0.1, "along the sequence rows mix: the two must differ"


def test_positions_that_are_no_square_grid_are_refused():
    with pytest.raises(ValueError, match="50 patch positions are no square grid"):
        resample_positions(torch.zeros(1, 50, 4), (5, 5), prefix_tokens=0)


def test_fused_and_explicit_attention_agree():
    model = small()
    fused = model(images())
    model.set_fused_attention(False)
    torch.testing.assert_close(model(images()), fused, atol=1e-5, rtol=0)


def test_every_intermediate_has_a_name():
    model = small()
    model.set_fused_attention(False)
    logits, record = model(images(), intermediates=True)
    torch.testing.assert_close(logits, model(images()), atol=1e-5, rtol=0)
    assert list(record) == [
        "embedded", "blocks.0.attention", "blocks.0", "blocks.1.attention", "blocks.1", "encoded", "features",
    ]  # fmt: skip
    assert record["blocks.1.attention"].shape == (3, 3, 17, 17)
    torch.testing.assert_close(record["blocks.1.attention"].sum(-1), torch.ones(3, 3, 17))
    assert record["features"].shape == (3, 48)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("changes", [{}, {"distillation_token": True}, {"registers": 2}, {"readout": "mean"}])
def test_what_the_head_does_not_read_changes_neither_logits_nor_gradients(changes, fused):
    model = small(**changes).double()
    model.set_fused_attention(fused)
    whole = model.forward_head(model.forward_features(images().double()))
    whole.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(images().double())
    logits.square().sum().backward()
    torch.testing.assert_close(logits, whole, atol=1e-12, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-10, rtol=0)


def test_layer_decay_gives_each_block_a_smaller_rate_than_the_next():
    from timm.optim import param_groups_layer_decay

    model = small()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5, verbose=False)
    scale_of = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert scale_of[id(model.pos_embed)] == (0.125, 0.0)
    assert scale_of[id(model.patch_embed.proj.weight)] == (0.125, 0.05)
    assert scale_of[id(model.blocks[0].attn.qkv.weight)] == (0.25, 0.05)
    assert scale_of[id(model.blocks[1].attn.qkv.weight)] == (0.5, 0.05)
    assert scale_of[id(model.head.weight)] == (1.0, 0.05)


@pytest.mark.parametrize("changes", [{}, {"distillation_token": True}, {"readout": "mean"}])
def test_exports_with_any_batch(changes):
    model = small(**changes)
    model.set_fused_attention(False)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    exported = torch.export.export(model, (images(),), dynamic_shapes=({**batch},), strict=False).module()
    for count in (1, 5):
        torch.testing.assert_close(exported(images(count=count)), model(images(count=count)))


def test_patches_can_be_taken_from_any_feature_map():
    stem = ConvStem((8, 16))
    model = VisionTransformer(ViTConfig(**{**SMALL, "patch_size": 1}), stem).eval()
    assert model.patch_embed.grid == (8, 8)
    assert model.patch_embed.proj.weight.shape == (48, 16, 1, 1)
    assert model(images()).shape == (3, 7)
    assert stem(images()).shape == (3, 16, 8, 8)


def test_pre_training_head_has_a_hidden_layer_with_tanh():
    model = small(pre_logits=True)
    _, record = model(images(), intermediates=True)
    expected = model.pre_logits.fc(record["encoded"][:, 0]).tanh()
    torch.testing.assert_close(record["features"], expected)


@pytest.mark.parametrize(("width", "sigma"), [(192, 0.04), (768, 0.02), (1024, 0.02)])
def test_initial_weights_are_a_truncated_normal_that_is_wider_below_the_published_width(width, sigma):
    model = VisionTransformer(ViTConfig(**{**SMALL, "width": width, "heads": 2}))
    for weight in (model.blocks[0].mlp.fc1.weight, model.patch_embed.proj.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(sigma, rel=0.1)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


def test_initial_biases_are_zero():
    model = VisionTransformer(ViTConfig(**{**SMALL, "width": 192}))
    assert not model.blocks[0].attn.qkv.bias.any()
    assert not model.head.bias.any()


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    branch = torch.ones(4000, 2, 3)
    dropped = DropPath(0.25).train()(branch)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0, 1 / 0.75]))
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(DropPath(0.25).eval()(branch), branch)


def test_stochastic_depth_rises_linearly():
    model = small(depth=3, drop_path=0.2)
    assert [getattr(block.drop_path, "rate", 0.0) for block in model.blocks] == [0.0, 0.1, 0.2]


def test_gradient_checkpointing_changes_no_gradient():
    model = small().train()
    model(images()).sum().backward()
    expected = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing()
    model(images()).sum().backward()
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.grad, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 30}, r"H = 30, W = 30 of the image are not multiples of the patch side P = 8"),
        ({"heads": 5}, "width 48 is not a multiple of the 5 heads"),
        ({"class_token": False}, "needs the class token"),
        ({"distillation_token": True, "readout": "mean"}, "needs readout 'token'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the images are H = 40, W = 32, expected 32 px"):
        small()(torch.zeros(1, 3, 40, 32))
