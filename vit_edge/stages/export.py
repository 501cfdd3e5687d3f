"""Stage `export`: the canonical graph as the bundle of one target, made and proved by the target's own runtime."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import bundle
from vit_edge.export import onnx
from vit_edge.export.lower import LOWERINGS, lowered
from vit_edge.export.reduce import with_seven_bits
from vit_edge.models import classifier as models
from vit_edge.models.zoo import GEOMETRY
from vit_edge.quantization import ranges
from vit_edge.recipe import Limits
from vit_edge.runtimes import registry
from vit_edge.runtimes.base import Runtime
from vit_edge.stages import tuning
from vit_edge.target import Target


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
    int8_files = built(runtime, lowered(canonical, seen, target.runtime, variant), target, place / "int8")
    reduced_files = (
        built(runtime, lowered(seven_bits, seen, target.runtime, variant), target, place / "int8-seven-bits")
        if seven_bits
        else None
    )
    float_files = built(runtime, floats, target, place / "float")
    manifest = {
        "target": target.model_dump(mode="json"),
        **_model(student),
        "int8_files": _names(int8_files, place),
        "reduced_files": _names(reduced_files, place) if reduced_files else None,
        "float_files": {"f32": _names(float_files, place)},
        "expected_int8": _expected(int8, runtime, int8_files, target),
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
        "float_bytes": sum(path.stat().st_size for path in float_files),
    }


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


def _expected(int8: Path, runtime: Runtime, files: list[Path], target: Target) -> list[str]:
    """Names of the matrix products that must run in int8, less those that the runtime does not keep the name of."""
    layers = json.loads((int8 / "layers.json").read_text(encoding="utf-8"))
    names = [layer["name"] for layer in layers if layer["reason"] is None]
    if runtime.probe().problem:
        return names
    with runtime.open(files, target) as session:
        products = session.coverage().products
    return [name for name in names if any(product.came_from(name) for product in products)] or names
