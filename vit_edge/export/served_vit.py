"""The Vision Transformer as it is served: equal to the trained one, with everything folded that can be.

B batch, T tokens (prefix + patches), D width, h heads, d = D/h, K classes, R tokens that the head reads.
Module names are the student's own, but for attention, whose q, k and v are separate layers.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from vit_edge.models.vit import Attention, Block, LayerScale, PatchEmbedding, VisionTransformer


class ServedViT(nn.Module):
    """float pixels minus 128 (B, H, W, 3) → float logits (B, K), for evaluation only.

    - Without a stem the patches are rows of pixels and their projection is a linear layer that holds the normalisation.
    - LayerNorm's factors and offsets stand in the linear layers after it, LayerScale's in the one before it, 1/√d in q.
    - The prefix tokens and their positions are one constant.
    - When the head reads tokens, the last block computes those alone.
    - DeiT's two heads are one linear layer on both tokens.
    """

    def __init__(self, vit: VisionTransformer, scale_C: Tensor, shift_C: Tensor):
        """scale_C, shift_C: normalised = (pixel - 128) · scale + shift."""
        super().__init__()
        config = vit.config
        stemless = vit.patch_embed.backbone is None
        self.patch_embed: nn.Module = (
            LinearPatches(vit.patch_embed.proj, scale_C, shift_C)
            if stemless
            else NormalisedMap(vit.patch_embed, scale_C, shift_C)
        )
        self.prefix_1PD, self.positions_1ND = _constants(vit)
        self.reads = (1 + config.distillation_token) if config.readout == "token" else None
        self.prefix_tokens = config.prefix_tokens
        last = len(vit.blocks) - 1
        blocks = cast(Iterable[Block], vit.blocks)
        self.blocks = nn.ModuleList(ServedBlock(b, self.reads if i == last else None) for i, b in enumerate(blocks))
        norm = cast(nn.LayerNorm, vit.norm if config.readout == "token" else vit.fc_norm)
        self.norm = plain_norm(norm)
        self.pre_logits = vit.pre_logits
        self.head = vit.head if vit.head_dist is None else merged_heads(vit.head, vit.head_dist)
        if isinstance(vit.pre_logits, nn.Identity):
            self.head = after_norm(norm, self.head)
        else:
            self.pre_logits.fc = after_norm(norm, cast(nn.Linear, vit.pre_logits.fc))

    def forward(self, centred_BHWC: Tensor) -> Tensor:
        tokens_BTD = self.patch_embed(centred_BHWC) + self.positions_1ND
        if self.prefix_1PD is not None:
            tokens_BTD = torch.cat([self.prefix_1PD.expand(tokens_BTD.shape[0], -1, -1), tokens_BTD], dim=1)
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD)
        if self.reads is None:
            features_BD = self.norm(tokens_BTD[:, self.prefix_tokens :].mean(dim=1))
        else:
            features_BD = self.norm(tokens_BTD).flatten(1)
        return self.head(self.pre_logits(features_BD))


class LinearPatches(nn.Module):
    """Centred pixels (B, H, W, C) cut into P×P patches and projected: (B, N, D), row by row.

    Equal to the convolution on normalised images, which has no padding: conv((x·s + t); W) = conv(x; W·s) + ΣW·t.
    """

    def __init__(self, conv: nn.Conv2d, scale_C: Tensor, shift_C: Tensor):
        super().__init__()
        self.patch = conv.kernel_size[0]
        plain = _linear(conv.weight.permute(0, 2, 3, 1).flatten(1), _bias(conv))
        self.proj = after_affine(plain, scale_C.repeat(self.patch**2), shift_C.repeat(self.patch**2))

    def forward(self, centred_BHWC: Tensor) -> Tensor:
        cut = centred_BHWC.unflatten(2, (-1, self.patch)).unflatten(1, (-1, self.patch))
        return self.proj(cut.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2))


class NormalisedMap(nn.Module):
    """Centred pixels (B, H, W, C) normalised, through a stem, projected: (B, N, D)."""

    def __init__(self, embedding: PatchEmbedding, scale_C: Tensor, shift_C: Tensor):
        super().__init__()
        self.backbone, self.proj = cast(nn.Module, embedding.backbone), embedding.proj
        self.scale_C, self.shift_C = nn.Parameter(scale_C), nn.Parameter(shift_C)

    def forward(self, centred_BHWC: Tensor) -> Tensor:
        images_BCHW = (centred_BHWC * self.scale_C + self.shift_C).permute(0, 3, 1, 2)
        return self.proj(self.backbone(images_BCHW)).flatten(2).transpose(1, 2)


class ServedBlock(nn.Module):
    """Pre-norm attention and MLP; `reads`: compute only the first so many tokens of the output, None: all."""

    def __init__(self, block: Block, reads: int | None):
        super().__init__()
        self.reads = reads
        self.norm1 = plain_norm(block.norm1)
        self.attn = ServedAttention(block)
        self.norm2 = plain_norm(block.norm2)
        self.mlp = block.mlp
        self.mlp.fc1 = after_norm(block.norm2, block.mlp.fc1)
        self.mlp.fc2 = before_scale(block.mlp.fc2, block.ls2)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        normed_BTD = self.norm1(tokens_BTD)
        if self.reads is None:
            tokens_BTD = tokens_BTD + self.attn(normed_BTD, normed_BTD)
        else:
            tokens_BTD = tokens_BTD[:, : self.reads] + self.attn(normed_BTD[:, : self.reads], normed_BTD)
        return tokens_BTD + self.mlp(self.norm2(tokens_BTD))


class ServedAttention(nn.Module):
    """softmax(QKᵀ)·V with 1/√d already in W_Q, queries and keys from their own tokens; explicit products."""

    def __init__(self, block: Block):
        super().__init__()
        self.q, self.k, self.v = split_qkv(block.attn, block.norm1)
        self.proj = before_scale(block.attn.proj, block.ls1)
        self.num_heads = block.attn.num_heads

    def forward(self, queries_BRD: Tensor, tokens_BTD: Tensor) -> Tensor:
        q_BhRd = self._heads(self.q(queries_BRD)).permute(0, 2, 1, 3)
        k_BhdT = self._heads(self.k(tokens_BTD)).permute(0, 2, 3, 1)
        v_BhTd = self._heads(self.v(tokens_BTD)).permute(0, 2, 1, 3)
        mixed_BhRd = (q_BhRd @ k_BhdT).softmax(dim=-1) @ v_BhTd
        return self.proj(mixed_BhRd.transpose(1, 2).flatten(2))

    def _heads(self, values_BTD: Tensor) -> Tensor:
        return values_BTD.unflatten(-1, (self.num_heads, -1))


def plain_norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    """The norm without factors and offsets, which `after_norm` puts into the next layer."""
    return nn.LayerNorm(norm.normalized_shape, eps=norm.eps, elementwise_affine=False)


def after_norm(norm: nn.LayerNorm, linear: nn.Linear) -> nn.Linear:
    """A linear layer that takes the plain norm of one token, or of several one after the other."""
    repeats = linear.in_features // norm.normalized_shape[0]
    return after_affine(linear, norm.weight.repeat(repeats), norm.bias.repeat(repeats))


def after_affine(linear: nn.Linear, factor_I: Tensor, offset_I: Tensor) -> nn.Linear:
    """W(γx + β) + b = (Wγ)x + (Wβ + b)."""
    moved_O = (linear.weight.double() @ offset_I.double()).to(linear.weight.dtype)
    return _linear(linear.weight * factor_I, moved_O + _bias(linear))


def before_scale(linear: nn.Linear, scale: nn.Module) -> nn.Linear:
    """A linear layer with the LayerScale after it folded in; `scale` may be an identity."""
    if not isinstance(scale, LayerScale):
        return linear
    return _linear(linear.weight * scale.gamma[:, None], _bias(linear) * scale.gamma)


def split_qkv(attention: Attention, norm: nn.LayerNorm) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """q, k and v as layers of their own that take the plain norm, with 1/√d in q."""
    whole = after_norm(norm, attention.qkv)
    q, k, v = zip(whole.weight.chunk(3), whole.bias.chunk(3), strict=True)
    return _linear(q[0] * attention.scale, q[1] * attention.scale), _linear(*k), _linear(*v)


def merged_heads(head: nn.Linear, head_dist: nn.Linear) -> nn.Linear:
    """DeiT's average of two heads as one linear layer on [class token; distillation token]."""
    return _linear(torch.cat([head.weight, head_dist.weight], dim=1) / 2, (_bias(head) + _bias(head_dist)) / 2)


def _constants(vit: VisionTransformer) -> tuple[nn.Parameter | None, nn.Parameter]:
    """The prefix tokens with their positions (1, prefix, D), if there are any, and the patches' positions (1, N, D)."""
    tokens = [token for token in (vit.cls_token, vit.dist_token, vit.reg_token) if token is not None]
    positions = vit.pos_embed.detach()
    if not tokens:
        return None, nn.Parameter(positions)
    prefix = torch.cat(tuple(tokens), dim=1).detach()
    if not vit.config.position_prefix:
        return nn.Parameter(prefix), nn.Parameter(positions)
    count = vit.config.prefix_tokens
    return nn.Parameter(prefix + positions[:, :count]), nn.Parameter(positions[:, count:].clone())


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    return layer.bias if layer.bias is not None else layer.weight.new_zeros(len(layer.weight))


def _linear(weight_OI: Tensor, bias_O: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0])
    linear.weight = nn.Parameter(weight_OI.detach().clone())
    linear.bias = nn.Parameter(bias_O.detach().clone())
    return linear
