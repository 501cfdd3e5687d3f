"""An artefact that was made elsewhere, as a bundle: gated like ours, on the same images, in its own runtime."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vit_edge import bundle, evaluation
from vit_edge.errors import UserError
from vit_edge.evaluation import Evaluation
from vit_edge.models.card import read_card, saved_in
from vit_edge.preprocess import Preprocessing, Triple
from vit_edge.runtimes import registry
from vit_edge.runtimes.base import Runtime
from vit_edge.safety import models
from vit_edge.stages.artefacts import check_logits, graph_input
from vit_edge.target import Target

Layout = Literal["uint8-nhwc", "float-nchw"]


def bundle_of(
    model: Path, out: Path, *, reference: Path, target: Target, float_model: Path | None = None,
    normalisation: tuple[Triple, Triple] | None = None, layout: Layout | None = None,
) -> Path:  # fmt: skip
    """Writes the bundle of an .onnx file, or of an OpenVINO .xml with its .bin, into the new folder `out`.

    reference: a run, or the evaluation's folder. float_model: the same model in float, to compare latency with.
    normalisation: mean and std of pixels in [0, 1], for a graph that takes float; default: the run's student's.
    layout: of the graph's input; default: what the graph itself states. Where the runtime runs here, the graph has
    answered one image before anything is written. Raises UserError for what cannot be gated.
    """
    if out.exists():
        raise UserError(f"{out} is there already", "give another --out, or remove it")
    folder = evaluation.find(reference)
    images = evaluation.read(folder)
    preprocessing = _preprocessing(reference, images, normalisation)
    runtime = registry.load(target.runtime)
    with tempfile.TemporaryDirectory(prefix="vit-edge-") as scratch:
        place = Path(scratch) / "bundle"
        int8 = _taken(runtime, model, target, place / "int8")
        floats = {"f32": _taken(runtime, float_model, target, place / "float")} if float_model else {}
        known = layout or _layout(runtime, int8, target, model)
        manifest = {
            "target": target.model_dump(mode="json"),
            "model": {"name": model.stem, "parameters": None},
            "classes": images.manifest.classes,
            "preprocessing": preprocessing.model_dump(mode="json"),
            "input_layout": known,
            "int8_files": _names(int8, place),
            "float_files": {precision: _names(files, place) for precision, files in floats.items()},
            "provenance": {"made by": "another tool", "file": model.name},
        }
        bundle.write(place, manifest, folder)
        _answers(runtime, bundle.read(place), images)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, out)
    return out


def _preprocessing(
    reference: Path, images: Evaluation, normalisation: tuple[Triple, Triple] | None
) -> Preprocessing:  # fmt: skip
    """The run's student's own, or one of the images' size, which are prepared already."""
    saved = next((saved_in(place) for place in (reference, *reference.resolve().parents[:2]) if saved_in(place)), None)
    own = read_card(saved).preprocessing if saved else Preprocessing(image_size=images.images_NHWC.shape[1])
    if normalisation is None:
        return own
    mean, std = normalisation
    return own.model_copy(update={"mean": mean, "std": std})


def _taken(runtime: Runtime, model: Path, target: Target, folder: Path) -> list[Path]:
    """The runtime's own files of a model, in `folder`."""
    if not model.is_file():
        raise UserError(f"{model} is not there", "give an .onnx file, or OpenVINO's .xml beside its .bin")
    if runtime.name == "openvino" and model.suffix == ".xml":
        folder.mkdir(parents=True)
        pair = (model, model.with_suffix(".bin"))
        if not pair[1].is_file():
            raise UserError(f"{model} has no weights: {pair[1]} is not there", "give the .xml where its .bin lies")
        return [Path(shutil.copyfile(path, folder / f"model{path.suffix}")) for path in pair]
    if model.suffix != ".onnx":
        forms = "an .onnx file, or an .xml beside its .bin" if runtime.name == "openvino" else "an .onnx file"
        raise UserError(f"{model} is not what {runtime.name} takes: expected {forms}", "export the model in that form")
    models.check_onnx(model, runtime.name)
    return runtime.build(model, target, folder)


def _layout(runtime: Runtime, files: Sequence[Path], target: Target, model: Path) -> Layout:
    """Read from the graph's one input."""
    if runtime.probe().problem:
        raise UserError(
            f"{runtime.name} cannot open {model} here, so its input is not known",
            "say what it takes: --input uint8-nhwc or --input float-nchw",
        )
    with runtime.open(files, target) as session:
        given: dict[str, Any] = session.describe()["input"]
    shape, kind = given["shape"], given["type"]
    if kind == "uint8" and shape[3] == 3:
        return "uint8-nhwc"
    if kind == "float32" and shape[1] == 3:
        return "float-nchw"
    raise UserError(
        f"{model} takes {kind} {shape}, expected uint8 (B, H, W, 3) or float32 (B, 3, H, W)",
        "export it with one of these inputs",
    )


def _answers(runtime: Runtime, made: bundle.Bundle, images: Evaluation) -> None:
    """One batch through every artefact, where the runtime runs here."""
    if runtime.probe().problem:
        return
    target = made.manifest.target
    given = graph_input(made)(np.asarray(images.images_NHWC[: target.batch]))
    for name, files in {"given": made.int8, **made.floats}.items():
        with runtime.open(files, target) as session:
            check_logits(session.run(given), (len(given), len(made.manifest.classes)), name)


def _names(files: Sequence[Path], place: Path) -> list[str]:
    return [path.relative_to(place).as_posix() for path in files]
