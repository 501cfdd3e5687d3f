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
from vit_edge.runtimes import machine
from vit_edge.store import nvidia_driver, processor_name, versions
from vit_edge.training.inference import BATCH, logits
from vit_edge.training.setup import accelerator_on

# Single images to throw away and to time; fewer of a model that is so slow that these take longer.
WARMUP, QUERIES, LATENCY_SECONDS = 20, 200, 10.0
# Images that a lower precision is judged on; on a GPU, which is fast, and on a CPU.
BESIDE_IMAGES = {"cuda": 10_000, "cpu": 1_000}
BFLOAT16_CPU = {"AVX-512 BF16", "AMX bf16", "bf16"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    beside = {name: _beside(name, model, images_NHWC, labels_N, logits_NK, place) for name in _low_precisions(place)}
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
            clock="cuda events" if place.type == "cuda" else "wall clock",
            beside=beside,
            driver=nvidia_driver() if place.type == "cuda" else None,
            versions=_versions(place),
        ),
    )
    return {
        "device": place.type,
        "latency_ms": latency_ms,
        "beside": {name: one.model_dump() for name, one in beside.items()},
        "student": {"top1": top1, "n": len(labels_N), "p50_ms": latency_ms["p50"]} | _size(model, student),
        "teacher": None if teacher is None else _teacher(folder, teacher, material, place),
    }


def _low_precisions(place: torch.device) -> list[Any]:
    """What the device computes in beside f32, in its own circuits."""
    if place.type == "cuda":
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ["bf16", "fp16"] if bfloat16 else ["fp16"]
    return ["bf16"] if place.type == "cpu" and BFLOAT16_CPU & set(machine.instruction_sets()) else []


def _beside(
    precision: str, model: Classifier, images_NHWC: np.ndarray, labels_N: np.ndarray, logits_NK: np.ndarray,
    place: torch.device,
) -> evaluation.LowPrecision:  # fmt: skip
    """The model under autocast. logits_NK: the reference's."""
    n = min(BESIDE_IMAGES[place.type], len(labels_N))
    with torch.autocast(place.type, DTYPES[precision]):
        answers_N = metrics.answers(_logits(precision, model, images_NHWC[:n], place))
        latency_ms = _latency_ms(model, images_NHWC, place)
    return evaluation.LowPrecision(
        n=n,
        top1=metrics.top1(answers_N, labels_N[:n]),
        agreement=metrics.agreement(metrics.answers(logits_NK[:n]), answers_N),
        latency_ms=cast(dict[str, float], latency_ms),
    )


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


@torch.no_grad()
def _latency_ms(model: Classifier, images_NHWC: np.ndarray, place: torch.device) -> metrics.Percentiles:
    """p50, p90, p99 and n of single images in eager mode, pixels already on the device."""
    times_ms: list[float] = []
    started = time.monotonic()
    for i in range(WARMUP + QUERIES):
        if len(times_ms) > 2 * WARMUP and time.monotonic() - started > LATENCY_SECONDS:
            break
        pixels = torch.from_numpy(np.array(images_NHWC[i % len(images_NHWC)])).permute(2, 0, 1)[None].to(place)
        times_ms.append((_cuda_ms if place.type == "cuda" else _wall_ms)(model, pixels))
    return metrics.percentiles(np.asarray(times_ms[WARMUP:]))


def _cuda_ms(model: Classifier, pixels_BCHW: torch.Tensor) -> float:
    """Between two events on the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(pixels_BCHW.device)
    start.record()
    model(pixels_BCHW)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _wall_ms(model: Classifier, pixels_BCHW: torch.Tensor) -> float:
    start = time.perf_counter_ns()
    model(pixels_BCHW)
    return (time.perf_counter_ns() - start) / 1e6


def _versions(place: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()} | versions("timm")
    if place.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return found


def _device_name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else processor_name()
