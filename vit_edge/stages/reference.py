"""Stage `reference`: the float student in PyTorch on the gate's images, on a GPU where there is one.

It is what every target of the student is held against; the teacher's answers on the same images go beside it.
"""

import platform
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vit_edge import evaluation, ledger, metrics
from vit_edge.data.material import Material
from vit_edge.models import classifier as models
from vit_edge.models.card import WEIGHTS
from vit_edge.models.classifier import Classifier
from vit_edge.progress import progress
from vit_edge.store import processor_name, versions
from vit_edge.training.inference import BATCH, logits
from vit_edge.training.setup import accelerator_on

WARMUP, QUERIES, LATENCY_SECONDS = 10, 100, 10.0
"""Single images to throw away and to time; fewer of a model that is so slow that these take longer."""


def run(folder: Path, *, student: Path, teacher: Path | None, material: Material, device: str | None) -> dict[str, Any]:
    """Writes evaluation/ and, where there is a teacher, its answers (int64 (N,)); returns both models' top-1 and size."""
    place = accelerator_on(device).device
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = models.load(student)
    images_NHWC, labels_N = material.gate(loaded.classifier.preprocessing)
    model = loaded.classifier.to(place).eval()
    logits_NK = _logits("reference", model, images_NHWC, place)
    top1 = metrics.top1(logits_NK.argmax(axis=1), labels_N)
    latency_ms = _latency_ms(model, images_NHWC, place)
    evaluation.write(
        folder / "evaluation",
        images_NHWC=images_NHWC,
        labels_N=labels_N,
        logits_NK=logits_NK,
        names=material.gate_names(),
        classes=material.classes,
        data=f"{material.data.spec}, gate split",
        reference=evaluation.Reference(
            device=_device_name(place),
            kind=place.type,
            top1=top1,
            latency_ms=cast(dict[str, float], latency_ms),
            versions={"torch": torch.__version__, "python": platform.python_version()} | versions("timm"),
        ),
    )
    return {
        "device": place.type,
        "latency_ms": latency_ms,
        "student": {"top1": top1, "n": len(labels_N), "p50_ms": latency_ms["p50"]} | _size(model, student),
        "teacher": None if teacher is None else _teacher(folder, teacher, material, place),
    }


def _teacher(folder: Path, teacher: Path, material: Material, place: torch.device) -> dict[str, Any]:
    model = models.load(teacher).classifier.to(place).eval()
    images_NHWC, labels_N = material.gate(model.preprocessing)
    answers_N = _logits("teacher's answers", model, images_NHWC, place).argmax(axis=1).astype(np.int64)
    np.save(folder / ledger.TEACHER_ANSWERS, answers_N, allow_pickle=False)
    p50_ms = _latency_ms(model, images_NHWC, place)["p50"]
    return {"top1": metrics.top1(answers_N, labels_N), "n": len(labels_N), "p50_ms": p50_ms} | _size(model, teacher)


def _size(model: Classifier, folder: Path) -> dict[str, int]:
    return {
        "parameters": model.parameter_count,
        "multiply_adds": models.multiply_adds(model, model.image_size),
        "size_bytes": (folder / WEIGHTS).stat().st_size,
    }


def _logits(label: str, model: Classifier, images_NHWC: np.ndarray, place: torch.device) -> np.ndarray:
    parts = []
    with progress(label, len(images_NHWC), unit="images") as advance:
        for start in range(0, len(images_NHWC), BATCH):
            parts.append(logits(model, images_NHWC[start : start + BATCH], place))
            advance(len(parts[-1]))
    return np.concatenate(parts)


@torch.inference_mode()
def _latency_ms(model: Classifier, images_NHWC: np.ndarray, place: torch.device) -> metrics.Percentiles:
    """p50, p90, p99 and n of single images in eager float32, pixels already on the device."""
    times_ms: list[float] = []
    started = time.monotonic()
    for i in range(WARMUP + QUERIES):
        if len(times_ms) > 2 * WARMUP and time.monotonic() - started > LATENCY_SECONDS:
            break
        pixels = torch.from_numpy(np.array(images_NHWC[i % len(images_NHWC)])).permute(2, 0, 1)[None].to(place)
        _wait(place)
        start = time.perf_counter_ns()
        model(pixels)
        _wait(place)
        times_ms.append((time.perf_counter_ns() - start) / 1e6)
    return metrics.percentiles(np.asarray(times_ms[WARMUP:]))


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _device_name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else processor_name()
