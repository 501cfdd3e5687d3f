"""What the teacher costs: an epoch with its logits cached, with it live, without it, and timm's own distillation.

    python benchmarks/distill_speed.py [--rounds 7] [--batch 16] [--steps 3] [--precision f32]

ViT-B/16 teaches ViT-Ti/16 at 224 px on scikit-learn's digits. Every way trains the same student from the same weights
on the same augmented views, with the same batch, precision and optimiser; timm's is its LogitDistillationTask in a plain
loop, with timm's own models. The ways take turns, an epoch each; ratios are medians over the rounds. The weights are
random: this says nothing of accuracy.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from accelerate import Accelerator
from timm.task import LogitDistillationTask
from torch import nn

from vit_edge.data import datasets
from vit_edge.data.views import Views, training_loader
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig, DistillationConfig, ModelConfig, TrainingConfig
from vit_edge.report.console import show_table
from vit_edge.stages.student import distilling, learning_labels
from vit_edge.training.loop import Loss, Training
from vit_edge.training.setup import accelerator_on
from vit_edge.training.teacher import CachedTeacher, LiveTeacher
from vit_edge.training.teacher_cache import TeacherCache

SIDE, CLASSES = 224, 10
TEACHER, STUDENT = ("vit_b16", "vit_base_patch16_224"), ("vit_ti16", "vit_tiny_patch16_224")
AUGMENT = AugmentConfig(shift=0.1, scale=0.1)


def classifier(name: str) -> Classifier:
    torch.manual_seed(0)
    return Classifier(zoo.create(ModelConfig(name=name), CLASSES, SIDE), Preprocessing(image_size=SIDE))


def ours(views: Views, loss: Loss, config: TrainingConfig, accelerator: Accelerator) -> Callable[[], None]:
    training = Training(classifier(STUDENT[0]), views, loss, config, AUGMENT, CLASSES, 0, accelerator)

    def epoch() -> None:
        training.step = 0  # the same epoch again: its views are those that the cache holds
        training.epoch(0, lambda steps=1, note="": None, Path("unused"))

    return epoch


def timms(views: Views, config: TrainingConfig) -> Callable[[], None]:
    student, teacher = (
        _with_weights_of(classifier(name), timm.create_model(theirs, num_classes=CLASSES))
        for name, theirs in (STUDENT, TEACHER)
    )
    task = LogitDistillationTask(
        student,
        teacher,
        nn.CrossEntropyLoss(),
        distill_loss_weight=0.9,
        task_loss_weight=0.1,
        temperature=2.0,
        verbose=False,
    ).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.learning_rate, fused=True)
    loader, _ = training_loader(views, config.batch_size, 1, 0)

    def epoch() -> None:
        for pixels_BCHW, target, _ in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                loss = task((pixels_BCHW.float() / 255 - 0.5) / 0.5, target)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    arguments = parser.parse_args()
    accelerator = accelerator_on("cpu")
    images = datasets.find("digits").load().train
    views = Views(images, np.arange(arguments.batch * arguments.steps), Preprocessing(image_size=SIDE), AUGMENT, 0)
    config = TrainingConfig(
        epochs=1,
        batch_size=arguments.batch,
        precision=arguments.precision,
        learning_rate=1e-4,
        checkpoint_seconds=1e9,
        label_smoothing=0.0,
    )
    teacher = LiveTeacher(classifier(TEACHER[0]))
    distillation = DistillationConfig(labels=0.1, kl=0.9, temperature=2.0)
    with tempfile.TemporaryDirectory() as folder:
        cache = TeacherCache(Path(folder), {}, len(views), CLASSES)
        ways = {
            "no teacher": ours(views, learning_labels(0.0), config, accelerator),
            "teacher cached": ours(
                views, distilling(CachedTeacher(lambda: teacher, cache), distillation, 0.0), config, accelerator
            ),
            "teacher live": ours(views, distilling(teacher, distillation, 0.0), config, accelerator),
            "timm, teacher live": timms(views, config),
        }
        show(measured(ways, arguments.rounds), arguments)


def measured(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's epoch. The first, which fills the cache and warms up, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, epoch in ways.items():
            started = time.perf_counter()
            epoch()
            seconds[name].append(time.perf_counter() - started)
    return {name: found[1:] for name, found in seconds.items()}


def show(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    def ratio(name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

    rows = [
        (
            name,
            f"{statistics.median(found):.2f}",
            f"{min(found):.2f} … {max(found):.2f}",
            f"{ratio(name, 'no teacher'):.3f}",
            f"{ratio(name, 'timm, teacher live'):.3f}",
        )
        for name, found in seconds.items()
    ]
    images = arguments.batch * arguments.steps
    print(
        f"{images} images an epoch, batch {arguments.batch}, {arguments.precision}, {torch.get_num_threads()} threads, {arguments.rounds} rounds, torch {torch.__version__}, timm {timm.__version__}"
    )
    show_table(("epoch", "seconds, median", "range", "to no teacher", "to timm"), rows)


def _with_weights_of(ours: Classifier, theirs: nn.Module) -> nn.Module:
    theirs.load_state_dict(copy.deepcopy(ours.backbone.state_dict()))
    return theirs


if __name__ == "__main__":
    main()
