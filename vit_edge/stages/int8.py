"""Stage `int8`: the student as one canonical int8 graph, with what any target needs to make its own of it.

int8.onnx     the canonical graph (quantization/quantizer.py), free batch size
float.onnx    the same folded student in float
ranges.json   what calibration saw, by the value names of both graphs
layers.json   every matrix product: int8 or float and why, signal to noise of its weight and input
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.models import classifier as models
from vit_edge.progress import say
from vit_edge.quantization import calibration, quantizer, ranges
from vit_edge.quantization.products import products
from vit_edge.recipe import Int8Config
from vit_edge.store import write_json

CHECKED_IMAGES = 256
BATCH = 32


def run(folder: Path, *, student: Path, calibration_NHWC: np.ndarray, config: Int8Config) -> dict[str, Any]:
    """Quantizes the student in the folder `student` and writes its graphs into `folder`.

    calibration_NHWC: uint8 images of the calibration split, preprocessed for the student.
    Raises UserError for images or a model that cannot be calibrated, and for an unknown layer in the config.
    """
    loaded = models.load(student)
    graph = deployable(loaded.classifier)
    side = loaded.preprocessing.image_size
    layers = quantizer.layers(graph, config.float_layers)
    found = products(graph)
    by_node = calibration.calibrate(graph, calibration_NHWC, minimum_images=config.minimum_images)
    checked_NHWC = calibration_NHWC[:CHECKED_IMAGES]
    float_NK = _logits(graph, checked_NHWC)
    onnx.save(onnx.to_onnx(graph, side), folder / "float.onnx")
    told = [asdict(layer) | quantizer.noise(graph, p, by_node) for layer, p in zip(layers, found, strict=True)]
    quantized = quantizer.quantize(graph, torch.from_numpy(calibration_NHWC[:2].copy()), by_node, config.float_layers)
    canonical = onnx.to_onnx(quantized, side)
    onnx.save(canonical, folder / "int8.onnx")
    ranges.write(folder / "ranges.json", onnx.ranges_by_value(canonical, found, by_node))
    write_json(folder / "layers.json", told)
    int8_NK = _logits(quantized, checked_NHWC)
    for layer in layers:
        if layer.reason and layer.kind != "attention":
            say(f"int8: {layer.name} stays float: {layer.reason}")
    return {
        "calibration_images": len(calibration_NHWC),
        "layers_int8": sum(layer.reason is None for layer in layers),
        "layers_float": sum(layer.reason is not None for layer in layers),
        "calibration_agreement": metrics.agreement(float_NK.argmax(1), int8_NK.argmax(1)),
        "calibration_sqnr_db": round(min(metrics.sqnr_db(float_NK, int8_NK), 999.0), 2),
        "size_bytes": {name: (folder / name).stat().st_size for name in ("float.onnx", "int8.onnx")},
    }


@torch.no_grad()
def _logits(graph: nn.Module, images_NHWC: np.ndarray) -> np.ndarray:
    pieces = range(0, len(images_NHWC), BATCH)
    return np.concatenate([graph(torch.from_numpy(images_NHWC[i : i + BATCH].copy())).numpy() for i in pieces])
