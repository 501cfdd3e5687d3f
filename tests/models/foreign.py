"""One of our ViTs written down in the layouts of other systems, as their own documentation or code names things.

Each is the inverse of what `layouts` does, written apart from it. D width, h heads, d = D/h.
"""

import numpy as np
import torch
from torch import Tensor

State = dict[str, Tensor]


def as_transformers_4(state: State, prefix: str = "vit.") -> State:
    """transformers up to 4: the names in the published files of google/vit-*."""
    single = {
        "cls_token": "embeddings.cls_token",
        "dist_token": "embeddings.distillation_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
        "norm.": "layernorm.",
    }
    in_block = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    renamed = {}
    for key, tensor in state.items():
        if key.startswith("blocks."):
            _, block, inner = key.split(".", 2)
            module, _, kind = inner.rpartition(".")
            start = f"{prefix}encoder.layer.{block}."
            if module == "attn.qkv":
                for name, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    renamed[f"{start}attention.attention.{name}.{kind}"] = part
            else:
                renamed[f"{start}{in_block[module]}.{kind}"] = tensor
        elif key.startswith("head_dist."):
            renamed[key.replace("head_dist", "distillation_classifier")] = tensor
        elif key.startswith("head."):
            renamed[key.replace("head", "cls_classifier" if prefix == "deit." else "classifier")] = tensor
        else:
            ours = next(name for name in single if key.startswith(name))
            renamed[prefix + key.replace(ours, single[ours], 1)] = tensor
    return renamed


def as_jax(state: State, heads: int) -> dict[str, np.ndarray]:
    """The archives of google-research/vision_transformer: kernels (in, out), attention's with its heads apart."""
    in_block = {
        "norm1": "LayerNorm_0",
        "norm2": "LayerNorm_2",
        "mlp.fc1": "MlpBlock_3/Dense_0",
        "mlp.fc2": "MlpBlock_3/Dense_1",
        "attn.proj": "MultiHeadDotProductAttention_1/out",
    }
    names = {"weight": "kernel", "bias": "bias"}
    arrays = {
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for key, tensor in state.items():
        if not key.startswith("blocks."):
            continue
        _, block, inner = key.split(".", 2)
        module, _, kind = inner.rpartition(".")
        start, width = f"Transformer/encoderblock_{block}/", tensor.shape[-1]
        if module == "attn.qkv":
            for name, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                shaped = part.T.reshape(width, heads, -1) if kind == "weight" else part.reshape(heads, -1)
                arrays[f"{start}MultiHeadDotProductAttention_1/{name}/{names[kind]}"] = shaped
        elif module.startswith("norm"):
            arrays[f"{start}{in_block[module]}/{'scale' if kind == 'weight' else 'bias'}"] = tensor
        elif module == "attn.proj" and kind == "weight":
            arrays[f"{start}{in_block[module]}/kernel"] = tensor.T.reshape(heads, width // heads, -1)
        else:
            arrays[f"{start}{in_block[module]}/{names[kind]}"] = tensor.T if kind == "weight" else tensor
    return {key: np.ascontiguousarray(torch.as_tensor(value).numpy()) for key, value in arrays.items()}


def as_jax_resnet(state: State) -> dict[str, np.ndarray]:
    """The ResNet before a hybrid in those archives; group norms as (1, 1, 1, C)."""
    arrays = {}
    for key, tensor in state.items():
        path = key.removeprefix("patch_embed.backbone.").split(".")
        if path == key.split("."):
            continue
        *place, layer, kind = path
        unit = f"block{int(place[1]) + 1}/unit{int(place[3]) + 1}/" if place[0] == "stages" else ""
        role = {"stem": "_root", "downsample": "_proj"}.get(place[-1], "")
        if layer.startswith("conv"):
            arrays[f"{unit}conv{role}{layer[4:]}/kernel"] = tensor.permute(2, 3, 1, 0).numpy()
        else:
            name = "scale" if kind == "weight" else "bias"
            arrays[f"{unit}gn{role}{layer[4:]}/{name}"] = tensor.numpy().reshape(1, 1, 1, -1)
    return arrays
