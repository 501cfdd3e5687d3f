"""Weights of any origin into a backbone: nothing is dropped, replaced or resampled without being said.

B batch, T tokens, N patches, D width, K classes.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit_edge.errors import UserError
from vit_edge.models import layouts, weight_files, zoo
from vit_edge.models.layouts import Layout, Tensors
from vit_edge.models.vit import VisionTransformer, resample_positions
from vit_edge.recipe import ModelConfig

Say = Callable[[str], None]
Role = Literal["teacher", "student", "finetune"]
NAMES_SHOWN = 2
FILTER_ERRORS = (KeyError, IndexError, ValueError, RuntimeError, AttributeError, AssertionError, TypeError)

TELLTALES = {
    "a CLIP model": "visual.",
    "a Swin Transformer": "relative_position_bias_table",
    "a RepViT": "token_mixer.",
    "a ResNet": "layer1.0.conv1.weight",
    "a MobileNet or an EfficientNet": "conv_stem.weight",
    "a ConvNeXt": "conv_dw.weight",
    "a RegNet": "trunk_output.",
}
"""Families by a part of a parameter's name that the ones after them have not."""


def load_weights(
    backbone: nn.Module, source: str, *, config: ModelConfig, classes: Sequence[str], role: Role, say: Say
) -> None:
    """Loads `source` into `backbone`, which `zoo.create_for_weights(config, len(classes), …)` made.

    source: "pretrained" (the published weights, from the hub or its cache), or a file: safetensors, a torch pickle,
    a JAX archive, in the layout of timm, DeiT, torchvision, transformers, JAX, MAE, DINO or DINOv2.
    role: a teacher or student is used as it is, so its head must have the K classes; a model to fine-tune gets a new
    head of zeros when it has not. say: told every choice in one line.
    Raises UserError when the weights cannot be had, are not whole, or are another architecture's.
    """
    path = _fetch(config.name, say) if source == "pretrained" else Path(source)
    layout = layouts.canonical(weight_files.read(path, say))
    if layout.left_out:
        say(f"left out of {path}, no part of the encoder or its head: {_some(layout.left_out)}")
    tensors = _translated(layout, backbone, config, path, say)
    if isinstance(backbone, VisionTransformer):
        tensors = _fitted(tensors, backbone, say)
    heads = _head_names(backbone)
    place = Placing(backbone, config, path, layout.name)
    place.check(tensors, apart=lambda key: key in heads or key.startswith("pre_logits."))
    tensors = _with_head(tensors, backbone, heads, len(classes), role, path, say)
    place.check(tensors)
    weight_files.assign(backbone, tensors)
    check_finite(tensors, path)
    if isinstance(backbone, VisionTransformer) and config.norm_epsilon is None:
        backbone.set_norm_epsilon(_norm_epsilon(layout, path) or backbone.config.norm_epsilon)
    say(f"loaded {len(tensors)} tensors in {layout.name}'s layout from {path}")


def _norm_epsilon(layout: Layout, path: Path) -> float | None:
    """Of transformers' layouts, whose norms add another epsilon than all others': its config.json's, or its default.

    Its DINOv2, told by the LayerScale, adds what all others do.
    """
    if layout.name not in layouts.TRANSFORMERS_EPSILON or any("layer_scale" in name for name in layout.original):
        return None
    folder = path if path.is_dir() else path.parent if path.name in weight_files.IN_FOLDERS else None
    try:
        found = folder and json.loads((folder / "config.json").read_text(encoding="utf-8"))["layer_norm_eps"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    return found if isinstance(found, float) and 0 < found < 1e-2 else layouts.TRANSFORMERS_EPSILON[layout.name]


def _fetch(name: str, say: Say) -> Path:
    from vit_edge.models import hub

    return hub.fetch(name, say)


def _translated(layout: Layout, backbone: nn.Module, config: ModelConfig, path: Path, say: Say) -> Tensors:
    """Through timm's own filter for its architectures, when the names or shapes are not already theirs."""
    adapt = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if adapt is None or _shapes(layout.tensors) == _shapes(backbone.state_dict()):
        return layout.tensors
    try:
        adapted: Tensors = dict(adapt(_for_timm(layout), backbone))
    except FILTER_ERRORS as err:
        raise UserError(
            f"{path} does not hold weights of {config.name}: {type(err).__name__} {err}",
            "give the name of the architecture that the file was saved from",
        ) from err
    before = _shapes(layout.original)
    resampled = [key for key, tensor in adapted.items() if before.get(key, tensor.shape) != tensor.shape]
    if resampled:
        say(f"timm resampled for this geometry: {_some(resampled)}: fine-tune at it")
    return adapted


def _for_timm(layout: Layout) -> Tensors:
    """What timm's filters translate themselves: its own and the self-supervised layouts (told by their mask token)."""
    if layout.name in layouts.FOREIGN:
        return dict(layout.tensors)
    dropped = set(layout.left_out) - {"mask_token"}
    return {key: tensor for key, tensor in layout.original.items() if key not in dropped}


def _fitted(tensors: Tensors, backbone: VisionTransformer, say: Say) -> Tensors:
    """Exact rewrites into our form of the ViT, and positions for its resolution."""
    tensors = _fold_layer_scale(tensors, backbone, say)
    if isinstance(backbone.fc_norm, nn.LayerNorm) and "fc_norm.weight" not in tensors:
        moved = {key: key.replace("norm.", "fc_norm.", 1) for key in tensors if re.match(r"norm\.", key)}
        if moved:
            say("the final norm, trained before the readout, is used after the mean of the patches: fine-tune it")
        tensors = {moved.get(key, key): tensor for key, tensor in tensors.items()}
    if "pos_embed" in tensors:
        tensors = {**tensors, "pos_embed": _positions(tensors, backbone, say)}
    return tensors


def _fold_layer_scale(tensors: Tensors, backbone: VisionTransformer, say: Say) -> Tensors:
    """LayerScale's factors multiplied into the linear layer before each: the same function, without the extra step."""
    gammas = [key for key in tensors if re.fullmatch(r"blocks\.\d+\.ls[12]\.gamma", key)]
    if not gammas or backbone.config.layer_scale is not None:
        return tensors
    folded = dict(tensors)
    for key in gammas:
        gamma_D = folded.pop(key)
        linear = key.replace("ls1.gamma", "attn.proj").replace("ls2.gamma", "mlp.fc2")
        if f"{linear}.weight" in folded:
            folded[f"{linear}.weight"] = folded[f"{linear}.weight"] * gamma_D[:, None]
            folded[f"{linear}.bias"] = folded[f"{linear}.bias"] * gamma_D
    say("folded LayerScale into the layers before it (exact)")
    return folded


def _positions(tensors: Tensors, backbone: VisionTransformer, say: Say) -> Tensor:
    """The file's positions for the backbone's tokens: for prefix tokens without a position zeros, resampled patches."""
    pos_embed_1TD = tensors["pos_embed"]
    prefix = backbone.pos_embed.shape[1] - backbone.patch_embed.patches
    if pos_embed_1TD.ndim != 3 or pos_embed_1TD.shape[-1] != backbone.config.width:
        return pos_embed_1TD
    if prefix and _is_square(pos_embed_1TD.shape[1]) and not _is_square(pos_embed_1TD.shape[1] - prefix):
        pos_embed_1TD = torch.cat([pos_embed_1TD.new_zeros(1, prefix, pos_embed_1TD.shape[-1]), pos_embed_1TD], dim=1)
    patches, (rows, columns) = pos_embed_1TD.shape[1] - prefix, backbone.patch_embed.grid
    if patches == rows * columns or not _is_square(patches):
        return pos_embed_1TD
    side = round(patches**0.5)
    say(f"positions resampled from {side}×{side} to {rows}×{columns} patches (bicubic): fine-tune at this resolution")
    return resample_positions(pos_embed_1TD, (rows, columns), prefix)


def _with_head(
    tensors: Tensors, backbone: nn.Module, heads: list[str], classes: int, role: Role, path: Path, say: Say
) -> Tensors:
    """The tensors with a head for `classes` classes: the file's own, or a new one."""
    expected = backbone.state_dict()
    misfits = [key for key in heads if key not in tensors or tensors[key].shape != expected[key].shape]
    if not misfits:
        return tensors
    found = [tensors[key].shape[0] for key in heads[:1] if key in tensors]
    has = f"a head for {found[0]} classes ({_shape(tensors[heads[0]])})" if found else "no head"
    if role != "finetune":
        raise UserError(
            f"{path} has {has}, expected one for {classes} classes",
            f"fine-tune the {role} on this data (give it training), or use weights that were trained on these classes",
        )
    say(f"{path} has {has}: replaced by a new one for {classes} classes, to be trained")
    dropped = [*heads, *(key for key in tensors if key.startswith("pre_logits.") and key not in expected)]
    kept = {key: tensor for key, tensor in tensors.items() if key not in dropped}
    return {**kept, **{key: torch.zeros(expected[key].shape, dtype=expected[key].dtype) for key in heads}}


def _head_names(backbone: nn.Module) -> list[str]:
    """The names of the classification heads' parameters."""
    if isinstance(backbone, VisionTransformer):
        modules = ["head"] if backbone.head_dist is None else ["head", "head_dist"]
    else:
        named: Any = getattr(backbone, "pretrained_cfg", {}).get("classifier") or []
        modules = [named] if isinstance(named, str) else list(named)
    return [key for key in backbone.state_dict() if key.rpartition(".")[0] in modules]


@dataclass(frozen=True)
class Placing:
    """Where a file's tensors are to go. layout: whose names the file has."""

    backbone: nn.Module
    config: ModelConfig
    path: Path
    layout: str

    def check(self, tensors: Tensors, apart: Callable[[str], bool] = lambda key: False) -> None:
        """Every tensor has its place and shape, and every place its tensor, but for the names that stand `apart`."""
        expected = {key: tensor for key, tensor in self.backbone.state_dict().items() if not apart(key)}
        given = {key: tensor for key, tensor in tensors.items() if not apart(key)}
        missing = [key for key in expected if key not in given]
        complaints = {
            "another shape:": [
                f"{key} {_shape(tensor)}, expected {_shape(expected[key])}"
                for key, tensor in given.items()
                if key in expected and tensor.shape != expected[key].shape
            ],
            "no place for": [key for key in given if key not in expected],
            f"nothing for {len(missing)} of {len(expected)}:": missing,
        }
        found = [f"{what} {_some(names)}" for what, names in complaints.items() if names]
        if found:
            problem = f"{self.path} does not fit {self.config.name}: {'; '.join(found)}"
            raise UserError(problem, self._advice(tensors))

    def _advice(self, tensors: Tensors) -> str:
        """The name and geometry that the file seems to be of; where they are right, that it is not whole."""
        geometry = _geometry(tensors)
        if geometry is None:
            family = next((name for name, part in TELLTALES.items() if any(part in key for key in tensors)), None)
            looks = f"it looks like {family}: " if family else ""
            return f"{looks}give the name of the architecture that the file was saved from"
        width, depth, patch_size = geometry
        family = "deit" if "dist_token" in tensors else "vit"
        own = self.backbone.config if isinstance(self.backbone, VisionTransformer) else None
        if own and geometry == (own.width, own.depth, own.patch_size) and own.distillation_token == (family == "deit"):
            return (
                f"width, depth and patch_size agree, in {self.layout}'s layout: the file is a part (a shard, an adapter) "
                "or a variant of the ViT that timm may have; save the whole model.state_dict(), or find its name with "
                "`vit-edge models`"
            )
        for name, known in zoo.OURS.items():
            fits = name.startswith(family) and (known.width, known.depth, known.patch_size) == geometry
            if fits and name != self.config.name:
                return f"the file holds a {name}: use that name"
        return f"the file holds a ViT of width {width}, depth {depth}, patch_size {patch_size}: give that geometry"


def _geometry(tensors: Tensors) -> tuple[int, int, int] | None:
    """Width, depth and patch_size of a ViT; None of what is none."""
    projection = tensors.get("patch_embed.proj.weight")
    depth = len({key.split(".")[1] for key in tensors if re.match(r"blocks\.\d+\.", key)})
    if projection is None or projection.ndim != 4 or not depth:
        return None
    return projection.shape[0], depth, projection.shape[-1]


def check_finite(tensors: Tensors, path: Path) -> None:
    """Refuses weights with NaN or infinity."""
    broken = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise UserError(f"{path} holds NaN or infinite weights: {_some(broken)}", "use an earlier checkpoint")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in tensors.items()}


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _is_square(count: int) -> bool:
    return count > 0 and round(count**0.5) ** 2 == count


def _some(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
