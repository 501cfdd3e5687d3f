"""Pixels to logits: a backbone with its own resolution and normalisation, saved and loaded as one folder.

    model.safetensors   the backbone's state dict, names as in timm
    model.json          what it is (card.py)

B batch, C = 3 channels, H×W image, K classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit_edge.errors import UserError
from vit_edge.models import zoo
from vit_edge.models.card import SAVE_AGAIN, WEIGHTS, Card, read_card, write_card
from vit_edge.models.vit import EPSILON, VisionTransformer
from vit_edge.models.weight_files import assign
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig


class Classifier(nn.Module):
    """Pixels (B, 3, H, W), uint8 or float in [0, 255], square → logits (B, K).

    Resizes to `image_size` when the pixels come in another size, normalises, and calls the backbone, so that models
    of different resolution and normalisation share one view. With a DeiT token, training gives the backbone's pair.
    With `intermediates`, which our own ViT takes, its (logits, record).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, preprocessing: Preprocessing):
        super().__init__()
        self.backbone = backbone
        self.preprocessing = preprocessing
        self.register_buffer("mean", _channels(preprocessing.mean), persistent=False)
        self.register_buffer("std", _channels(preprocessing.std), persistent=False)

    def forward(self, pixels_BCHW: Tensor, intermediates: bool = False) -> Any:
        inputs_BCHW = self.normalise(pixels_BCHW)
        return self.backbone(inputs_BCHW, intermediates=True) if intermediates else self.backbone(inputs_BCHW)

    def normalise(self, pixels_BCHW: Tensor) -> Tensor:
        """The backbone's float input: resized if need be (antialiased), (pixels/255 - mean) / std."""
        pixels_BCHW = pixels_BCHW.to(self.mean.dtype)
        if pixels_BCHW.shape[-1] != self.image_size:
            assert pixels_BCHW.shape[-1] == pixels_BCHW.shape[-2], "views are square"
            pixels_BCHW = self._resize(pixels_BCHW)
        return (pixels_BCHW - self.mean) / self.std

    @property
    def image_size(self) -> int:
        """Side of the backbone's square input in pixels."""
        return self.preprocessing.image_size

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def set_fused_attention(self, fused: bool) -> None:
        """Fused attention everywhere in the backbone, ours or timm's, or explicit products and softmax."""
        modules: Iterable[Any] = self.backbone.modules()
        for module in modules:
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused

    def _resize(self, pixels_BCHW: Tensor) -> Tensor:
        mode = "bilinear" if self.preprocessing.interpolation == "bilinear" else "bicubic"
        size = (self.image_size, self.image_size)
        return F.interpolate(pixels_BCHW, size=size, mode=mode, antialias=True).clamp(0, 255)


def classifier_in(model: nn.Module) -> Classifier:
    """The classifier that `model` is, or wraps."""
    return next(module for module in model.modules() if isinstance(module, Classifier))


@dataclass(frozen=True)
class Loaded:
    """A saved model, in evaluation mode on the CPU."""

    classifier: Classifier
    config: ModelConfig
    classes: list[str]
    preprocessing: Preprocessing


def save(folder: Path, classifier: Classifier, config: ModelConfig, classes: list[str]) -> None:
    """Writes the weights and the card into `folder`, which must exist."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in classifier.backbone.state_dict().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    if isinstance(classifier.backbone, VisionTransformer) and classifier.backbone.config.norm_epsilon != EPSILON:
        config = config.model_copy(update={"norm_epsilon": classifier.backbone.config.norm_epsilon})
    write_card(folder, config, classes, classifier.preprocessing)


def load(folder: Path) -> Loaded:
    """The model saved in `folder`. Raises UserError when a file is missing, broken, or does not fit the card."""
    card = read_card(folder)
    preprocessing = card.preprocessing
    backbone = zoo.create_for_weights(card.model, len(card.classes), preprocessing.image_size)
    _load_state(backbone, folder / WEIGHTS, card)
    classifier = Classifier(backbone, preprocessing).eval()
    return Loaded(classifier, card.model, card.classes, preprocessing)


def multiply_adds(model: nn.Module, image_size: int) -> int:
    """Multiply-adds of the convolutions and matrix products, attention's too, for one image; nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        zoo.forward_on_meta(model, image_size)
    return counter.get_total_flops() // 2


def _channels(values: tuple[float, float, float]) -> Tensor:
    return torch.tensor([255 * value for value in values]).reshape(1, 3, 1, 1)


def _load_state(backbone: nn.Module, path: Path, card: Card) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing", SAVE_AGAIN)
    try:
        assign(backbone, load_file(path))
    except (OSError, SafetensorError) as err:
        raise UserError(f"{path} cannot be read: {err}", "copy the file again, or train again") from err
    except RuntimeError as err:
        first = str(err).splitlines()[-1].strip()
        raise UserError(f"{path} does not hold the weights of {card.model.name}: {first}", SAVE_AGAIN) from err
