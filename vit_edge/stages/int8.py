"""Stage `int8`: the student as one canonical int8 graph, with what any target needs to make its own of it.

int8.onnx     the canonical graph (quantization/quantizer.py), free batch size
float.onnx    the same folded student in float
ranges.json   what calibration saw, by the value names of both graphs
magnitudes.json  how large the values of each graph become, for what runs in fp16
layers.json   every matrix product: int8 or float and why, signal to noise of its weight and input, how its range
              was chosen, equalization's α, whether rounding was compensated and the bias corrected
search.json   how it was held against the tune split, and what was given back to float (search.py)
metrics.jsonl of quantization-aware training, where it is asked for: an epoch a line
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import metrics
from vit_edge.export import magnitudes, onnx
from vit_edge.export.fold import deployable
from vit_edge.models import classifier as models
from vit_edge.progress import say
from vit_edge.quantization import calibration, qat, quantizer, ranges, rounding, sensitivity
from vit_edge.quantization.choice import Chosen, choose, outputs_clipped, with_float
from vit_edge.quantization.lessons import Lessons
from vit_edge.quantization.products import Product, parameter, products
from vit_edge.quantization.quantizer import Layer
from vit_edge.quantization.simulation import logits
from vit_edge.recipe import Int8Config
from vit_edge.report.quantization import LAYERS, Search
from vit_edge.report.quantization import search as finished_search
from vit_edge.stages import search
from vit_edge.stages.candidates import canonical
from vit_edge.stages.search import Ground
from vit_edge.store import write_json
from vit_edge.target import Roundings

MEASURED_IMAGES = 64  # for magnitudes


def run(
    folder: Path, *, student: Path, calibration_NHWC: np.ndarray, config: Int8Config, ground: Ground | None = None,
    lessons: Lessons | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Quantizes the student in the folder `student` and writes its graphs into `folder`.

    calibration_NHWC: uint8 images of the calibration split, preprocessed for the student. ground: what the int8 model is
    held against, None: nothing, and nothing is searched for. lessons: what it learns from, where `config` asks for
    quantization-aware training, which goes on from the model that all this ends with.
    Raises UserError for images or a model that cannot be calibrated, and for an unknown layer in the config.
    """
    loaded = models.load(student)
    graph = deployable(loaded.classifier)
    side = loaded.preprocessing.image_size
    layers = quantizer.layers(graph, config.float_layers)
    calibration.check_images(calibration_NHWC, config.minimum_images)
    calibration.check_weights(graph)
    measured_NHWC = calibration_NHWC[:MEASURED_IMAGES]
    program = onnx.program(graph, side)
    measured = {"float": magnitudes.observe(program, measured_NHWC)}
    onnx.save(onnx.clean(program.model), folder / "float.onnx")
    roundings = Roundings(0, 0) if ground is None else ground.roundings
    chosen = choose(graph, calibration_NHWC, config, say, symmetric=roundings.symmetric == 1)
    chosen, reasons, found = _kept_accurate(folder, chosen, config, ground, side)
    layers = [replace(layer, reason=layer.reason or reasons.get(layer.name)) for layer in layers]
    learned: dict[str, Any] = {}
    if config.qat is not None:
        assert lessons is not None
        chosen, learned["qat"] = qat.distil(chosen, lessons, calibration_NHWC, config.qat, folder, roundings.outputs)
    made = canonical(chosen, side)
    onnx.save(made.graph, folder / "int8.onnx")
    ranges.write(folder / "ranges.json", made.ranges)
    measured["int8"] = magnitudes.observe(made.program, measured_NHWC)
    magnitudes.write(folder / "magnitudes.json", measured)
    alone = {one.name: one.kl_alone for one in found.costs} if found else {}
    write_json(
        folder / LAYERS,
        [
            asdict(layer) | numbers | {"kl_alone": alone.get(layer.name)}
            for layer, numbers in zip(layers, _numbers(chosen), strict=True)
        ],
    )
    int8_NK = logits(made.module, chosen.held_NHWC)
    _say_layers(layers)
    return {
        "calibration_images": len(calibration_NHWC),
        "layers_int8": sum(layer.reason is None for layer in layers),
        "layers_float": sum(layer.reason is not None for layer in layers),
        "calibration_agreement": metrics.agreement(chosen.float_NK.argmax(1), int8_NK.argmax(1)),
        "calibration_sqnr_db": round(min(metrics.sqnr_db(chosen.float_NK, int8_NK), 999.0), 2),
        "size_bytes": {name: (folder / name).stat().st_size for name in ("float.onnx", "int8.onnx")},
        **(_on_tune(found) if found else {}),
        **learned,
    }


def _kept_accurate(
    folder: Path, chosen: Chosen, config: Int8Config, ground: Ground | None, image_size: int
) -> tuple[Chosen, dict[str, str], Search | None]:
    """The choice with what accuracy needs in float, why each product is, and how the tune split was searched."""
    reasons = sensitivity.ends_for_float(chosen) if config.ends == "auto" else {}
    if reasons:
        chosen = with_float(chosen, (*chosen.float_layers, *reasons))
    chosen = outputs_clipped(chosen, config, say)  # now that nothing else is far off any more
    if ground is None or config.search is None or not search.has_limit(config.search, ground):
        return chosen, reasons, None
    before = finished_search(folder)
    if before is not None:  # a killed quantization-aware training goes on with the very layers that it began with
        given_back = before.trials[before.chosen].given_back
        chosen = with_float(chosen, (*chosen.float_layers, *given_back)) if given_back else chosen
        return chosen, reasons | search.reasons(before), before
    chosen, found = search.run(folder, chosen, config.search, ground, image_size)
    return chosen, reasons | search.reasons(found), found


def _on_tune(found: Search) -> dict[str, Any]:
    taken = found.trials[found.chosen]
    return {
        "tune_drop_points": taken.drop_points,
        "tune_drop_upper95": taken.drop_upper95_one_sided,
        "keeps_limit_on_tune": taken.holds,
        "given_back": taken.given_back,
    }


def _say_layers(layers: Sequence[Layer]) -> None:
    """What is float and why, each by name; products of two activations are many, and are counted."""
    floats = [layer for layer in layers if layer.reason]
    of_activations = sum(layer.kind == "attention" for layer in floats)
    for layer in floats:
        if layer.kind != "attention":
            say(f"int8: {layer.name} stays float: {layer.reason}")
    say(
        f"int8: {len(layers) - len(floats)} matrix products in int8, {len(floats)} in float, of these {of_activations} "
        "are products of two activations"
    )


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
