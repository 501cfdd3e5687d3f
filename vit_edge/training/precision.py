"""Which autocast precision a training step is faster in, measured on the very step."""

import copy
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["f32", "bf16"]
STEPS = 3
WORTH_IT = 1.15
"""bf16 rounds; a smaller gain than this does not pay for it."""


def faster_precision(model: nn.Module, loss: Callable[[nn.Module], Tensor], device: torch.device) -> Precision:
    """bf16 when forward and backward take at least WORTH_IT times longer in f32; a copy of the model is used up."""
    trial = copy.deepcopy(model).train()
    seconds = {name: min(_seconds(trial, loss, device, name) for _ in range(STEPS)) for name in ("f32", "bf16")}
    return "bf16" if seconds["f32"] >= WORTH_IT * seconds["bf16"] else "f32"


def _seconds(model: nn.Module, loss: Callable[[nn.Module], Tensor], device: torch.device, precision: str) -> float:
    _wait(device)
    started = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        value = loss(model)
    value.backward()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
