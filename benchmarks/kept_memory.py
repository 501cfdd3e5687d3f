"""What keeping freed memory with the process is worth (vit_edge/memory.py), on a CPU under glibc.

    python benchmarks/kept_memory.py [--rounds 3] [--seconds 10]

A training step of ViT-Ti/16 at 64 px, bf16, 128 images, and a pass of int8's calibration at 224 px. Each measurement is a
process of its own, with and without in turn; images a second are medians over the rounds, the peak is of the process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from vit_edge import memory
from vit_edge.export.fold import deployable
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.preprocess import Preprocessing
from vit_edge.quantization import calibration
from vit_edge.recipe import ModelConfig
from vit_edge.report.console import show_table
from vit_edge.runtimes import machine

CLASSES = 10
KEPT, USUAL = "kept", "given back"


def training() -> tuple[int, Callable[[], object]]:
    """Images of a step, and the step."""
    model = zoo.create(ModelConfig(name="vit_ti16"), CLASSES, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(128, 3, 64, 64), torch.randint(0, CLASSES, (128,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return len(images), step


def calibrating() -> tuple[int, Callable[[], object]]:
    backbone = zoo.create(ModelConfig(name="vit_ti16"), CLASSES, 224)
    graph = deployable(Classifier(backbone, Preprocessing(image_size=224)).eval())
    images_NHWC = np.random.default_rng(0).integers(0, 256, (32, 224, 224, 3), dtype=np.uint8)
    return len(images_NHWC), lambda: calibration.observe(graph, images_NHWC)


WORK = {"training": training, "calibration": calibrating}


def measured(work: str, way: str, seconds: float) -> dict[str, float]:
    """In a process of its own."""
    torch.manual_seed(0)
    images, run = WORK[work]()
    with memory.kept() if way == KEPT else nullcontext():
        run()
        started, runs = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            run()
            runs += 1
        rate = images * runs / (time.perf_counter() - started)
    return {"images_per_second": rate, "peak_mb": (machine.peak_memory_bytes() or 0) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one, options.seconds)))
        return
    rows = []
    for work in WORK:
        found: dict[str, list[dict[str, float]]] = {KEPT: [], USUAL: []}
        for _ in range(options.rounds):
            for way, results in found.items():
                command = [sys.executable, __file__, "--one", work, way, "--seconds", str(options.seconds)]
                results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        rate = {way: statistics.median(one["images_per_second"] for one in results) for way, results in found.items()}
        peak = {way: statistics.median(one["peak_mb"] for one in results) for way, results in found.items()}
        rows += [[work, way, f"{rate[way]:.0f}", f"{rate[way] / rate[USUAL]:.2f}", f"{peak[way]:.0f}"] for way in found]
    show_table(["work", "freed memory is", "images / s", "ratio", "peak MB"], rows)


if __name__ == "__main__":
    main()
