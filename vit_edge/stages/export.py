"""Stage `export`: the canonical graph as the bundle of one target, made and proved by the target's own runtime."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import bundle
from vit_edge.export import magnitudes, onnx
from vit_edge.export.half import halved
from vit_edge.export.lower import LOWERINGS, lowered
from vit_edge.export.placement import int8_products
from vit_edge.export.reduce import with_seven_bits
from vit_edge.models import classifier as models
from vit_edge.models.zoo import GEOMETRY
from vit_edge.quantization import ranges
from vit_edge.recipe import Limits
from vit_edge.runtimes import registry
from vit_edge.runtimes.base import Runtime
from vit_edge.stages import tuning
from vit_edge.target import Target

# Runtimes that run a graph in the precision that stands in it.
TYPED = {"tensorrt"}


def run(
    folder: Path, *, student: Path, int8: Path, evaluation: Path | None, target: Target, limits: Limits,
    provenance: dict[str, Any], tuning_NHWC: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes folder/bundle for `target` from the finished stages `student` and `int8`.

    evaluation: the reference's evaluation folder, which goes into the bundle. limits: advisory, for a gate given none.
    tuning_NHWC: calibration images, uint8, on which the runtime's lowerings are tried; None: the first is taken.
    Raises UserError when the target's runtime is not installed or refuses the graph.
    """
    runtime = registry.load(target.runtime)
    place = folder / "bundle"
    floats = onnx.with_batch(onnx.load(int8 / "float.onnx"), target.fixed_batch)
    canonical = onnx.with_batch(onnx.load(int8 / "int8.onnx"), target.fixed_batch)
    seen = ranges.read(int8 / "ranges.json")
    variant, tried = (
        (next(iter(LOWERINGS[target.runtime])), [])
        if tuning_NHWC is None
        else tuning.fastest(canonical, floats, seen, target, tuning_NHWC)
    )
    seven_bits = with_seven_bits(canonical) if target.reduced_range else None
    graph = lowered(canonical, seen, target.runtime, variant)
    expected = _expected(int8, graph, target)
    graph, typed_floats = _typed(int8, graph, floats, target)
    int8_files = built(runtime, graph, target, place / "int8")
    reduced_files = (
        built(runtime, lowered(seven_bits, seen, target.runtime, variant), target, place / "int8-seven-bits")
        if seven_bits
        else None
    )
    float_files = {
        precision: built(runtime, model, target, place / "float" / ("" if precision == "f32" else precision))
        for precision, model in typed_floats.items()
    }
    manifest = {
        "target": target.model_dump(mode="json"),
        **_model(student),
        "int8_files": _names(int8_files, place),
        "reduced_files": _names(reduced_files, place) if reduced_files else None,
        "float_files": {precision: _names(files, place) for precision, files in float_files.items()},
        "expected_int8": _kept_by(runtime, int8_files, target, expected),
        "limits": limits.model_dump(mode="json"),
        "provenance": provenance,
    }
    bundle.write(place, manifest, evaluation)
    return {
        "runtime": target.runtime,
        "batch": target.batch,
        "lowering": variant,
        "tried": tried,
        "int8_bytes": sum(path.stat().st_size for path in int8_files),
        "float_bytes": sum(path.stat().st_size for path in float_files["f32"]),
    }


def _typed(
    int8: Path, graph: onnx.ir.Model, floats: onnx.ir.Model, target: Target
) -> tuple[onnx.ir.Model, dict[str, onnx.ir.Model]]:
    """The int8 graph, and the float one in every precision that must stand in the graph, f32 first.

    TensorRT runs what a graph says: what is not int8 is fp16 there, unless the target asks for f32.
    """
    if target.runtime not in TYPED:
        return graph, {"f32": floats}
    large = {name: magnitudes.read(int8 / "magnitudes.json", name) for name in ("float", "int8")}
    mixed = graph if target.precision == "f32" else halved(graph, large["int8"])
    return mixed, {"f32": floats, "fp16": halved(floats, large["float"])}


def _names(files: list[Path], place: Path) -> list[str]:
    return [path.relative_to(place).as_posix() for path in files]


def built(runtime: Runtime, model: onnx.ir.Model, target: Target, folder: Path) -> list[Path]:
    """The runtime's files of a graph, in `folder`."""
    with tempfile.TemporaryDirectory(prefix="vit-edge-") as scratch:
        path = Path(scratch) / "model.onnx"
        onnx.save(model, path)
        return runtime.build(path, target, folder)


def _model(student: Path) -> dict[str, Any]:
    """The manifest's fields about the student, as plain JSON data."""
    loaded = models.load(student)
    config, classifier = loaded.config, loaded.classifier
    geometry = {key: getattr(config, key) for key in GEOMETRY if getattr(config, key) is not None}
    return {
        "model": {
            "name": config.name,
            "geometry": geometry,
            "parameters": classifier.parameter_count,
            "multiply_adds": models.multiply_adds(classifier, classifier.image_size),
        },
        "classes": loaded.classes,
        "preprocessing": loaded.preprocessing.model_dump(mode="json"),
    }


def _expected(int8: Path, graph: onnx.ir.Model, target: Target) -> list[str]:
    """Names of the matrix products that must run in int8, less those that the lowering gave back to float."""
    layers = json.loads((int8 / "layers.json").read_text(encoding="utf-8"))
    names = [layer["name"] for layer in layers if layer["reason"] is None]
    kept = int8_products(graph) if target.runtime in TYPED else set(names)
    return [name for name in names if name in kept]


def _kept_by(runtime: Runtime, files: list[Path], target: Target, names: list[str]) -> list[str]:
    """The products, less those that the runtime does not keep the name of."""
    if runtime.probe().problem:
        return names
    with runtime.open(files, target) as session:
        products = session.coverage().products
    return [name for name in names if any(product.came_from(name) for product in products)] or names
