"""What training a teacher and training a student have in common: build, fit, save."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from vit_edge.data.material import Material
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.progress import say
from vit_edge.recipe import AugmentConfig, ModelConfig, TrainingConfig
from vit_edge.training.inference import top1
from vit_edge.training.loop import Loss, fit

Role = Literal["teacher", "student", "finetune"]


def build(config: ModelConfig, material: Material, *, seed: int, role: Role) -> Classifier:
    """A classifier with random weights drawn from `seed`, or with the weights that `config` names."""
    torch.manual_seed(seed)
    create = zoo.create if config.weights == "none" else zoo.create_for_weights
    backbone = create(config, len(material.classes), material.image_size)
    if config.weights != "none":
        from vit_edge.models import checkpoints

        checkpoints.load_weights(backbone, config.weights, config=config, classes=material.classes, role=role, say=say)
    return Classifier(backbone, zoo.preprocessing(config, material.image_size))


def train(
    classifier: Classifier, loss: Loss, config: TrainingConfig, augment: AugmentConfig, material: Material,
    *, seed: int, folder: Path, label: str, accelerator: Accelerator,
) -> tuple[Classifier, dict[str, Any]]:  # fmt: skip
    """Fits the classifier on the train split; the metrics hold top-1 on the tune split."""
    views = Views(material.data.train, material.splits.train, material.view, augment, seed)
    result, metrics = fit(
        classifier,
        views,
        loss,
        config,
        augment=augment,
        classes=len(material.classes),
        seed=seed,
        folder=folder,
        label=label,
        tune_top1=_tune_top1(classifier, material, accelerator),
        accelerator=accelerator,
    )
    return result, metrics  # type: ignore[return-value]


def _tune_top1(
    classifier: Classifier, material: Material, accelerator: Accelerator
) -> Callable[[nn.Module], float | None]:
    if not len(material.splits.tune):
        return lambda model: None
    images_NHWC, labels_N = material.tune(classifier.preprocessing)
    return lambda model: top1(model, images_NHWC, labels_N, accelerator.device)


def accelerator_on(device: str | None) -> Accelerator:
    """Accelerate's choice of device, or the CPU. UserError when `device` is neither of these two, or not here."""
    accelerator = Accelerator(cpu=device == "cpu")
    if device not in (None, accelerator.device.type):
        raise UserError(
            f"--device {device} is not to be had: found {accelerator.device.type}",
            f"leave --device out, or give --device {accelerator.device.type} or --device cpu",
        )
    return accelerator
