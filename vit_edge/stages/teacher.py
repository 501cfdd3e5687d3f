"""Stage `teacher`: trains it from scratch, fine-tunes given weights, or takes them as they are."""

from pathlib import Path
from typing import Any

from vit_edge.data.material import Material
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.recipe import Recipe
from vit_edge.training.distillation import label_loss
from vit_edge.training.loop import fit
from vit_edge.training.setup import accelerator_on, build, tune_report


def run(
    folder: Path, *, recipe: Recipe, material: Material, device: str | None, tensorboard: bool = False
) -> dict[str, Any]:
    """Writes the teacher's model into `folder`; returns its metrics, top-1 on the tune split among them."""
    config = recipe.teacher
    if config is None:
        raise UserError("the recipe has no teacher", "give a teacher, or train the student without one")
    accelerator = accelerator_on(device)
    teacher = build(config.model, material, seed=recipe.seed, role="finetune" if config.training else "teacher")
    metrics: dict[str, Any] = {}
    if config.training is not None:
        smoothing = config.training.label_smoothing
        result, metrics = fit(
            teacher,
            Views(material.data.train, material.splits.train, material.view, recipe.augment, recipe.seed),
            lambda model, batch: label_loss(model(batch.pixels_BCHW), batch.target, smoothing),
            config.training,
            augment=recipe.augment,
            classes=len(material.classes),
            seed=recipe.seed,
            folder=folder,
            label="teacher",
            report=tune_report(teacher, material, accelerator),
            accelerator=accelerator,
            tensorboard=tensorboard,
        )
        teacher = models.classifier_in(result)
    if accelerator.is_main_process:
        models.save(folder, teacher, config.model, material.classes)
    return {**metrics, "images": material.summary()}
