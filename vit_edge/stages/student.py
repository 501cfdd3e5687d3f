"""Stage `student`: distils the teacher into the student, trains it on labels alone, or takes its weights as they are."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit_edge.data.material import Material
from vit_edge.models import classifier as models
from vit_edge.recipe import Recipe
from vit_edge.training.distillation import distillation_loss, label_loss
from vit_edge.training.loop import Loss
from vit_edge.training.train import accelerator_on, build, train


def run(
    folder: Path, *, recipe: Recipe, material: Material, teacher: Path | None, device: str | None
) -> dict[str, Any]:
    """Writes the student's model into `folder`; returns its metrics, top-1 on the tune split among them.

    teacher: the finished stage of the teacher, where the recipe distils.
    """
    config = recipe.student
    seed = recipe.seed + 1
    student = build(config.model, material, seed=seed, role="finetune" if config.training else "student")
    metrics: dict[str, Any] = {}
    if config.training is not None:
        accelerator = accelerator_on(device)
        student, metrics = train(
            student,
            _loss(recipe, teacher, accelerator.device),
            config.training,
            recipe.augment,
            material,
            seed=seed,
            folder=folder,
            label="student",
            accelerator=accelerator,
        )
    models.save(folder, student, config.model, material.classes)
    return {**metrics, "images": material.summary()}


def _loss(recipe: Recipe, teacher_folder: Path | None, device: torch.device) -> Loss:
    """The student's loss; the teacher sees the very pixels that the student sees, each normalising them its own way."""
    training, distillation = recipe.student.training, recipe.student.distillation
    assert training is not None
    smoothing = training.label_smoothing
    if teacher_folder is None or distillation is None:
        return lambda model, pixels_BCHW, target: label_loss(model(pixels_BCHW), target, smoothing)
    teacher = models.load(teacher_folder).classifier.to(device).eval().requires_grad_(False)

    def loss(model: nn.Module, pixels_BCHW: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_BK = teacher(pixels_BCHW)
        return distillation_loss(model(pixels_BCHW), teacher_BK, target, distillation, smoothing)

    return loss
