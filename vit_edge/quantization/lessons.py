"""What quantization-aware training learns from, and what it is judged on. N images, K classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from vit_edge.data.material import Material
from vit_edge.data.views import Views
from vit_edge.models import classifier as models
from vit_edge.models.classifier import Classifier
from vit_edge.recipe import AugmentConfig, QatConfig, Recipe
from vit_edge.training.distillation import label_loss, soft_kl
from vit_edge.training.loop import Batch
from vit_edge.training.setup import accelerator_on
from vit_edge.training.teacher import CachedTeacher, LiveTeacher, Teacher
from vit_edge.training.teacher_cache import TeacherCache


@dataclass(frozen=True)
class Lessons:
    """student: the float one. teacher: the student's own, where it has one. tune: uint8 (N, H, W, 3), labels (N,)."""

    student: Classifier
    teacher: Teacher | None
    views: Views
    augment: AugmentConfig
    tune_NHWC: np.ndarray
    tune_N: np.ndarray
    classes: int
    seed: int
    device: str | None = None

    @cached_property
    def floats(self) -> LiveTeacher:
        return LiveTeacher(self.student)

    def loss(self, model: nn.Module, batch: Batch, config: QatConfig) -> Tensor:
        """The sum of `config`'s terms by their weights."""
        output_BK = model(batch.pixels_BCHW)
        teachers: list[tuple[float, Teacher | None]] = [(config.student, self.floats), (config.teacher, self.teacher)]
        total = output_BK.new_zeros(())
        for weight, teacher in teachers:
            if weight and teacher is not None:
                total = total + weight * soft_kl(output_BK, teacher(batch).logits_BK, config.temperature)
        if config.labels:
            total = total + config.labels * label_loss(output_BK, batch.target, config.label_smoothing)
        return total


def lessons(
    recipe: Recipe, material: Material, student: Path, teacher: Path | None, device: str | None, cache: Path,
    cache_key: Mapping[str, Any],
) -> Lessons:  # fmt: skip
    """On the very views that the student learned from, so that its teacher's answers are in `cache` already.

    student, teacher: finished stages. cache_key: what the views and the answers depend on.
    """
    loaded, seed = models.load(student), recipe.seed + 1
    views = Views(*material.student_images(), material.view, recipe.augment, seed)
    asked: Teacher | None = None
    if teacher is not None:
        load = lambda: LiveTeacher(models.load(teacher).classifier.to(accelerator_on(device).device))  # noqa: E731
        key = dict(cache_key)
        asked = CachedTeacher(load, TeacherCache(cache, key, len(views), len(material.classes))) if _kept(recipe) else load()  # fmt: skip
    tune_NHWC, tune_N = material.tune(loaded.preprocessing)
    return Lessons(
        loaded.classifier, asked, views, recipe.augment, tune_NHWC, tune_N, len(material.classes), seed, device
    )


def _kept(recipe: Recipe) -> bool:
    """Whether the teacher's answers go through the cache: not those of mixed views, nor where the recipe keeps none."""
    distillation, augment = recipe.student.distillation, recipe.augment
    return distillation is not None and distillation.cache is not False and not (augment.mixup or augment.cutmix)
