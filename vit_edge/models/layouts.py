"""The names that other systems give a ViT's parameters, translated into ours (timm's).

A layout is recognised by a parameter that only it has. What a checkpoint holds beside the encoder and its head
(decoders, mask tokens, projection heads of self-supervision) is left out and listed.
D width, h heads, d = D/h.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]

WRAPPING_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.", "student.", "teacher.")

TORCHVISION: Rules = (
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
    (r"^heads\.pre_logits\.", "pre_logits.fc."),
)
# Both of its spellings: up to 4 (encoder.layer.0.attention.attention.query) and 5 (layers.0.attention.q_proj).
TRANSFORMERS: Rules = (
    (r"^(?:vit|deit|dinov2)\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:attention\.)?(query|key|value)\.", r".attn.\1."),
    (r"\.attention\.q_proj\.", ".attn.query."),
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
    (r"^pooler\.dense\.", "pre_logits.fc."),
)
JAX: Rules = (
    (r"^(?:opt/target/|params/)", ""),
    (r"^cls$", "cls_token"),
    (r"^(?:Transformer/posembed_input/)?pos_embedding$", "pos_embed"),
    (r"^embedding/", "patch_embed.proj/"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1/"),
    (r"/LayerNorm_0/", ".norm1/"),
    (r"/LayerNorm_[12]/", ".norm2/"),
    (r"/MultiHeadDotProductAttention_[01]/out/", ".attn.proj/"),
    (r"/MultiHeadDotProductAttention_[01]/(query|key|value)/", r".attn.\1/"),
    (r"/MlpBlock_[03]/Dense_0/", ".mlp.fc1/"),
    (r"/MlpBlock_[03]/Dense_1/", ".mlp.fc2/"),
    (r"^Transformer/encoder_norm/", "norm/"),
    (r"^pre_logits/", "pre_logits.fc/"),
    (r"^(conv|gn)_root/", r"patch_embed.backbone.stem.\1/"),
    (r"^block(\d+)/unit(\d+)/", lambda m: f"patch_embed.backbone.stages.{int(m[1]) - 1}.blocks.{int(m[2]) - 1}."),
    (r"\.(conv|gn)_proj/", r".downsample.\1/"),
    (r"\.gn(\d?)/", r".norm\1/"),
    (r"/(?:kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
)
SELF_SUPERVISED: Rules = ((r"^register_tokens$", "reg_token"), (r"^blocks\.\d+\.(\d+\.)", r"blocks.\1"))
LEFT_OUT = re.compile(r"^decoder|(?:^|\.)mask_token$|^head\.(?:mlp|last_layer)\b|^(?:dino|ibot)_head\.")


@dataclass(frozen=True)
class Layout:
    """A state dict in our names; `original` in its own, without wrapping prefixes.

    left_out: the names of what is no part of an encoder or its head.
    imagenet_normalisation: whether the system normalises by ImageNet's mean and deviation, 0.5 otherwise; None: its names
    do not tell (transformers has ViTs of Google's and of DINO under the same names).
    """

    name: str
    tensors: Tensors
    original: Tensors
    left_out: tuple[str, ...] = ()
    imagenet_normalisation: bool | None = None


def canonical(state: Mapping[str, Tensor]) -> Layout:
    """`state` in our names, by whatever layout it is in; one that is not recognised comes back as it is."""
    tensors = _unprefixed(dict(state))
    for name, marker, translate, imagenet in _LAYOUTS:
        if any(re.search(marker, key) for key in tensors):
            left_out = tuple(key for key in tensors if LEFT_OUT.search(key))
            kept = {key: tensor for key, tensor in tensors.items() if key not in left_out}
            return Layout(name, translate(kept), tensors, left_out, imagenet)
    return Layout("timm", tensors, tensors)


def _unprefixed(tensors: Tensors) -> Tensors:
    """Without what a wrapper put before every name: DistributedDataParallel, torch.compile, a parent module.

    A parent that also holds a projection head (DINO) is recognised by its encoder's patch projection.
    """
    for prefix in WRAPPING_PREFIXES:
        wraps_all = all(key.startswith(prefix) for key in tensors)
        if tensors and (wraps_all or f"{prefix}patch_embed.proj.weight" in tensors):
            return _unprefixed({key.removeprefix(prefix): tensor for key, tensor in tensors.items()})
    return tensors


def _renamed(tensors: Tensors, rules: Rules) -> Tensors:
    def rename(key: str) -> str:
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        return key

    return {rename(key): tensor for key, tensor in tensors.items()}


def _from_torchvision(tensors: Tensors) -> Tensors:
    return _renamed(tensors, TORCHVISION)


def _from_transformers(tensors: Tensors) -> Tensors:
    return _merged_qkv(_renamed(tensors, TRANSFORMERS))


def _from_self_supervision(tensors: Tensors) -> Tensors:
    return _renamed(tensors, SELF_SUPERVISED)


def _from_timm(tensors: Tensors) -> Tensors:
    return tensors


def _from_jax(tensors: Tensors) -> Tensors:
    """Kernels are stored (…, in, out), attention's with its heads apart: (D, h, d), output (h, d, D)."""
    return _merged_qkv({name: _from_jax_axes(name, tensor) for name, tensor in _renamed(tensors, JAX).items()})


def _from_jax_axes(name: str, tensor: Tensor) -> Tensor:
    if re.search(r"\.attn\.(query|key|value)\.weight$", name):
        return tensor.flatten(1).T
    if re.search(r"\.attn\.(query|key|value)\.bias$", name):
        return tensor.flatten()
    if name.endswith(".attn.proj.weight"):
        return tensor.flatten(0, 1).T
    if "norm" in name:
        return tensor.flatten()
    if name.endswith(".weight"):
        return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.T
    return tensor


def _merged_qkv(tensors: Tensors) -> Tensors:
    """query, key and value of each block as the one qkv, in this order."""
    merged = {}
    for key, tensor in tensors.items():
        block, found, kind = key.partition(".attn.query.")
        parts = [f"{block}.attn.{part}.{kind}" for part in ("query", "key", "value")]
        if found and all(part in tensors for part in parts):
            merged[f"{block}.attn.qkv.{kind}"] = torch.cat([tensors[part] for part in parts])
        elif not re.search(r"\.attn\.(key|value)\.", key):
            merged[key] = tensor
    return merged


TRANSFORMERS_EPSILON = {"transformers DeiT": 1e-12, "transformers MAE": 1e-12, "transformers ViT": 1e-12}
"""What transformers adds to the variance in LayerNorm where no config.json says otherwise; all others, and we, add 1e-6."""
FOREIGN = ("JAX", "torchvision", "transformers DeiT", "transformers DINOv2", "transformers MAE", "transformers ViT")
# Name, a pattern that only this layout's keys match, its translation, whether it normalises as ImageNet does.
_LAYOUTS: tuple[tuple[str, str, Callable[[Tensors], Tensors], bool | None], ...] = (
    ("JAX", r"^(?:opt/target/|params/)?embedding/kernel$", _from_jax, False),
    ("torchvision", r"^encoder\.layers\.encoder_layer_0\.", _from_torchvision, True),
    ("transformers DeiT", r"^deit\.embeddings\.", _from_transformers, True),
    ("transformers DINOv2", r"^dinov2\.embeddings\.", _from_transformers, True),
    ("transformers MAE", r"^decoder\.decoder_pos_embed$", _from_transformers, True),
    ("transformers ViT", r"^(?:vit\.)?embeddings\.patch_embeddings\.projection\.", _from_transformers, None),
    ("MAE", r"^decoder_pos_embed$", _from_self_supervision, True),
    ("DINOv2", r"^mask_token$", _from_self_supervision, True),
    ("DINO", r"^head\.(?:mlp|last_layer)\b", _from_self_supervision, True),
    ("DeiT", r"^dist_token$", _from_timm, True),
)
