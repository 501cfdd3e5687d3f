"""The training loop, on Accelerate: one process, several, or several machines, unchanged.

Everything random is a function of (seed, epoch), so that a training which goes on from its last checkpoint ends
with the same weights as one that was never stopped.
"""

import json
import math
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from timm.data import Mixup
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vit_edge.data.views import Views, training_loader
from vit_edge.errors import UserError
from vit_edge.progress import Advance, progress, say
from vit_edge.recipe import AugmentConfig, TrainingConfig
from vit_edge.training.precision import Precision, faster_precision

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
TUNE_REPORTS = 10

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, pixels uint8 (B, 3, H, W), labels int64 (B,) or probabilities (B, K)) → scalar."""


def fit(
    model: nn.Module, views: Views, loss: Loss, config: TrainingConfig, *, augment: AugmentConfig, classes: int, seed: int,
    folder: Path, label: str, tune_top1: Callable[[nn.Module], float | None], accelerator: Accelerator,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Trains `model` and returns it (its moving average when one is asked for) with the metrics of its last epoch.

    folder: where checkpoint.pt and metrics.jsonl go; a checkpoint that is there is continued.
    tune_top1: top-1 on the tune split, which is reported now and then and decides nothing.
    Raises UserError when the loss is no longer finite; the last good checkpoint stays.
    """
    training = Training(model, views, loss, config, augment, classes, seed, accelerator)
    start = training.restore(folder / CHECKPOINT)
    _forget_after(folder / METRICS, start)
    if start:
        say(f"{label}: going on after epoch {start} of {config.epochs}")
    elif config.precision == "auto":
        say(f"{label}: {training.precision} measured faster")
    metrics: dict[str, Any] = {}
    saved = time.monotonic()
    with progress(label, config.epochs * len(views), start * len(views), unit="images") as advance:
        for epoch in range(start, config.epochs):
            metrics = training.epoch(epoch, advance)
            if (epoch + 1) % math.ceil(config.epochs / TUNE_REPORTS) == 0 or epoch + 1 == config.epochs:
                metrics["tune_top1"] = tune_top1(training.result)
            if accelerator.is_main_process:
                _log(folder / METRICS, metrics)
            if time.monotonic() - saved > config.checkpoint_seconds:
                training.save(folder / CHECKPOINT, epoch + 1)
                saved = time.monotonic()
    accelerator.wait_for_everyone()
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return training.result, metrics


class Training:
    """A model with all that moves while it trains: optimiser, schedule, moving average, mixing, precision."""

    def __init__(
        self, model: nn.Module, views: Views, loss: Loss, config: TrainingConfig, augment: AugmentConfig, classes: int,
        seed: int, accelerator: Accelerator,
    ):  # fmt: skip
        self.loss, self.config, self.seed, self.accelerator = loss, config, seed, accelerator
        loader, self.sampler = training_loader(views, config.batch_size, _workers())
        optimizer = torch.optim.AdamW(_parameter_groups(model, config.weight_decay), lr=config.learning_rate)
        self.ema = ModelEmaV3(model, decay=config.ema_decay) if config.ema_decay else None
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.schedule = _schedule(self.optimizer, config, len(self.loader))
        self.mixup = _mixup(augment, config, classes)

    @cached_property
    def precision(self) -> Precision:
        """The recipe's, or the one that a step measures faster in; a continued training keeps its own."""
        if self.config.precision != "auto":
            return self.config.precision
        pixels_BCHW, target, _ = next(iter(self.loader))
        return faster_precision(self.model, self.loss, pixels_BCHW, target)

    @property
    def result(self) -> nn.Module:
        """The model that is being made: the moving average where there is one."""
        return self.accelerator.unwrap_model(self.model if self.ema is None else self.ema.module)

    def epoch(self, epoch: int, advance: Advance) -> dict[str, Any]:
        """One pass over the training views. Raises UserError when the loss is no longer finite."""
        precision = self.precision
        self._seed(epoch)
        self.model.train()
        total, images, waited = 0.0, 0, 0.0
        started = asked = time.perf_counter()
        for step, (pixels_BCHW, target, _) in enumerate(self.loader):
            waited += time.perf_counter() - asked
            total += self._step(epoch * len(self.loader) + step, pixels_BCHW, target, precision)
            images += len(target) * self.accelerator.num_processes
            advance(len(target) * self.accelerator.num_processes, f"loss {total / (step + 1):.3f}")
            asked = time.perf_counter()
        seconds = time.perf_counter() - started
        return {
            "epoch": epoch + 1,
            "loss": total / len(self.loader),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "precision": precision,
            "images_per_second": images / seconds,
            "share_waiting_for_data": waited / seconds,
        }

    def restore(self, path: Path) -> int:
        """Loads the checkpoint, when there is one, and returns how many epochs it has behind it."""
        if not path.exists():
            return 0
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.precision = state["precision"]
        return int(state["epochs"])

    def save(self, path: Path, epochs: int) -> None:
        """Writes the checkpoint whole: a kill at any moment leaves the old one or the new one."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "epochs": epochs,
            "precision": self.precision,
            "model": self.accelerator.unwrap_model(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def _step(self, step: int, pixels_BCHW: Tensor, target: Tensor, precision: Precision) -> float:
        self.schedule.step_update(step)
        if self.mixup is not None:
            pixels_BCHW, target = self.mixup(pixels_BCHW.float(), target)
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=precision == "bf16"):
            value = self.loss(self.model, pixels_BCHW, target)
        self.accelerator.backward(value)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.accelerator.unwrap_model(self.model), step)
        return _finite(value, step // len(self.loader), self.config)

    def _seed(self, epoch: int) -> None:
        """Dropout, stochastic depth and mixing draw from what (seed, epoch) decides."""
        self.sampler.epoch = epoch
        torch.manual_seed(self.seed * 1_000_003 + epoch)
        np.random.seed((self.seed * 1_000_003 + epoch) % 2**32)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for matrices and kernels; none for biases and norms, nor for what a module of the model names itself, such
    as a ViT its tokens and positions."""
    spared = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if hasattr(module, "no_weight_decay")
        for name in module.no_weight_decay()
    }
    return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=spared)


def _finite(value: Tensor, epoch: int, config: TrainingConfig) -> float:
    number = float(value.detach())
    if not math.isfinite(number):
        raise UserError(
            f"the loss became {number} in epoch {epoch + 1}: the rate {config.learning_rate:g} is too high, or there is a bad input",
            "lower learning_rate or lengthen warmup_epochs; the last good checkpoint is kept",
        )
    return number


def _schedule(optimizer: Any, config: TrainingConfig, steps: int) -> CosineLRScheduler:
    warmup = min(round(config.warmup_epochs * steps), config.epochs * steps // 2)
    return CosineLRScheduler(
        optimizer,
        t_initial=config.epochs * steps,
        lr_min=config.learning_rate / 100,
        warmup_t=warmup,
        warmup_lr_init=config.learning_rate / 100,
        t_in_epochs=False,
    )


def _mixup(augment: AugmentConfig, config: TrainingConfig, classes: int) -> Mixup | None:
    if not augment.mixup and not augment.cutmix:
        return None
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)


def _forget_after(path: Path, epochs: int) -> None:
    """Drops the lines of epochs that were trained after the checkpoint and are trained again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:epochs]), encoding="utf-8")


def _log(path: Path, metrics: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _workers() -> int:
    """Loader processes: none on a small machine, whose cores the model itself needs."""
    return max(0, min(8, (os.cpu_count() or 1) - 2))
