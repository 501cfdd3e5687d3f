"""The Vision Transformer as it is served: equal to the trained one, with everything folded that can be.

B batch, T tokens (prefix + patches), D width, h heads, d = D/h, K classes, R tokens that the head reads.
Module names are the student's own, but for attention, whose q, k and v are separate layers.
"""

import torch
from torch import Tensor, nn

from vit_edge.models.vit import Attention, Block, VisionTransformer


class ServedViT(nn.Module):
    """float images (B, 3, H, W), normalised → float logits (B, K), for evaluation only.

    - LayerNorm's factors and offsets stand in the linear layers after it, LayerScale's in the one before it, 1/√d in q.
    - The prefix tokens and their positions are one constant.
    - When the head reads tokens, the last block computes those alone.
    - DeiT's two heads are one linear layer on both tokens.
    """

    def __init__(self, vit: VisionTransformer):
        super().__init__()
        config = vit.config
        self.patch_embed = vit.patch_embed
        self.prefix_1PD, self.positions_1ND = _constants(vit)
        self.reads = (1 + config.distillation_token) if config.readout == "token" else None
        self.prefix_tokens = config.prefix_tokens
        last = len(vit.blocks) - 1
        self.blocks = nn.ModuleList(ServedBlock(b, self.reads if i == last else None) for i, b in enumerate(vit.blocks))
        norm = vit.norm if config.readout == "token" else vit.fc_norm
        self.norm = plain_norm(norm)
        self.pre_logits = vit.pre_logits
        self.head = vit.head if vit.head_dist is None else merged_heads(vit.head, vit.head_dist)
        if isinstance(vit.pre_logits, nn.Identity):
            self.head = after_norm(norm, self.head)
        else:
            self.pre_logits.fc = after_norm(norm, vit.pre_logits.fc)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        tokens_BTD = self.patch_embed(images_BCHW) + self.positions_1ND
        if self.prefix_1PD is not None:
            tokens_BTD = torch.cat([self.prefix_1PD.expand(tokens_BTD.shape[0], -1, -1), tokens_BTD], dim=1)
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD)
        if self.reads is None:
            features_BD = self.norm(tokens_BTD[:, self.prefix_tokens :].mean(dim=1))
        else:
            features_BD = self.norm(tokens_BTD).flatten(1)
        return self.head(self.pre_logits(features_BD))


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
    """A linear layer that takes the plain norm: W(γx + β) + b = (Wγ)x + (Wβ + b).

    `linear` may read several tokens that the norm was applied to, one after the other.
    """
    repeats = linear.in_features // norm.normalized_shape[0]
    factor, offset = norm.weight.repeat(repeats), norm.bias.repeat(repeats)
    return _linear(linear.weight * factor, linear.weight @ offset + _bias(linear))


def before_scale(linear: nn.Linear, scale: nn.Module) -> nn.Linear:
    """A linear layer with the LayerScale after it folded in; `scale` may be an identity."""
    if isinstance(scale, nn.Identity):
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
    tokens = [token for token in (vit.cls_token, vit.dist_token, vit.reg_token) if token is not None]
    if not tokens:
        return None, vit.pos_embed
    prefix_1PD, positions_1ND = torch.cat(tokens, dim=1), vit.pos_embed
    if vit.config.position_prefix:
        prefix_1PD = prefix_1PD + vit.pos_embed[:, : vit.config.prefix_tokens]
        positions_1ND = vit.pos_embed[:, vit.config.prefix_tokens :]
    return nn.Parameter(prefix_1PD.detach().clone()), nn.Parameter(positions_1ND.detach().clone())


def _bias(linear: nn.Linear) -> Tensor:
    return linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)


def _linear(weight_OI: Tensor, bias_O: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0])
    linear.weight = nn.Parameter(weight_OI.detach().clone())
    linear.bias = nn.Parameter(bias_O.detach().clone())
    return linear
