"""What the training of a teacher and of a student start from: the device, the model, what is reported on the way."""

from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list

from vit_edge.data.material import Material
from vit_edge.errors import UserError
from vit_edge.models import origin, zoo
from vit_edge.models.classifier import Classifier
from vit_edge.progress import say
from vit_edge.recipe import ModelConfig
from vit_edge.training.inference import top1
from vit_edge.training.loop import Report

Role = Literal["teacher", "student", "finetune"]


def build(config: ModelConfig, material: Material, *, seed: int, role: Role) -> Classifier:
    """A classifier with random weights drawn from `seed`, or with the weights that `config` names."""
    torch.manual_seed(seed)
    image_size = config.image_size or material.image_size
    preprocessing = origin.preprocessing(config, image_size)
    create = zoo.create if config.weights == "none" else zoo.create_for_weights
    backbone = create(config, len(material.classes), image_size)
    if config.weights != "none":
        from vit_edge.models import checkpoints

        checkpoints.load_weights(backbone, config.weights, config=config, classes=material.classes, role=role, say=say)
    return Classifier(backbone, preprocessing)


def tune_report(classifier: Classifier, material: Material, accelerator: Accelerator) -> Report:
    """Top-1 on the tune split, of a model with the classifier's preprocessing."""
    if not len(material.splits.tune):
        return lambda model: {"tune_top1": None}
    images_NHWC, labels_N = material.tune(classifier.preprocessing)
    return lambda model: {"tune_top1": top1(model, images_NHWC, labels_N, accelerator.device)}


def accelerator_on(device: str | None) -> Accelerator:
    """Accelerate's choice of device, or the CPU. UserError when `device` is neither of these two, or not here.

    Each batch is divided among the processes.
    """
    accelerator = Accelerator(cpu=device == "cpu", dataloader_config=DataLoaderConfiguration(split_batches=True))
    if device not in (None, accelerator.device.type):
        raise UserError(
            f"--device {device} is not to be had: found {accelerator.device.type}",
            f"leave --device out, or give --device {accelerator.device.type} or --device cpu",
        )
    return accelerator


def told(value: Any, device: str | None) -> Any:
    """The leading process's value, in every process, when all have come here."""
    accelerator_on(device)
    return broadcast_object_list([value])[0]
