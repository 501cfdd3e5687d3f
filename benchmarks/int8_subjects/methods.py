"""Ours and the peers' ways to int8: each from the same float model and the same calibration images to a bundle.

A peer gets what its users give it: the model exported in float, taking normalised pixels (1, 3, H, W), and calibration
images prepared the same way. Its file is bundled by `vit-edge bundle` and runs in its own runtime.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from side_by_side import peers

from int8_subjects.models import Subject
from vit_edge import target as profiles
from vit_edge.models import classifier as models
from vit_edge.recipe import Int8Config, Limits, SearchConfig
from vit_edge.stages import export, foreign, int8
from vit_edge.stages.search import Ground
from vit_edge.target import Target

Method = Callable[[Subject, Path], None]
OPSET = 20
INPUT = "pixels"
MARGIN_POINTS = 0.5


def _target(runtime: str) -> Target:
    return profiles.load(runtime).model_copy(update={"threads": torch.get_num_threads()})


def ours(subject: Subject, out: Path) -> None:
    """The product's stages `int8` and `export`, at their defaults, for both runtimes.

    Where there are labels, the search may give products back to float until the tune split loses MARGIN_POINTS at most.
    """
    targets = [_target(runtime) for runtime in ("onnxruntime", "openvino")]
    config = Int8Config(search=SearchConfig(max_drop_points=MARGIN_POINTS))
    ground = Ground(subject.tune_pieces, Limits(), targets) if subject.labelled else None
    (out / "int8").mkdir(parents=True)
    int8.run(
        out / "int8", student=subject.student, calibration_NHWC=subject.calibration(), config=config, ground=ground
    )
    for target in targets:
        export.run(
            out / target.name, student=subject.student, int8=out / "int8", evaluation=subject.evaluation,
            target=target, limits=Limits(), provenance={},
        )  # fmt: skip


def nncf_plain(subject: Subject, out: Path) -> None:
    _nncf(subject, out, transformer=False)


def nncf_transformer(subject: Subject, out: Path) -> None:
    _nncf(subject, out, transformer=True)


def ort_static(subject: Subject, out: Path) -> None:
    peers.static(_prepared(subject, out), list(pixels(subject)), out / "int8.onnx")
    _bundle(subject, out / "int8.onnx", out, "onnxruntime")


def ort_dynamic(subject: Subject, out: Path) -> None:
    """Needs no calibration."""
    peers.dynamic(_prepared(subject, out), out / "int8.onnx")
    _bundle(subject, out / "int8.onnx", out, "onnxruntime")


def pt2e(subject: Subject, out: Path) -> None:
    """torchao's PT2E with its own observers, symmetric int8 on inputs and weights, to ONNX, nothing of ours between."""
    from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import QuantizationConfig, X86InductorQuantizer

    loaded = models.load(subject.student)
    loaded.classifier.set_fused_attention(False)
    images_NCHW = torch.from_numpy(np.concatenate(list(pixels(subject))))
    activations = QuantizationSpec(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_symmetric,
        observer_or_fake_quant_ctr=HistogramObserver,
    )  # fmt: skip
    weights = QuantizationSpec(
        dtype=torch.int8, quant_min=-127, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
    )  # fmt: skip
    quantizer = X86InductorQuantizer().set_global(QuantizationConfig(activations, None, weights, None))
    with torch.no_grad():
        graph = torch.export.export(loaded.classifier.backbone, (images_NCHW[:1],)).module(check_guards=False)
        prepared = prepare_pt2e(graph, quantizer)  # type: ignore[arg-type]
        for image_CHW in images_NCHW:
            prepared(image_CHW[None])
        converted = convert_pt2e(prepared, fold_quantize=True)
        torch.onnx.export(
            converted, (images_NCHW[:1],), out / "int8.onnx", dynamo=True, opset_version=OPSET, input_names=[INPUT],
            external_data=False, verbose=False,
        )  # fmt: skip
    _bundle(subject, out / "int8.onnx", out, "onnxruntime")


METHODS: dict[str, Method] = {
    "vit-edge": ours,
    "NNCF": nncf_plain,
    "NNCF, TRANSFORMER": nncf_transformer,
    "ONNX Runtime, static": ort_static,
    "ONNX Runtime, dynamic": ort_dynamic,
    "plain PT2E": pt2e,
}


def pixels(subject: Subject) -> Iterator[np.ndarray]:
    """Calibration images, normalised, each (1, 3, H, W)."""
    preprocessing = models.load(subject.student).preprocessing
    mean_C, std_C = (np.asarray(triple, np.float32) for triple in (preprocessing.mean, preprocessing.std))
    for image_HWC in subject.calibration():
        yield ((image_HWC.astype(np.float32) / 255 - mean_C) / std_C).transpose(2, 0, 1)[None]


def float_onnx(subject: Subject, path: Path) -> None:
    """The float model as PyTorch exports it."""
    loaded = models.load(subject.student)
    side = loaded.preprocessing.image_size
    with torch.no_grad(), peers.quiet():
        torch.onnx.export(
            loaded.classifier.backbone, (torch.zeros(1, 3, side, side),), path, dynamo=True, opset_version=OPSET,
            input_names=[INPUT], output_names=["logits"], external_data=False, verbose=False,
        )  # fmt: skip


def _prepared(subject: Subject, out: Path) -> Path:
    float_onnx(subject, out / "float.onnx")
    return peers.prepared(out / "float.onnx", out / "prepared.onnx")


def _nncf(subject: Subject, out: Path, *, transformer: bool) -> None:
    import openvino

    float_onnx(subject, out / "float.onnx")
    model = openvino.Core().read_model(out / "float.onnx")
    peers.nncf(model, list(pixels(subject)), out / "int8.xml", transformer=transformer)
    _bundle(subject, out / "int8.xml", out, "openvino")


def _bundle(subject: Subject, made: Path, out: Path, runtime: str) -> None:
    foreign.bundle_of(made, out / runtime / "bundle", reference=subject.evaluation, target=_target(runtime))
