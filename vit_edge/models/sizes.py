"""What one of our ViTs costs, from its geometry alone: nothing is built, so that a slip of the keyboard costs nothing.

S side of the map that the patches are cut from: the image, or a stem's feature map of so many channels.
D width, T tokens, R of them read by the head.
"""

from collections.abc import Sequence
from itertools import pairwise

from vit_edge.errors import UserError
from vit_edge.models.vit import ViTConfig

MOST_PARAMETERS = 3_000_000_000
MOST_BLOCKS = 1000
MOST_ATTENTION_BYTES = 8 << 30
COLOURS = 3


def parameters(config: ViTConfig, channels: int = COLOURS, side: int | None = None) -> int:
    """Parameters of `VisionTransformer(config)` without its stem's. side: S, default: the image's."""
    D, hidden = config.width, _hidden(config)
    patches = _patches(config, side)
    tokens = D * (config.prefix_tokens + patches + (config.prefix_tokens if config.position_prefix else 0))
    projection = D * (config.patch_size**2 * channels + 1)
    scales = 0 if config.layer_scale is None else 2 * D
    block = 4 * D + 4 * D * (D + 1) + 2 * D * hidden + hidden + D + scales
    heads = config.classes * (D + 1) * (2 if config.distillation_token else 1)
    pre_logits = D * (D + 1) if config.pre_logits else 0
    return tokens + projection + config.depth * block + 2 * D + pre_logits + heads


def multiply_adds(config: ViTConfig, channels: int = COLOURS, side: int | None = None) -> int:
    """Multiply-adds of the matrix products for one image, attention's too, without the stem's.

    Of the last block's output only the R tokens that the head reads are computed.
    """
    D, patches = config.width, _patches(config, side)
    T = patches + config.prefix_tokens
    R = 1 + config.distillation_token if config.readout == "token" else T
    keys_and_values, per_token = 2 * T * D * D, 2 * D * D + 2 * D * _hidden(config) + 2 * T * D
    blocks = config.depth * keys_and_values + ((config.depth - 1) * T + R) * per_token
    heads = D * config.classes * (2 if config.distillation_token else 1)
    pre_logits = D * D if config.pre_logits else 0
    return patches * config.patch_size**2 * channels * D + blocks + pre_logits + heads


def stem_parameters(channels: Sequence[int]) -> int:
    """Of `ConvStem(channels)`: 3×3 convolutions without bias, and two numbers a channel for each norm."""
    return sum(9 * before * after + 2 * after for before, after in pairwise((COLOURS, *channels)))


def check(name: str, config: ViTConfig, stem: Sequence[int], side: int) -> None:
    """Refuses a geometry that no machine that this is meant for could hold, before anything is made. UserError says its size."""
    count = parameters(config, stem[-1] if stem else COLOURS, side) + stem_parameters(stem)
    geometry = f"{name} of width {config.width}, depth {config.depth}, patch_size {config.patch_size}"
    if count > MOST_PARAMETERS:
        raise UserError(
            f"{geometry} would have {count:.2g} parameters, more than {MOST_PARAMETERS:.2g}",
            "give a smaller width, depth, patch_size or stem",
        )
    if config.depth > MOST_BLOCKS:
        raise UserError(f"{geometry} has more than {MOST_BLOCKS} blocks", "give a smaller depth")
    tokens = _patches(config, side) + config.prefix_tokens
    attention_bytes = 4 * config.heads * tokens * tokens
    if attention_bytes > MOST_ATTENTION_BYTES:
        raise UserError(
            f"{name} of {tokens} tokens would need {attention_bytes / 2**30:.0f} GiB for the attention of one block",
            "give a larger patch_size, or a smaller image_size",
        )


def _patches(config: ViTConfig, side: int | None) -> int:
    return ((side or config.image_size) // config.patch_size) ** 2


def _hidden(config: ViTConfig) -> int:
    return round(config.width * config.mlp_ratio)
