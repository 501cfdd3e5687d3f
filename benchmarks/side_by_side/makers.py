"""Who makes an artefact of a model: this project and its peers, each the way its own documentation says.

A maker writes one file for one case; what several need is made once and kept beside it.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from side_by_side import peers
from side_by_side.images import as_planes, shaded_images
from side_by_side.models import CLASSES, Case, classifier, timms
from vit_edge.export import onnx
from vit_edge.export.lower import lowered
from vit_edge.models.classifier import save
from vit_edge.quantization import ranges
from vit_edge.recipe import Int8Config, Limits
from vit_edge.runtimes import registry
from vit_edge.stages import export, int8
from vit_edge.target import load as load_target

CALIBRATION = 16
PLAIN = Int8Config(
    minimum_images=CALIBRATION, equalization=(), ranges="minmax", rounding="nearest", bias_correction="never"
)
Maker = Callable[[Case, Path, Path], None]
"""Writes the artefact of a case at a path; the third is a folder for what several artefacts of the model share."""


def ours(runtime: str, part: str, tune: bool = False) -> Maker:
    """`vit-edge export`'s bundle for a runtime; part: int8 or float. Accuracy's searches are left out: same graph."""

    def make(case: Case, path: Path, shared: Path) -> None:
        bundle = _bundle(case, runtime, shared, tune)
        for file in sorted((bundle / part).iterdir()):
            os.link(file, path.with_suffix(file.suffix))

    return make


def ours_lowered(runtime: str, variant: str) -> Maker:
    """Our int8 by one of the ways that `--tune` tries."""

    def make(case: Case, path: Path, shared: Path) -> None:
        stage = int8_stage(case, shared)
        canonical = onnx.with_batch(onnx.load(stage / "int8.onnx"), case.batch)
        graph = lowered(canonical, ranges.read(stage / "ranges.json"), runtime, variant)
        onnx.save(graph, path.with_suffix(".onnx"))
        target = load_target(runtime).model_copy(update={"batch": case.batch})
        for file in registry.load(runtime).build(path.with_suffix(".onnx"), target, shared / path.stem):
            os.link(file, path.with_suffix(file.suffix))

    return make


def timm_onnx(case: Case, path: Path, shared: Path) -> None:
    """timm.utils.onnx_export, the new exporter, then the batch size fixed."""
    import onnx as onnx_library
    from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed
    from timm.utils.onnx import onnx_export

    whole = path.with_name("timm_open.onnx")
    with peers.quiet():
        onnx_export(timms(case), str(whole), batch_size=2, input_size=(3, 224, 224), opset=20, use_dynamo=True)
    model = onnx_library.load(whole)
    names = [one.dim_param for one in model.graph.input[0].type.tensor_type.shape.dim if one.dim_param]
    for name in names:
        make_dim_param_fixed(model.graph, name, case.batch)
    onnx_library.save(model, path)
    whole.unlink()


def nncf_of_timm(case: Case, path: Path, shared: Path) -> None:
    """timm's model through OpenVINO's own converter and NNCF's post-training quantization."""
    import openvino

    example = torch.zeros(case.batch, 3, 224, 224)
    model = openvino.convert_model(timms(case), example_input=example, input=[tuple(example.shape)])
    peers.nncf(model, [as_planes(piece) for piece in _pieces(case)], path, transformer=case.transformer)


def nncf_of_ours(case: Case, path: Path, shared: Path) -> None:
    """NNCF on this project's folded float graph: what quantizing alone is worth."""
    import openvino

    model = openvino.Core().read_model(str(_float_onnx(case, path)))
    peers.nncf(model, list(_pieces(case)), path, transformer=case.transformer)


def static_of(source: Maker, given: Callable[[np.ndarray], np.ndarray]) -> Maker:
    """ONNX Runtime's quantize_static; given: images as the source takes them."""

    def make(case: Case, path: Path, shared: Path) -> None:
        peers.static(_prepared(source, case, path, shared), [given(piece) for piece in _pieces(case)], path)

    return make


def dynamic_of(source: Maker) -> Maker:
    """ONNX Runtime's quantize_dynamic of the matrix products: its convolutions are slower than float."""

    def make(case: Case, path: Path, shared: Path) -> None:
        peers.dynamic(_prepared(source, case, path, shared), path, ["MatMul", "Gemm"])

    return make


def our_float_onnx(case: Case, path: Path, shared: Path) -> None:
    onnx.save(onnx.with_batch(onnx.load(int8_stage(case, shared) / "float.onnx"), case.batch), path)


def torchao_onnx(case: Case, path: Path, shared: Path) -> None:
    """torchao's PT2E with its x86 quantizer's default configuration, exported as torch's documentation says."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    example = (torch.from_numpy(as_planes(shaded_images()[: case.batch])),)
    with peers.quiet(), torch.no_grad():
        graph = torch.export.export(timms(case), example).module(check_guards=False)
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(graph, quantizer)
        for piece in _pieces(case):
            prepared(torch.from_numpy(as_planes(piece)))
        program = torch.onnx.export(convert_pt2e(prepared), example, dynamo=True, opset_version=20, verbose=False)
    assert program is not None
    program.save(str(path))


def nothing(case: Case, path: Path, shared: Path) -> None:
    """PyTorch runs the model itself."""
    path.touch()


def _bundle(case: Case, runtime: str, shared: Path, tune: bool) -> Path:
    folder = shared / f"{runtime}_{case.batch}{'_tuned' if tune else ''}"
    if not folder.exists():
        stage = int8_stage(case, shared)
        target = load_target(runtime).model_copy(update={"batch": case.batch})
        export.run(
            folder, student=stage, int8=stage, evaluation=None, target=target, limits=Limits(), provenance={},
            tuning_NHWC=shaded_images()[:CALIBRATION] if tune else None,
        )  # fmt: skip
    return folder / "bundle"


def int8_stage(case: Case, shared: Path) -> Path:
    """The student and its canonical graphs, which know no batch size."""
    folder = shared / "int8"
    if not (folder / "layers.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, classifier(case), case.config, [str(number) for number in range(CLASSES)])
        int8.run(folder, student=folder, calibration_NHWC=shaded_images()[:CALIBRATION], config=PLAIN)
    return folder


def _float_onnx(case: Case, path: Path) -> Path:
    source = path.with_name("our_float.onnx")
    if not source.exists():
        our_float_onnx(case, source, path.parent.parent / "shared")
    return source


def _prepared(source: Maker, case: Case, path: Path, shared: Path) -> Path:
    ready = path.with_name(f"{source.__name__}_ready.onnx")
    if not ready.exists():
        plain = path.with_name(f"{source.__name__}_plain.onnx")
        source(case, plain, shared)
        peers.prepared(plain, ready)
    return ready


def _pieces(case: Case) -> Iterator[np.ndarray]:
    """The calibration images in whole batches."""
    images = shaded_images()[:CALIBRATION]
    return (images[start : start + case.batch] for start in range(0, len(images), case.batch))
