"""The training loop, on Accelerate: one process, several, or several machines, unchanged.

Everything random is a function of (seed, step, process), and every process takes its share of the same batch. So a
training that goes on from its last checkpoint ends with the same weights as one that was never stopped, and a recipe
means the same training on any number of processes.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vit_edge import memory
from vit_edge.data.views import Views, training_loader
from vit_edge.errors import UserError
from vit_edge.models.classifier import classifier_in
from vit_edge.progress import Advance, progress, say
from vit_edge.recipe import AugmentConfig, TrainingConfig
from vit_edge.training import divergence, optimizer
from vit_edge.training.log import Log
from vit_edge.training.precision import Precision, faster_precision

CHECKPOINT = "checkpoint.pt"
REPORTS = 10
SAVING_SHARE = 0.05
"""Largest share of the time that goes into writing checkpoints."""


@dataclass(frozen=True)
class Batch:
    """Views and what they show: pixels (B, 3, H, W), uint8 or mixed float in [0, 255]; target int64 (B,), or mixed
    probabilities (B, K); positions int64 (B,) in the split. `trial`: a step that is only timed."""

    pixels_BCHW: Tensor
    target: Tensor
    positions_B: Tensor
    epoch: int
    trial: bool = False


Loss = Callable[[nn.Module, Batch], Tensor]
"""Scalar, of a model and a batch."""
Report = Callable[[nn.Module], dict[str, Any]]
"""What is measured on the model now and then; it decides nothing."""


@memory.kept()
def fit(
    model: nn.Module, views: Views, loss: Loss, config: TrainingConfig, *, augment: AugmentConfig, classes: int, seed: int,
    folder: Path, label: str, report: Report, accelerator: Accelerator, tensorboard: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Trains `model` and returns it (its moving average when one is asked for) with the metrics of its last epoch.

    folder: where checkpoint.pt and metrics.jsonl go; a checkpoint that is there is continued.
    Raises UserError when the loss is no longer finite or grows; the last good checkpoint stays.
    """
    training = Training(model, views, loss, config, augment, classes, seed, accelerator)
    checkpoint = folder / CHECKPOINT
    continued = training.restore(checkpoint)
    if continued and training.step:
        say(f"{label}: going on after step {training.step} of {config.epochs * training.steps}")
    if not continued and config.precision == "auto":
        say(f"{label}: {training.choose_precision()} measured faster")
        training.save(checkpoint)
    metrics: dict[str, Any] = {}
    images, epochs = training.steps * training.batch_size, training.step // training.steps
    with (
        progress(label, config.epochs * images, training.step * training.batch_size, unit="images") as advance,
        Log(folder, epochs=epochs, tensorboard=tensorboard, leads=accelerator.is_main_process) as log,
    ):
        for epoch in range(epochs, config.epochs):
            metrics = training.epoch(epoch, advance, checkpoint)
            if (epoch + 1) % math.ceil(config.epochs / REPORTS) == 0 or epoch + 1 == config.epochs:
                metrics |= report(training.result) if accelerator.is_main_process else {}
            log.write(metrics)
            if training.is_due and epoch + 1 < config.epochs:
                training.save(checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.unlink(missing_ok=True)
    return training.result, metrics


@dataclass
class Tally:
    """Sums over the steps of the epoch that is going on."""

    loss: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    seconds_waiting: float = 0.0


class Training:
    """A model with all that moves while it trains: optimiser, schedule, moving average, mixing, precision, place."""

    def __init__(
        self, model: nn.Module, views: Views, loss: Loss, config: TrainingConfig, augment: AugmentConfig, classes: int,
        seed: int, accelerator: Accelerator,
    ):  # fmt: skip
        self.loss, self.config, self.seed, self.accelerator = loss, config, seed, accelerator
        if config.checkpoint_activations:
            _checkpoint_activations(model)
        self.batch_size = self._batch_size(len(views))
        loader, self.sampler = training_loader(views, self.batch_size, config.accumulate, _workers())
        self.ema = ModelEmaV3(model, decay=config.ema_decay) if config.ema_decay else None
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer.make(model, config), loader)
        self.steps = len(views) // self.batch_size  # of an epoch
        self.schedule = optimizer.schedule(self.optimizer, config, self.steps)
        self.mixup = _mixup(augment, config, classes)
        if self.mixup is not None and self.batch_size // self._shares % 2:
            raise UserError(
                f"mixup and cutmix pair the images of a batch: {self.batch_size // self._shares} at a time is odd",
                "give an even batch_size, or lower accumulate",
            )
        self.watch = divergence.Watch(classes, config.learning_rate)
        self.precision: Precision = "f32" if config.precision == "auto" else config.precision
        self.step, self.tally, self.saving_seconds, self.saved = 0, Tally(), 0.0, time.monotonic()

    def choose_precision(self) -> Precision:
        """Takes the precision that a step measures faster in."""
        pixels_BCHW, target, positions_B = next(iter(self.loader))
        batch = Batch(pixels_BCHW, target.clamp(min=0), positions_B, epoch=0, trial=True)
        model = self.accelerator.unwrap_model(self.model)
        chosen = faster_precision(model, lambda trial: self.loss(trial, batch), self.accelerator.device)
        self.precision = broadcast_object_list([chosen])[0]  # the main process's choice, everywhere
        return self.precision

    @property
    def result(self) -> nn.Module:
        """The model that is being made: the moving average where there is one."""
        return self.accelerator.unwrap_model(self.model if self.ema is None else self.ema.module)

    def epoch(self, epoch: int, advance: Advance, checkpoint: Path) -> dict[str, Any]:
        """The rest of one pass over the training views. Raises UserError when the loss is not finite or grows.

        Writes checkpoints on the way, but none at the end: its metrics belong into the log first.
        """
        self.model.train()
        asked = time.perf_counter()
        for batches in self._batches(epoch):
            got = time.perf_counter()
            loss = self._step(batches)
            self.watch.see(loss, epoch)
            self.step += 1
            self.tally.steps += 1
            self.tally.loss += loss
            self.tally.seconds_waiting += got - asked
            self.tally.seconds += time.perf_counter() - asked
            advance(self.batch_size, f"loss {self.tally.loss / self.tally.steps:.3f}")
            if self.is_due and self.step % self.steps:
                self.save(checkpoint)
            asked = time.perf_counter()
        tally, self.tally = self.tally, Tally()
        return {
            "epoch": epoch + 1,
            "loss": tally.loss / tally.steps,
            "learning_rate": max(group["lr"] for group in self.optimizer.param_groups),
            "precision": self.precision,
            "images_per_second": tally.steps * self.batch_size / tally.seconds,
            "share_waiting_for_data": tally.seconds_waiting / tally.seconds,
        }

    def restore(self, path: Path) -> bool:
        """Goes to where the checkpoint was written; whether there is one."""
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.watch.load(state["watch"])
        self.step, self.tally, self.precision = state["step"], Tally(**state["tally"]), state["precision"]
        return True

    def save(self, path: Path) -> None:
        """Writes the checkpoint whole: a kill at any moment leaves the old one or the new one."""
        if not self.accelerator.is_main_process:
            return
        started = time.monotonic()
        state = {
            "step": self.step,
            "tally": asdict(self.tally),
            "watch": self.watch.state(),
            "precision": self.precision,
            "model": self.accelerator.unwrap_model(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)
        self.saved = time.monotonic()
        self.saving_seconds = self.saved - started

    @property
    def is_due(self) -> bool:
        """Whether to write a checkpoint after this step: never so often that writing takes a notable share."""
        interval = max(self.config.checkpoint_seconds, self.saving_seconds / SAVING_SHARE)
        return time.monotonic() - self.saved > interval

    def _batches(self, epoch: int) -> Iterator[list[Batch]]:
        """The parts of each step's batch, from the step that comes next."""
        first = self.step - epoch * self.steps
        self.sampler.epoch = epoch
        self.sampler.skip = first * self.batch_size
        parts = (
            Batch(pixels_BCHW, target.clamp(min=0), positions_B, epoch)
            for pixels_BCHW, target, positions_B in self.loader
        )
        while step := list(islice(parts, self.config.accumulate)):
            yield step

    def _step(self, batches: list[Batch]) -> float:
        """One step of the optimiser on all parts of a batch; returns the loss over every process."""
        self.schedule.step_update(self.step)
        total = 0.0
        for i, batch in enumerate(batches):
            self._seed(self.step * len(batches) + i)
            last = i + 1 == len(batches)
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                total += self._backward(self._mixed(batch), len(batches))
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.accelerator.unwrap_model(self.model), self.step)
        return total

    def _backward(self, batch: Batch, parts: int) -> float:
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            value = self.loss(self.model, batch) / parts
        self.accelerator.backward(value)
        return float(self.accelerator.reduce(value.detach(), "mean"))

    def _mixed(self, batch: Batch) -> Batch:
        if self.mixup is None:
            return batch
        pixels_BCHW, target_BK = self.mixup(batch.pixels_BCHW.float(), batch.target)
        return Batch(pixels_BCHW, target_BK, batch.positions_B, batch.epoch)

    def _seed(self, draw: int) -> None:
        """Dropout, stochastic depth and mixing draw from what (seed, draw, process) decides."""
        key = np.random.SeedSequence([self.seed, draw, self.accelerator.process_index]).generate_state(1)
        torch.manual_seed(int(key[0]))
        np.random.seed(int(key[0]))

    @property
    def _shares(self) -> int:
        """How many parts a batch is computed in, one after the other and side by side."""
        return int(self.config.accumulate * self.accelerator.num_processes)

    def _batch_size(self, images: int) -> int:
        """The recipe's, or what so few images fill. UserError when it does not divide into the shares."""
        size, shares = self.config.batch_size, self._shares
        if size % shares:
            raise UserError(
                f"batch_size {size} does not divide into accumulate {self.config.accumulate} × {self.accelerator.num_processes} process(es)",
                f"the nearest that does is {max(1, round(size / shares)) * shares}",
            )
        if images >= size:
            return size
        if images < shares:
            raise UserError(f"{images} training images are fewer than the {shares} shares of a batch", "give more images, or lower accumulate")  # fmt: skip
        say(f"{images} training images are fewer than a batch of {size}: batches of {images // shares * shares}")
        return images // shares * shares


def _checkpoint_activations(model: nn.Module) -> None:
    backbone: Any = classifier_in(model).backbone
    try:
        backbone.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as err:
        raise UserError("checkpoint_activations has no effect on this model", "leave it out") from err


def _mixup(augment: AugmentConfig, config: TrainingConfig, classes: int) -> Mixup | None:
    if not augment.mixup and not augment.cutmix:
        return None
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)


def _workers() -> int:
    """Loader processes: none on a small machine, whose cores the model itself needs."""
    return max(0, min(8, (os.cpu_count() or 1) - 2))
