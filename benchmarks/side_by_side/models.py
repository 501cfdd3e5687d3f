"""The models that are compared, each as this project builds it and as timm does: the same architecture, random weights."""

from dataclasses import dataclass

import timm
import torch
from torch import nn

from side_by_side.images import SIDE
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig

CLASSES = 1000
# Our name → timm's; the same where the product takes timm's model.
MODELS = {
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "deit_s16": "deit_small_distilled_patch16_224",
    "swin_t": "swin_tiny_patch4_window7_224",
    "mobilenetv3_large": "mobilenetv3_large_100",
    "efficientnet_lite0": "efficientnet_lite0",
}
VITS = ("vit_ti16", "vit_s16", "deit_s16", "swin_t")


@dataclass(frozen=True)
class Case:
    """One model at one batch size."""

    model: str
    batch: int

    @property
    def transformer(self) -> bool:
        return self.model in VITS

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(name=self.model if self.model in zoo.OURS else MODELS[self.model])


def classifier(case: Case) -> Classifier:
    torch.manual_seed(0)
    backbone = with_biases(zoo.create(case.config, CLASSES, SIDE))
    return Classifier(backbone, Preprocessing(image_size=SIDE)).eval()


def timms(case: Case) -> nn.Module:
    """As timm's own export script makes it."""
    torch.manual_seed(0)
    return with_biases(timm.create_model(MODELS[case.model], exportable=True)).eval()


@torch.no_grad()
def with_biases(model: nn.Module) -> nn.Module:
    """Biases that are not zero and norms that are not the identity: an optimiser would take those out."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
