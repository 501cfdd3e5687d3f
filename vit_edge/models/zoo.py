"""Models by name: our own ViT family, and any timm architecture.

Ours are vit_{ti16,s16,b16,b32,l16,l32,h14}, the same as deit_ with the distillation token, and r50_vit_b16.
timm is imported when one of its models, or all names, are asked for.
"""

from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from vit_edge.errors import UserError, unknown
from vit_edge.models import sizes
from vit_edge.models.vit import ConvStem, VisionTransformer, ViTConfig
from vit_edge.recipe import ModelConfig

RESNET_HYBRID = "r50_vit_b16"
RESNET_STRIDE = 16
HEAD_WIDTH = 64

_SIZES = {
    "ti16": ViTConfig(patch_size=16, width=192, depth=12, heads=3),
    "s16": ViTConfig(patch_size=16, width=384, depth=12, heads=6),
    "b16": ViTConfig(patch_size=16, width=768, depth=12, heads=12),
    "b32": ViTConfig(patch_size=32, width=768, depth=12, heads=12),
    "l16": ViTConfig(patch_size=16, width=1024, depth=24, heads=16),
    "l32": ViTConfig(patch_size=32, width=1024, depth=24, heads=16),
    "h14": ViTConfig(patch_size=14, width=1280, depth=32, heads=16),
}
OURS = {
    **{f"vit_{size}": config for size, config in _SIZES.items()},
    **{f"deit_{size}": replace(config, distillation_token=True) for size, config in _SIZES.items()},
    RESNET_HYBRID: replace(_SIZES["b16"], patch_size=1),
}
# timm's names of the same architectures, where published weights or preprocessing are to be had.
PUBLISHED_AS = {
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_b32": "vit_base_patch32_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_l32": "vit_large_patch32_384",
    "vit_h14": "vit_huge_patch14_224",
    "deit_ti16": "deit_tiny_distilled_patch16_224",
    "deit_s16": "deit_small_distilled_patch16_224",
    "deit_b16": "deit_base_distilled_patch16_224",
    RESNET_HYBRID: "vit_base_r50_s16_384",
}
# Others of timm's names whose tensors have the very same names and shapes.
SAME_TENSORS = {
    "vit_ti16": "deit_tiny_patch16_224",
    "vit_s16": "deit_small_patch16_224",
    "vit_b16": "deit_base_patch16_224",
}
GEOMETRY = ("patch_size", "width", "depth", "heads", "stem", "readout", "norm_epsilon")


def create(config: ModelConfig, classes: int, image_size: int) -> nn.Module:
    """The backbone with random weights: normalised float images (B, 3, image_size, image_size) → logits (B, classes).

    Raises UserError for an unknown name, a size that does not fit, or a setting without effect.
    """
    if config.name in OURS:
        return _create_ours(config, classes, image_size)
    check_name(config.name)
    return _create_timm(config, classes, image_size)


def create_for_weights(config: ModelConfig, classes: int, image_size: int) -> nn.Module:
    """As `create`, for `weight_files.assign` to fill: ours takes no memory until then, so that its peak is the weights'.

    timm's gets random weights first: some of its buffers are in no state dict.
    """
    if config.name not in OURS:
        return create(config, classes, image_size)
    with torch.device("meta"):
        return create(config, classes, image_size)


def check_name(name: str) -> None:
    """UserError with the nearest spelling when no model is called `name`."""
    if name in OURS:
        return
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise UserError(f"unknown model {name!r}", _nearest_fix(name))
    tags = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and name not in tags:
        raise unknown(f"weights of {architecture}", tag, [known.partition(".")[2] for known in tags])


def known_names() -> list[str]:
    """Ours, then timm's architectures."""
    import timm

    return [*OURS, *timm.list_models()]


def native_image_size(config: ModelConfig) -> int:
    """Side in pixels of the input that the architecture, or its published weights where they are asked for, is for."""
    check_name(config.name)
    if config.image_size is not None:
        return config.image_size
    if config.name in OURS and (config.weights == "none" or config.name not in PUBLISHED_AS):
        return OURS[config.name].image_size
    return published_config(PUBLISHED_AS.get(config.name, config.name)).input_size[-1]


def vit_config(config: ModelConfig, classes: int, image_size: int) -> ViTConfig:
    """The geometry of one of our models, checked. Raises UserError that names the nearest size that fits."""
    base = OURS[config.name]
    if config.stem is not None and config.name == RESNET_HYBRID:
        raise UserError(f"{RESNET_HYBRID} has its ResNet as a stem", "leave `stem` out, or use vit_b16 with a stem")
    patch_size = config.patch_size or (1 if config.stem else base.patch_size)
    _check_tiling(image_size, _stem_stride(config), patch_size)
    width = config.width or base.width
    heads = config.heads or (base.heads if width == base.width else _default_heads(width))
    if width % heads:
        nearest = max(heads, round(width / heads) * heads)
        fix = f"the nearest width for {heads} heads is {nearest}; {_default_heads(width)} heads divide {width}"
        raise UserError(f"width {width} is not a multiple of heads {heads}", fix)
    if config.readout == "mean" and base.distillation_token:
        raise UserError(
            f"{config.name} reads out its class and distillation tokens, found readout: mean",
            f"use {config.name.replace('deit', 'vit', 1)} for the mean, or leave `readout` out",
        )
    geometry = replace(
        base,
        image_size=image_size,
        classes=classes,
        patch_size=patch_size,
        width=width,
        depth=config.depth or base.depth,
        heads=heads,
        readout=config.readout or base.readout,
        drop_path=config.drop_path,
        norm_epsilon=config.norm_epsilon or base.norm_epsilon,
    )
    sizes.check(config.name, geometry, config.stem or (), map_side(config, image_size))
    return geometry


def map_side(config: ModelConfig, image_size: int) -> int:
    """Side of the map that the patches are cut from: the image, or the feature map of a stem."""
    return -(-image_size // _stem_stride(config))


def _create_ours(config: ModelConfig, classes: int, image_size: int) -> VisionTransformer:
    geometry = vit_config(config, classes, image_size)
    if config.name == RESNET_HYBRID:
        return VisionTransformer(geometry, _resnet_stem())
    return VisionTransformer(geometry, ConvStem(config.stem) if config.stem else None)


def _create_timm(config: ModelConfig, classes: int, image_size: int) -> nn.Module:
    import timm

    for setting in GEOMETRY:
        if getattr(config, setting) is not None:
            raise UserError(
                f"{setting} has no effect on timm's {config.name}", "leave it out, or use one of our models (vit_ti16)"
            )
    options: dict[str, Any] = {"num_classes": classes}
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    published = published_config(config.name)
    if published.fixed_input_size and image_size != published.input_size[-1]:
        options["img_size"] = image_size
    try:
        model = timm.create_model(config.name, pretrained=False, **options)
        if image_size != published.input_size[-1]:
            forward_on_meta(model, image_size)
    except TypeError as err:
        if "drop_path_rate" not in str(err):
            raise
        raise UserError(f"drop_path has no effect on timm's {config.name}", "leave it out, or set it to 0") from err
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as err:
        reason = " ".join(str(err).split()).partition(". ")[0] or type(err).__name__
        raise UserError(
            f"timm's {config.name} does not take images of {image_size} px: {reason}",
            f"set data.image_size to its own {published.input_size[-1]}, or use a model that takes any size",
        ) from err
    return model


def forward_on_meta(model: nn.Module, image_size: int) -> None:
    """One image through `model` in evaluation mode with shapes alone: nothing is computed, the model is left as it was.

    Raises what the model raises when the size does not fit.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    image_BCHW = torch.empty(1, 3, image_size, image_size, device="meta")
    was_training = model.training
    model.eval()
    with torch.no_grad():
        functional_call(model, shapes, (image_BCHW,))
    model.train(was_training)


def _check_tiling(image_size: int, stride: int, patch_size: int) -> None:
    """Whether patches of `patch_size` tile the map that a stem of total `stride` makes of the image."""
    map_size = -(-image_size // stride)
    if map_size % patch_size == 0:
        return
    unit = stride * patch_size
    nearest = max(unit, round(image_size / unit) * unit)
    what = f"H = W = {image_size} px" if stride == 1 else f"the stem's feature map of H = W = {map_size}"
    raise UserError(
        f"{what} is not a multiple of the patch side P = {patch_size}",
        f"the nearest image_size is {nearest}, or give a patch_size that divides {map_size}",
    )


def _stem_stride(config: ModelConfig) -> int:
    return RESNET_STRIDE if config.name == RESNET_HYBRID else 2 ** len(config.stem or ())


def _default_heads(width: int) -> int:
    """Heads of 64 where the width allows it, else of the divisor nearest to 64."""
    divisors = (d for d in range(1, min(width, 2 * HEAD_WIDTH) + 1) if width % d == 0)
    head_width = min(divisors, key=lambda d: abs(d - HEAD_WIDTH))
    return width // head_width


def _resnet_stem() -> nn.Module:
    """The first three stages of ResNet-50-V2 with standardised convolutions, as in the paper: stride 16."""
    from timm.layers import StdConv2dSame
    from timm.models.resnetv2 import ResNetV2

    conv = partial(StdConv2dSame, eps=1e-8)
    return ResNetV2([3, 4, 9], num_classes=0, global_pool="", preact=False, stem_type="same", conv_layer=conv)


def published_name(name: str) -> str:
    """timm's name of the architecture, where its weights are published. Raises UserError when none are."""
    published = PUBLISHED_AS.get(name, name)
    config = None if published in OURS else published_config(published)
    if config is None or not config.hf_hub_id:
        raise UserError(
            f"no published weights of {name} are known",
            "give a file that you have, train from scratch with weights none, or use a model that has them",
        )
    return published


def published_config(name: str) -> Any:
    """timm's PretrainedCfg: mean, std, crop_pct, interpolation, input_size, fixed_input_size."""
    import timm

    return timm.get_pretrained_cfg(name)


def published_configs(config: ModelConfig) -> list[Any]:
    """timm's configurations of all published weights of the very tensors that `config` names, its default one first."""
    import timm

    if any(getattr(config, setting) is not None for setting in GEOMETRY):
        return []
    default = PUBLISHED_AS.get(config.name, config.name)
    if default in OURS:
        return []
    if "." in config.name:
        return [published_config(config.name)]
    names = [default, *([SAME_TENSORS[config.name]] if config.name in SAME_TENSORS else [])]
    return [published_config(default)] + [
        cfg for name in names for cfg in timm.models.get_arch_pretrained_cfgs(name).values() if cfg.url or cfg.hf_hub_id
    ]


def _nearest_fix(name: str) -> str:
    close = get_close_matches(name, known_names(), n=1, cutoff=0.6)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}`vit-edge models` lists them"
