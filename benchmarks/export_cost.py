"""Seconds and peak memory of exporting to every shipped target's runtime, a process for each: ViT-B/16 by default.

    python benchmarks/export_cost.py [--model vit_b16] [--out runs/export-cost]

The model has random weights; it is quantized first, which is not counted. TensorRT's part is what `vit-edge export` does
without a GPU: NVIDIA's parser and builder are asked where tensorrt_rtx is installed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from side_by_side import makers
from side_by_side.models import Case

from vit_edge.recipe import Limits
from vit_edge.report.console import show_table
from vit_edge.runtimes import machine
from vit_edge.stages import export
from vit_edge.target import load

TARGETS = ("onnxruntime", "openvino", "tensorrt")


def exported(stage: Path, name: str) -> dict[str, float]:
    """In a process of its own."""
    out = stage.parent / name
    shutil.rmtree(out, ignore_errors=True)
    held_bytes = machine.restart_peak_memory()  # what the kernel counts goes on from the process that started this one
    started = time.perf_counter()
    export.run(
        out, student=stage, int8=stage, evaluation=None, target=load(name), limits=Limits(), provenance={}
    )  # fmt: skip
    seconds = time.perf_counter() - started
    peak_bytes = (held_bytes or 0) + (machine.peak_memory_since(held_bytes) or 0)
    return {"seconds": seconds, "peak_mb": peak_bytes / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b16")
    parser.add_argument("--out", type=Path, default=Path("runs/export-cost"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(exported(Path(options.one[0]), options.one[1])))
        return
    stage, rows, total = makers.int8_stage(Case(options.model, 1), options.out / options.model), [], 0.0
    for name in TARGETS:
        command = [sys.executable, __file__, "--one", str(stage), name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        total += found["seconds"]
        rows.append([name, f"{found['seconds']:.1f}", f"{found['peak_mb']:.0f}"])
    show_table(["target", "seconds", "peak MB"], [*rows, ["all", f"{total:.1f}", ""]])


if __name__ == "__main__":
    main()
