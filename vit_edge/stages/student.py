"""Stage `student`: distils the teacher into the student, trains it on labels alone, or takes its weights as they are."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vit_edge.data.material import Material
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.models.classifier import Classifier
from vit_edge.progress import say
from vit_edge.quantization import watch
from vit_edge.recipe import DistillationConfig, Recipe
from vit_edge.training.distillation import distillation_loss, label_loss
from vit_edge.training.features import FeatureStudent, feature_shape
from vit_edge.training.loop import Batch, Loss, Report, fit
from vit_edge.training.setup import accelerator_on, build, tune_report
from vit_edge.training.teacher import CachedTeacher, LiveTeacher, Teacher
from vit_edge.training.teacher_cache import TOP, WHOLE, TeacherCache


def run(
    folder: Path, *, recipe: Recipe, material: Material, teacher: Path | None, device: str | None,
    cache: Path, cache_key: Mapping[str, Any], tensorboard: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes the student's model into `folder`; returns its metrics, top-1 on the tune split among them.

    teacher: the finished stage of the teacher, where the recipe distils. cache: where its logits are kept, which
    depend on the views and on what `cache_key` names.
    """
    config = recipe.student
    accelerator = accelerator_on(device)
    seed = recipe.seed + 1
    student = build(config.model, material, seed=seed, role="finetune" if config.training else "student")
    metrics: dict[str, Any] = {}
    if config.training is not None:
        views = Views(*material.student_images(), material.view, recipe.augment, seed)
        model: nn.Module = student
        if teacher is None or config.distillation is None:
            loss = learning_labels(config.training.label_smoothing)
        else:
            open_cache = lambda: TeacherCache(cache, cache_key, len(views), len(material.classes))  # noqa: E731
            model, loss = _distilled(student, recipe, teacher, len(material.classes), open_cache, accelerator.device)
        result, metrics = fit(
            model,
            views,
            loss,
            config.training,
            augment=recipe.augment,
            classes=len(material.classes),
            seed=seed,
            folder=folder,
            label="student",
            report=_report(student, material, accelerator),
            accelerator=accelerator,
            tensorboard=tensorboard,
        )
        student = models.classifier_in(result)
    if accelerator.is_main_process:
        models.save(folder, student, config.model, material.classes)
    return {**metrics, "images": material.summary()}


def learning_labels(smoothing: float) -> Loss:
    """The loss of a student without a teacher."""
    return lambda model, batch: label_loss(model(batch.pixels_BCHW), batch.target, smoothing)


def _distilled(
    student: Classifier,
    recipe: Recipe,
    folder: Path,
    classes: int,
    open_cache: Callable[[], TeacherCache],
    device: torch.device,
) -> tuple[nn.Module, Loss]:
    """What is trained, the student or the student with a projection, and its loss."""
    training, config = recipe.student.training, recipe.student.distillation
    assert training is not None
    assert config is not None

    def load() -> LiveTeacher:
        return LiveTeacher(models.load(folder).classifier.to(device))

    if config.features:
        model, teacher = _comparing_features(student, models.load(folder).classifier.to(device), config)
        return model, distilling(teacher, config, training.label_smoothing, features=True)
    if not _keeps_logits(config, classes):
        return student, distilling(load(), config, training.label_smoothing)
    cache = open_cache()
    cache.check_space(training.epochs)
    return student, distilling(CachedTeacher(load, cache), config, training.label_smoothing)


def _keeps_logits(config: DistillationConfig, classes: int) -> bool:
    """Whether the teacher's logits go through the cache. UserError when they are to and would not be enough."""
    term = config.needs_every_logit
    enough = term is None or classes <= WHOLE
    if config.cache and not enough:
        raise UserError(
            f"distillation.{term} needs every logit, and of {classes} classes the cache keeps the {TOP} largest alone",
            "set student.distillation.cache to false, or use distillation.kl alone",
        )
    if config.cache is None and not enough:
        say(f"the teacher's logits are not kept: distillation.{term} needs all {classes} of them")
    return enough if config.cache is None else config.cache


def _comparing_features(
    student: Classifier, teacher: Classifier, config: DistillationConfig
) -> tuple[FeatureStudent, LiveTeacher]:
    width, side = feature_shape(teacher)
    grid = min(side, feature_shape(student)[1]) if config.feature_kind == "tokens" else None
    return FeatureStudent(student, width, grid), LiveTeacher(teacher, features=True, grid=grid)


def distilling(teacher: Teacher, config: DistillationConfig, smoothing: float, *, features: bool = False) -> Loss:
    """The loss of a student with a teacher; with `features`, of a FeatureStudent."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        answer = teacher(batch)
        output = model(batch.pixels_BCHW)
        own_BND = None
        if features:
            output, own_BND = output
        return distillation_loss(output, answer, batch.target, config, smoothing, own_BND)

    return loss


def _report(student: Classifier, material: Material, accelerator: Accelerator) -> Report:
    """Top-1 on the tune split, and how well the student would stand int8 as it is."""
    tune = tune_report(student, material, accelerator)
    images_NHWC = material.calibration(student.preprocessing)[: watch.IMAGES]

    def report(model: nn.Module) -> dict[str, Any]:
        found = watch.quantizability(models.classifier_in(model), images_NHWC, accelerator.device)
        if found.agreement < watch.OUT_OF_REACH and found.worst is not None:
            block, outliers = found.worst
            say(
                f"student: int8 would answer {1 - found.agreement:.1%} of the images otherwise; the largest outliers are in "
                f"{block}: {outliers.max_over_sigma:.0f} σ, kurtosis {outliers.kurtosis:.0f}"
            )
        int8 = {"int8_agreement": found.agreement, "int8_sqnr_db": found.sqnr_db}
        blocks = {name: asdict(outliers) for name, outliers in found.blocks.items()}
        return {**tune(model), **int8, "outliers": blocks}

    return report
