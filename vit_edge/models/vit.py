"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, arXiv:2010.11929), with its published variants.

B batch, C channels, H×W image, P patch side, N patches, T tokens (prefix + N), D width, h heads, d = D/h, K classes.
Parameters carry timm's names, so that its checkpoints load unchanged. Sequence: class, distillation, registers, patches.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EPSILON = 1e-6
SIGMA, SIGMA_WIDTH = 0.02, 768
Logits = Tensor | tuple[Tensor, Tensor]
Record = dict[str, Tensor]


@dataclass(frozen=True)
class ViTConfig:
    """Geometry and variant. `image_size` is the side of the square input in pixels.

    patch_size: side in pixels, or in positions of the stem's feature map when there is a stem.
    readout: the class token, or the mean of the patch tokens (normalised after the mean, as in timm).
    distillation_token: DeiT (Touvron et al. 2021): a second token with a head of its own.
    registers: extra tokens without a position (Darcet et al. 2023). position_prefix: whether the class and
    distillation tokens have positions too (DeiT III and DINOv2 with registers: not).
    layer_scale: initial value (Touvron et al. 2021, CaiT), None: no LayerScale.
    drop_path: stochastic depth rate of the last block, rising linearly from 0 (Huang et al. 2016).
    pre_logits: the pre-training head with one hidden layer and tanh.
    norm_epsilon: what LayerNorm adds to the variance.
    """

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    classes: int = 1000
    mlp_ratio: float = 4.0
    readout: Literal["token", "mean"] = "token"
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    position_prefix: bool = True
    layer_scale: float | None = None
    drop_path: float = 0.0
    pre_logits: bool = False
    norm_epsilon: float = EPSILON

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"the width {self.width} is not a multiple of the {self.heads} heads")
        if self.readout == "token" and not self.class_token:
            raise ValueError("readout 'token' needs the class token")
        if self.distillation_token and (self.readout != "token" or self.pre_logits):
            raise ValueError("the distillation token needs readout 'token' and no pre-training head")

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches."""
        return int(self.class_token) + int(self.distillation_token) + self.registers


class VisionTransformer(nn.Module):
    """float images (B, C, H, W), normalised → float logits (B, K).

    With a distillation token, training returns both heads' logits (class, distillation); evaluation averages them.
    `stem`: any module from images to a feature map (B, C', H', W') that the patches are then taken from (hybrid).
    Linear weights, the head's too, the patch projection, tokens and positions start as a truncated normal of σ = 0.02,
    the weights of a model narrower than ViT-B wider (`_initialise`); a head that replaces another on trained weights
    starts at zero (checkpoints.py).
    Raises ValueError that names H, W and P when the patches do not tile the image.
    """

    def __init__(self, config: ViTConfig, stem: nn.Module | None = None):
        super().__init__()
        self.patch_embed = PatchEmbedding(config, stem)
        width = config.width
        positions = self.patch_embed.patches + (config.prefix_tokens if config.position_prefix else 0)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if config.class_token else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, width)) if config.distillation_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, width)) if config.registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, width))
        rates = [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        pooled = config.readout == "mean"
        self.norm = nn.Identity() if pooled else nn.LayerNorm(width, eps=config.norm_epsilon)
        self.fc_norm = nn.LayerNorm(width, eps=config.norm_epsilon) if pooled else nn.Identity()
        self.pre_logits = _hidden_layer(width) if config.pre_logits else nn.Identity()
        self.head = nn.Linear(width, config.classes)
        self.head_dist = nn.Linear(width, config.classes) if config.distillation_token else None
        self.grad_checkpointing = False
        self.config = config
        self._initialise()

    def forward(self, images_BCHW: Tensor, intermediates: bool = False) -> Logits | tuple[Logits, Record]:
        """With `intermediates`, (logits, {name: tensor}): embedded, blocks.i, blocks.i.attention (B, h, T, T) where
        attention is explicit, encoded, features (what the head reads). Without, the last block computes no token that
        the head does not read."""
        if not intermediates:
            return self.forward_head(self._encode(images_BCHW, self.reads))
        record: Record = {}
        tokens_BTD = self._encode(images_BCHW, None, record)
        return self.forward_head(tokens_BTD, record), record

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Every token after the last norm: (B, T, D)."""
        return self._encode(images_BCHW, None)

    def forward_head(self, tokens_BTD: Tensor, record: Record | None = None) -> Logits:
        """The logits of `forward`, from the tokens of `forward_features` or the first of them that the head reads."""
        if self.config.readout == "mean":
            features_BD = self.fc_norm(tokens_BTD[:, self.config.prefix_tokens :].mean(dim=1))
        else:
            features_BD = tokens_BTD[:, 0]
        features_BD = self.pre_logits(features_BD)
        _keep(record, "features", features_BD)
        logits_BK = self.head(features_BD)
        if self.head_dist is None:
            return logits_BK
        distilled_BK = self.head_dist(tokens_BTD[:, 1])
        return (logits_BK, distilled_BK) if self.training else (logits_BK + distilled_BK) / 2

    def embed(self, images_BCHW: Tensor) -> Tensor:
        """Equation 1: patches projected, prefix tokens put before them, positions added: (B, T, D)."""
        patches_BND = self.patch_embed(images_BCHW)
        prefix = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        expanded = [token.expand(patches_BND.shape[0], -1, -1) for token in prefix]
        if self.config.position_prefix:
            return torch.cat([*expanded, patches_BND], dim=1) + self.pos_embed
        return torch.cat([*expanded, patches_BND + self.pos_embed], dim=1)

    def set_fused_attention(self, fused: bool) -> None:
        """Fused attention for training; explicit products and softmax, equal within 1e-5, for export and insight."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused_attn = fused

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def set_norm_epsilon(self, epsilon: float) -> None:
        """What every LayerNorm adds to the variance: it belongs to the weights."""
        self.config = replace(self.config, norm_epsilon=epsilon)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = epsilon

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves out, beside biases and norms."""
        return {"cls_token", "dist_token", "reg_token", "pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's description of the layers, for layer-wise learning rates: stem, blocks, what follows them."""
        return {
            "stem": r"^cls_token|^dist_token|^reg_token|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^fc_norm|^pre_logits", (99999,))],
        }

    @property
    def reads(self) -> int | None:
        """How many tokens, from the first, the head reads; None: all."""
        return 1 + self.config.distillation_token if self.config.readout == "token" else None

    def _encode(self, images_BCHW: Tensor, reads: int | None, record: Record | None = None) -> Tensor:
        """The tokens after the last norm, or the first `reads` of them: (B, T, D)."""
        tokens_BTD = self.embed(images_BCHW)
        _keep(record, "embedded", tokens_BTD)
        for i, block in enumerate(self.blocks):
            read = reads if i + 1 == len(self.blocks) else None
            if self.grad_checkpointing and self.training and record is None:
                tokens_BTD = checkpoint(block, tokens_BTD, reads=read, use_reentrant=False)
            else:
                tokens_BTD = block(tokens_BTD, record, f"blocks.{i}", reads=read)
            _keep(record, f"blocks.{i}", tokens_BTD)
        tokens_BTD = self.norm(tokens_BTD)
        _keep(record, "encoded", tokens_BTD)
        return tokens_BTD

    def _initialise(self) -> None:
        """σ = 0.02 is what the published widths start from. Below ViT-B's 768 it grows with 1/√D, as Xavier's does:
        a narrow model that starts at 0.02 passes almost nothing through its blocks and learns slowly."""
        sigma = SIGMA * max(1.0, math.sqrt(SIGMA_WIDTH / self.config.width))
        stem = set(self.patch_embed.backbone.modules()) if self.patch_embed.backbone is not None else set()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module not in stem:
                nn.init.trunc_normal_(module.weight, std=sigma)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for parameter in (self.cls_token, self.dist_token, self.reg_token, self.pos_embed):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=SIGMA)


class PatchEmbedding(nn.Module):
    """Images (B, C, H, W), or a stem's map of them, cut into P×P patches and projected: (B, N, D), row by row.

    The projection is a convolution with kernel = stride = P.
    """

    def __init__(self, config: ViTConfig, stem: nn.Module | None):
        super().__init__()
        self.image_size = config.image_size
        channels, height, width = 3, config.image_size, config.image_size
        self.backbone = stem
        if stem is not None:
            channels, height, width = _map_shape(stem, config.image_size)
        patch = config.patch_size
        if height % patch or width % patch:
            what = "the image" if stem is None else "the stem's feature map"
            raise ValueError(f"H = {height}, W = {width} of {what} are not multiples of the patch side P = {patch}")
        self.grid = (height // patch, width // patch)
        self.proj = nn.Conv2d(channels, config.width, kernel_size=patch, stride=patch)

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        height, width = images_BCHW.shape[-2:]
        if (height, width) != (self.image_size, self.image_size):
            raise ValueError(f"the images are H = {height}, W = {width}, expected {self.image_size} px each")
        map_BCHW = self.backbone(images_BCHW) if self.backbone is not None else images_BCHW
        return self.proj(map_BCHW).flatten(2).transpose(1, 2)


class ConvStem(nn.Sequential):
    """Images (B, 3, H, W) → (B, channels[-1], H/2ⁿ, W/2ⁿ): n blocks of 3×3 convolution of stride 2, BatchNorm, ReLU."""

    def __init__(self, channels: Sequence[int]):
        inputs = (3, *channels[:-1])
        super().__init__(*(_stem_block(c_in, c_out) for c_in, c_out in zip(inputs, channels, strict=True)))


class Block(nn.Module):
    """Equations 2 and 3: pre-norm attention and MLP, each with a residual connection.

    `reads`: compute only the first so many tokens of the output, None: all.
    """

    def __init__(self, config: ViTConfig, drop_path: float):
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.attn = Attention(width, config.heads)
        self.ls1 = LayerScale(width, config.layer_scale) if config.layer_scale is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.mlp = Mlp(width, round(width * config.mlp_ratio))
        self.ls2 = LayerScale(width, config.layer_scale) if config.layer_scale is not None else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self, tokens_BTD: Tensor, record: Record | None = None, name: str = "", reads: int | None = None
    ) -> Tensor:
        attended_BTD = self.attn(self.norm1(tokens_BTD), record, f"{name}.attention", reads)
        tokens_BTD = tokens_BTD[:, :reads] + self.drop_path(self.ls1(attended_BTD))
        return tokens_BTD + self.drop_path(self.ls2(self.mlp(self.norm2(tokens_BTD))))


class Attention(nn.Module):
    """softmax(QKᵀ/√d)·V for each head, heads concatenated, projected; queries of the first `reads` tokens, None: of all.

    R is the number of queries.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads = heads
        self.scale = 1 / math.sqrt(width // heads)
        self.fused_attn = True
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self, tokens_BTD: Tensor, record: Record | None = None, name: str = "", reads: int | None = None
    ) -> Tensor:
        q_BhRd, k_BhTd, v_BhTd = self._qkv(tokens_BTD, reads)
        if self.fused_attn:
            mixed_BhRd = F.scaled_dot_product_attention(q_BhRd, k_BhTd, v_BhTd)
        else:
            weights_BhRT = ((q_BhRd * self.scale) @ k_BhTd.transpose(-2, -1)).softmax(dim=-1)
            _keep(record, name, weights_BhRT)
            mixed_BhRd = weights_BhRT @ v_BhTd
        return self.proj(mixed_BhRd.transpose(1, 2).flatten(2))

    def _qkv(self, tokens_BTD: Tensor, reads: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h, R, d), keys and values (B, h, T, d)."""
        if reads is None:
            parts = self.qkv(tokens_BTD).chunk(3, dim=-1)
        else:
            width = tokens_BTD.shape[-1]
            weight, bias = self.qkv.weight, self.qkv.bias
            queries_BRD = F.linear(tokens_BTD[:, :reads], weight[:width], bias[:width])
            parts = (queries_BRD, *F.linear(tokens_BTD, weight[width:], bias[width:]).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v


class Mlp(nn.Module):
    """Two linear layers with the exact GELU between."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(tokens_BTD)))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        return tokens_BTD * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training drops the whole branch of a sample at `rate` and scales the kept ones up."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch_BTD: Tensor) -> Tensor:
        if not self.training:
            return branch_BTD
        kept_B11 = branch_BTD.new_empty(branch_BTD.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return branch_BTD * kept_B11 / (1 - self.rate)


def resample_positions(
    pos_embed_1TD: Tensor, grid: tuple[int, int], prefix_tokens: int, mode: str = "bicubic"
) -> Tensor:
    """Position embeddings of a square grid resampled in two dimensions to `grid` (rows, columns), in float32.

    The first `prefix_tokens` stay as they are. mode: bicubic, as in the paper, or bilinear; antialiased.
    Raises ValueError when what is left is no square grid.
    """
    prefix_1TD, patches_1ND = pos_embed_1TD[:, :prefix_tokens], pos_embed_1TD[:, prefix_tokens:]
    side = math.isqrt(patches_1ND.shape[1])
    if side * side != patches_1ND.shape[1]:
        raise ValueError(f"{patches_1ND.shape[1]} patch positions are no square grid")
    if (side, side) == grid:
        return pos_embed_1TD
    grid_1DHW = patches_1ND.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resampled = F.interpolate(grid_1DHW, size=grid, mode=mode, antialias=True)
    patches_1ND = resampled.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed_1TD.dtype)
    return torch.cat([prefix_1TD, patches_1ND], dim=1)


def _keep(record: Record | None, name: str, value: Tensor) -> None:
    if record is not None:
        record[name] = value


def _hidden_layer(width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc=nn.Linear(width, width), act=nn.Tanh()))


def _stem_block(channels_in: int, channels_out: int) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(channels_out), act=nn.ReLU()))


def _map_shape(stem: nn.Module, image_size: int) -> tuple[int, int, int]:
    """Channels, height and width of the stem's map of one image."""
    was_training = stem.training
    device = next(stem.parameters()).device
    with torch.no_grad():
        shape = stem.eval()(torch.zeros(1, 3, image_size, image_size, device=device)).shape
    stem.train(was_training)
    return shape[1], shape[2], shape[3]
