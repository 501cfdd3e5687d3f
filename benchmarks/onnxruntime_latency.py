"""ViT-Ti/16 at 224 px in ONNX Runtime: our int8 graph against ONNX Runtime's own quantizers, all in one run.

    python benchmarks/onnxruntime_latency.py [--threads 2] [--seconds 20]

Every artefact comes from the same folded float graph and the same calibration images, batch 1, default session
options, timed in turn (vit_edge/runtimes/clock.py). The weights are random: this says nothing of accuracy.
"""

import argparse
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from vit_edge.data import datasets
from vit_edge.export import onnx
from vit_edge.export.lower import for_onnxruntime
from vit_edge.metrics import percentiles
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier, save
from vit_edge.preprocess import Preprocessing
from vit_edge.quantization import ranges
from vit_edge.recipe import Int8Config, ModelConfig
from vit_edge.report.console import show_table
from vit_edge.runtimes import clock, machine, registry
from vit_edge.stages import int8
from vit_edge.target import Protocol, Target

SIDE, IMAGES = 224, 64
OURS = "vit-edge int8"


class Reader(CalibrationDataReader):
    def __init__(self, images_NHWC: np.ndarray):
        self.feeds = iter([{"images": image[None]} for image in images_NHWC])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # quantize_dynamic warns of every bias
    digits = datasets.find("digits").load().train
    images_NHWC = Preprocessing(image_size=SIDE).prepare_all(digits.image(i) for i in range(IMAGES))
    target = Target(name="benchmark", runtime="onnxruntime", threads=options.threads)
    protocol = Protocol(seconds=options.seconds, min_queries=50)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        files = artefacts(Path(scratch), images_NHWC)
        runtime = registry.load("onnxruntime")
        sessions = {name: stack.enter_context(runtime.open([path], target)) for name, path in files.items()}
        batches = [image[None] for image in images_NHWC]
        queries = {name: clock.query(session, batches) for name, session in sessions.items()}
        streams = clock.interleaved(queries, protocol)
    found = {name: percentiles(stream.latencies_ms) for name, stream in streams.items()}
    print(
        f"onnxruntime {onnxruntime.__version__}, {machine.machine()['processor']}, {options.threads} threads, batch 1"
    )
    rows = [
        (name, f"{ms['p50']:.2f}", f"{ms['p90']:.2f}", str(ms["n"]), f"{ms['p50'] / found[OURS]['p50']:.2f}")
        for name, ms in found.items()
    ]
    show_table(("artefact", "p50 ms", "p90 ms", "n", "× ours"), rows)


def artefacts(folder: Path, images_NHWC: np.ndarray) -> dict[str, Path]:
    """Name → ONNX file of batch 1."""
    torch.manual_seed(0)
    config = ModelConfig(name="vit_ti16")
    classifier = Classifier(zoo.create(config, 1000, SIDE), Preprocessing(image_size=SIDE)).eval()
    save(folder, classifier, config, [str(i) for i in range(1000)])
    int8.run(folder, student=folder, calibration_NHWC=images_NHWC, config=Int8Config(minimum_images=32))
    paths = {name: folder / f"{name}.onnx" for name in ("ours", "plain", "float1", "ready", "static", "dynamic")}
    canonical = onnx.with_batch(onnx.load(folder / "int8.onnx"), 1)
    onnx.save(canonical, paths["plain"])
    onnx.save(for_onnxruntime(canonical, ranges.read(folder / "ranges.json")), paths["ours"])
    onnx.save(onnx.with_batch(onnx.load(folder / "float.onnx"), 1), paths["float1"])
    quant_pre_process(str(paths["float1"]), str(paths["ready"]))
    quantize_static(str(paths["ready"]), str(paths["static"]), Reader(images_NHWC), per_channel=True)
    quantize_dynamic(
        str(paths["ready"]), str(paths["dynamic"]), per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
    )
    return {
        OURS: paths["ours"],
        "float, folded": paths["float1"],
        "torchao's graph as it is": paths["plain"],
        "quantize_static": paths["static"],
        "quantize_dynamic": paths["dynamic"],
    }


if __name__ == "__main__":
    main()
