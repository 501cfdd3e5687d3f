"""A recipe that trains in a second or two, on digits of 16 px."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vit_edge.recipe import Recipe
from vit_edge.settings import parse

MODEL = {"name": "vit_ti16", "stem": [16, 32], "patch_size": 1, "width": 32, "depth": 2, "heads": 2}
TRAINING = {"epochs": 6, "batch_size": 64, "learning_rate": 2e-3, "precision": "f32"}
SGD = {"optimizer": "sgd", "learning_rate": 0.05}
"""Unlike Adam it leaves rounding errors as small as they are."""
SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"spec": "digits", "image_size": 16, "calibration_images": 64, "train_images": 256},
    "augment": {"shift": 0.1},
    "teacher": {"model": MODEL, "training": TRAINING},
    "student": {"model": MODEL | {"drop_path": 0.1}, "training": TRAINING},
}


def small(**settings: Any) -> Recipe:
    """The recipe with dotted keys laid over it, written with __ for a dot."""
    values = json.loads(json.dumps(SMALL))
    for key, value in settings.items():
        *groups, last = key.split("__")
        inner = values
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return parse(Recipe, values, "test")


def alone(**settings: Any) -> Recipe:
    """The student trained on labels, with no teacher."""
    return small(teacher=None, student__distillation=None, **settings)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the student."""
    return load_file(run / "student" / "model.safetensors")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The student's, epoch by epoch."""
    text = (run / "student" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def same_weights(run: Path, other: Path) -> bool:
    """Bit for bit."""
    a, b = weights(run), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
