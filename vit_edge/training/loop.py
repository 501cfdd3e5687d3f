"""The training loop, on Accelerate: one process, several, or several machines, unchanged.

Everything random is a function of (seed, epoch), so that a training which goes on from its last checkpoint ends
with the same weights as one that was never stopped.
"""

import json
import math
import os
import time
from collections.abc import Callable
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
from torch.utils.data import DataLoader

from vit_edge.data.views import EpochSampler, Views, training_loader
from vit_edge.errors import UserError
from vit_edge.progress import Advance, progress, say
from vit_edge.recipe import AugmentConfig, TrainingConfig

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
TUNE_REPORTS = 10

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, pixels uint8 (B, 3, H, W), labels int64 (B,) or probabilities (B, K)) → scalar."""


def fit(
    model: nn.Module,
    views: Views,
    loss: Loss,
    config: TrainingConfig,
    *,
    augment: AugmentConfig,
    classes: int,
    seed: int,
    folder: Path,
    label: str,
    tune_top1: Callable[[nn.Module], float | None],
    accelerator: Accelerator,
) -> tuple[nn.Module, dict[str, Any]]:
    """Trains `model` and returns it (its moving average when one is asked for) with the metrics of its last epoch.

    folder: where checkpoint.pt and metrics.jsonl go; a checkpoint that is there is continued.
    Raises UserError when the loss is no longer finite; the last good checkpoint stays.
    """
    loader, sampler = training_loader(views, config.batch_size, _workers())
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, config.weight_decay), lr=config.learning_rate)
    ema = ModelEmaV3(model, decay=config.ema_decay) if config.ema_decay else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = _schedule(optimizer, config, len(loader))
    mixup = _mixup(augment, config, classes)
    start = _restore(folder / CHECKPOINT, accelerator, model, optimizer, ema)
    _forget_after(folder / METRICS, start)
    if start:
        say(f"{label}: going on after epoch {start} of {config.epochs}")
    metrics: dict[str, Any] = {}
    saved = time.monotonic()
    with progress(label, config.epochs * len(views), start * len(views), unit="images") as advance:
        for epoch in range(start, config.epochs):
            metrics = _epoch(
                epoch, model, loader, sampler, loss, optimizer, schedule, ema, mixup, config, seed, accelerator, advance
            )
            if (epoch + 1) % math.ceil(config.epochs / TUNE_REPORTS) == 0 or epoch + 1 == config.epochs:
                metrics["tune_top1"] = tune_top1(_result(model, ema, accelerator))
            _log(folder / METRICS, metrics, accelerator)
            if time.monotonic() - saved > config.checkpoint_seconds:
                _checkpoint(folder / CHECKPOINT, epoch + 1, accelerator, model, optimizer, ema)
                saved = time.monotonic()
    accelerator.wait_for_everyone()
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return _result(model, ema, accelerator), metrics


def _epoch(
    epoch: int, model: nn.Module, loader: DataLoader, sampler: EpochSampler, loss: Loss, optimizer: Any, schedule: Any,
    ema: ModelEmaV3 | None, mixup: Mixup | None, config: TrainingConfig, seed: int, accelerator: Accelerator, advance: Advance,
) -> dict[str, Any]:  # fmt: skip
    sampler.epoch = epoch
    torch.manual_seed(seed * 1_000_003 + epoch)
    np.random.seed((seed * 1_000_003 + epoch) % 2**32)
    model.train()
    total, waited, started = 0.0, 0.0, time.perf_counter()
    asked = started
    for step, (pixels_BCHW, target) in enumerate(loader):
        waited += time.perf_counter() - asked
        schedule.step_update(epoch * len(loader) + step)
        if mixup is not None:
            pixels_BCHW, target = mixup(pixels_BCHW.float(), target)
        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            value = loss(model, pixels_BCHW, target)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema is not None:
            ema.update(accelerator.unwrap_model(model), epoch * len(loader) + step)
        total += _finite(value, epoch, config)
        advance(len(target) * accelerator.num_processes, f"loss {total / (step + 1):.3f}")
        asked = time.perf_counter()
    seconds = time.perf_counter() - started
    rate = optimizer.param_groups[0]["lr"]
    return {
        "epoch": epoch + 1,
        "loss": total / len(loader),
        "learning_rate": rate,
        "images_per_second": len(loader) * config.batch_size / seconds,
        "share_waiting_for_data": waited / seconds,
    }


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


def _result(model: nn.Module, ema: ModelEmaV3 | None, accelerator: Accelerator) -> nn.Module:
    return accelerator.unwrap_model(model if ema is None else ema.module)


def _restore(path: Path, accelerator: Accelerator, model: nn.Module, optimizer: Any, ema: ModelEmaV3 | None) -> int:
    """Loads the checkpoint, when there is one, and returns how many epochs it has behind it."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=accelerator.device, weights_only=True)
    accelerator.unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if ema is not None:
        ema.module.load_state_dict(state["ema"])
    return int(state["epochs"])


def _checkpoint(
    path: Path, epochs: int, accelerator: Accelerator, model: nn.Module, optimizer: Any, ema: ModelEmaV3 | None
) -> None:
    """Writes the checkpoint whole: a kill at any moment leaves the old one or the new one."""
    if not accelerator.is_main_process:
        return
    state = {
        "epochs": epochs,
        "model": accelerator.unwrap_model(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": None if ema is None else ema.module.state_dict(),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _forget_after(path: Path, epochs: int) -> None:
    """Drops the lines of epochs that were trained after the checkpoint and are trained again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:epochs]), encoding="utf-8")


def _log(path: Path, metrics: dict[str, Any], accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")


def _workers() -> int:
    """Loader processes: none on a small machine, whose cores the model itself needs."""
    return max(0, min(8, (os.cpu_count() or 1) - 2))
