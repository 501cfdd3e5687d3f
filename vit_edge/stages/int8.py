"""Stage `int8`: the student as one canonical int8 graph, with what any target needs to make its own of it.

int8.onnx     the canonical graph (quantization/quantizer.py), free batch size
float.onnx    the same folded student in float
ranges.json   what calibration saw, by the value names of both graphs
layers.json   every matrix product: int8 or float and why, signal to noise of its weight and input, how its range
              was chosen, equalization's α, whether rounding was compensated and the bias corrected
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.models import classifier as models
from vit_edge.progress import say
from vit_edge.quantization import calibration, quantizer, ranges, rounding
from vit_edge.quantization.choice import Chosen, choose
from vit_edge.quantization.products import Product, parameter, products
from vit_edge.quantization.simulation import logits
from vit_edge.recipe import Int8Config
from vit_edge.store import write_json

CHECKED_IMAGES = 256


def run(folder: Path, *, student: Path, calibration_NHWC: np.ndarray, config: Int8Config) -> dict[str, Any]:
    """Quantizes the student in the folder `student` and writes its graphs into `folder`.

    calibration_NHWC: uint8 images of the calibration split, preprocessed for the student.
    Raises UserError for images or a model that cannot be calibrated, and for an unknown layer in the config.
    """
    loaded = models.load(student)
    graph = deployable(loaded.classifier)
    side = loaded.preprocessing.image_size
    layers = quantizer.layers(graph, config.float_layers)
    calibration.check_images(calibration_NHWC, config.minimum_images)
    calibration.check_weights(graph)
    checked_NHWC = calibration_NHWC[:CHECKED_IMAGES]
    float_NK = logits(graph, checked_NHWC)
    onnx.save(onnx.to_onnx(graph, side), folder / "float.onnx")
    chosen = choose(graph, calibration_NHWC, config, say)
    told = [asdict(layer) | numbers for layer, numbers in zip(layers, _numbers(chosen), strict=True)]
    found, by_node = products(chosen.floats), chosen.outcome.ranges
    example = torch.from_numpy(calibration_NHWC[:2].copy())
    quantized = quantizer.quantize(chosen.on_grid, example, by_node, config.float_layers, chosen.outcome.scales)
    canonical = onnx.to_onnx(quantized, side)
    onnx.save(canonical, folder / "int8.onnx")
    ranges.write(folder / "ranges.json", onnx.ranges_by_value(canonical, found, by_node))
    write_json(folder / "layers.json", told)
    int8_NK = logits(quantized, checked_NHWC)
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


def _numbers(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Of each product in turn: what int8 costs its weight and its input, or would, and what was done about it."""
    outcome = chosen.outcome
    for product, stored in zip(products(chosen.floats), products(chosen.on_grid), strict=True):
        weighted = product.kind in ("linear", "conv")
        int8 = product.name in outcome.scales
        yield {
            "weight_sqnr_db": _weight_sqnr_db(chosen, product, stored) if weighted else None,
            "input_sqnr_db": outcome.ranges[product.inputs[0].name].sqnr_db if weighted else None,
            "range_method": outcome.methods[product.inputs[0].name] if int8 else None,
            "equalization": chosen.alphas.get(product.name),
            "compensated_rounding": product.name in outcome.compensated,
            "bias_corrected": product.name in outcome.corrected,
        }


def _weight_sqnr_db(chosen: Chosen, product: Product, stored: Product) -> float | None:
    weight, on_grid = parameter(chosen.floats, product.weight), parameter(chosen.on_grid, stored.weight)
    assert weight is not None
    assert on_grid is not None
    if product.name not in chosen.outcome.scales:
        on_grid = rounding.nearest(weight, rounding.weight_scales(weight))
    return quantizer.weight_sqnr_db(weight, on_grid)
