"""Stage `teacher`: trains it from scratch, fine-tunes given weights, or takes them as they are."""

from pathlib import Path
from typing import Any

from vit_edge.data.material import Material
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.recipe import Recipe
from vit_edge.training.distillation import label_loss
from vit_edge.training.train import accelerator_on, build, train


def run(folder: Path, *, recipe: Recipe, material: Material, device: str | None) -> dict[str, Any]:
    """Writes the teacher's model into `folder`; returns its metrics, top-1 on the tune split among them."""
    config = recipe.teacher
    if config is None:
        raise UserError("the recipe has no teacher", "give a teacher, or train the student without one")
    teacher = build(config.model, material, seed=recipe.seed, role="finetune" if config.training else "teacher")
    metrics: dict[str, Any] = {}
    if config.training is not None:
        smoothing = config.training.label_smoothing
        teacher, metrics = train(
            teacher,
            lambda model, pixels_BCHW, target: label_loss(model(pixels_BCHW), target, smoothing),
            config.training,
            recipe.augment,
            material,
            seed=recipe.seed,
            folder=folder,
            label="teacher",
            accelerator=accelerator_on(device),
        )
    models.save(folder, teacher, config.model, material.classes)
    return {**metrics, "images": material.summary()}
