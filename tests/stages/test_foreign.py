"""Models that other tools made, bundled and gated: the real tools, the real runtimes."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import require
from tests.tiny_model import TinyModel, digits
from vit_edge import bundle, evaluation, target
from vit_edge.errors import UserError
from vit_edge.evaluation import Reference
from vit_edge.stages import foreign
from vit_edge.stages.gate import gate_bundle

LOOSE = [("test", {"max_drop_points": 5.0, "min_relative_top1": 0.9})]
QUICK = {"seconds": 0.05, "warmup": 1, "min_queries": 5}


def aimed(name: str) -> target.Target:
    profile = target.load(name)
    return profile.model_copy(update={"threads": 1, "protocol": profile.protocol.model_copy(update=QUICK)})


class Reader:
    """Calibration images for ONNX Runtime's own quantizer."""

    def __init__(self, name: str, images: np.ndarray):
        self._feeds = iter({name: image[None]} for image in images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def test_onnx_runtimes_own_quantization_is_gated_like_ours(
    tmp_path: Path, tiny: TinyModel, tiny_evaluation: Path
) -> None:
    require("onnxruntime", "onnxruntime")
    from onnxruntime.quantization import quantize_static

    given = tiny.save(tmp_path / "float.onnx", batch=1)
    images = digits()[0][:64]
    quantize_static(str(given), str(tmp_path / "int8.onnx"), Reader("images", images))
    made = foreign.bundle_of(
        tmp_path / "int8.onnx", tmp_path / "made", reference=tiny_evaluation, target=aimed("onnxruntime"),
        float_model=given,
    )  # fmt: skip
    report = gate_bundle(made, limits=LOOSE).report
    assert report.verdict == "pass"
    assert report.accuracy is not None
    assert report.accuracy.n == 597
    assert report.latency is not None
    assert report.latency.float_precision == "f32"
    assert bundle.read(made).manifest.model.parameters is None


def test_openvinos_own_files_are_taken_as_they_are(tmp_path: Path, tiny: TinyModel, tiny_evaluation: Path) -> None:
    openvino = require("openvino", "openvino")
    given = tiny.save(tmp_path / "float.onnx", batch=1)
    openvino.save_model(openvino.Core().read_model(str(given)), tmp_path / "theirs.xml", compress_to_fp16=False)
    made = foreign.bundle_of(
        tmp_path / "theirs.xml", tmp_path / "made", reference=tiny_evaluation, target=aimed("openvino")
    )
    report = gate_bundle(made, limits=LOOSE).report
    assert {check.name: check.verdict for check in report.checks}["accuracy"] == "pass"
    (tmp_path / "theirs.bin").unlink()
    with pytest.raises(UserError, match="has no weights"):
        foreign.bundle_of(tmp_path / "theirs.xml", tmp_path / "2", reference=tiny_evaluation, target=aimed("openvino"))


def float_nchw(path: Path, mean: float, std: float) -> Path:
    """A linear classifier of normalised pixels (1, 3, 8, 8); weights from a seed."""
    weights = np.random.default_rng(0).normal(size=(192, 10)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Flatten", ["pixels"], ["flat"]),
            onnx.helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        ],
        "linear",
        [onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1, 3, 8, 8])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, 10])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    images, labels = digits()
    pixels = ((images.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2).reshape(len(images), -1)
    logits = pixels @ weights
    evaluation.write(
        path.parent / "evaluation", images_NHWC=images, labels_N=labels, logits_NK=logits,
        names=[str(i) for i in range(len(images))], classes=[str(digit) for digit in range(10)], data="digits",
        reference=Reference(device="numpy", kind="cpu", top1=float(np.mean(logits.argmax(1) == labels))),
    )  # fmt: skip
    return path


def test_a_float_graph_gets_the_normalisation_that_it_was_trained_with(tmp_path: Path) -> None:
    require("onnxruntime", "onnxruntime")
    model = float_nchw(tmp_path / "linear.onnx", 0.3, 0.2)
    given = {"reference": tmp_path / "evaluation", "target": aimed("onnxruntime")}
    made = foreign.bundle_of(model, tmp_path / "right", normalisation=((0.3,) * 3, (0.2,) * 3), **given)  # type: ignore[arg-type]
    assert bundle.read(made).manifest.input_layout == "float-nchw"
    accuracy = gate_bundle(made).report.accuracy
    assert accuracy is not None
    assert accuracy.agreement == 1
    other = foreign.bundle_of(model, tmp_path / "other", normalisation=((0.7,) * 3, (0.2,) * 3), **given)  # type: ignore[arg-type]
    accuracy = gate_bundle(other).report.accuracy
    assert accuracy is not None
    assert accuracy.agreement < 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing.onnx", "is not there"), ("model.pt", "is not what onnxruntime takes"), ("text.onnx", "no ONNX model")],
)
def test_what_is_no_model_is_refused_and_nothing_is_written(
    name: str, problem: str, tmp_path: Path, tiny_evaluation: Path
) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"no model at all")
    with pytest.raises(UserError, match=problem):
        foreign.bundle_of(tmp_path / name, tmp_path / "made", reference=tiny_evaluation, target=aimed("onnxruntime"))
    assert not (tmp_path / "made").exists()


def test_a_graph_with_other_classes_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_evaluation: Path
) -> None:
    require("onnxruntime", "onnxruntime")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["images"], ["logits"], to=onnx.TensorProto.FLOAT)], "nothing",
        [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, [1, 8, 8, 3])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, 8, 8, 3])],
    )  # fmt: skip
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "m.onnx",
    )
    with pytest.raises(UserError, match="expected float32"):
        foreign.bundle_of(
            tmp_path / "m.onnx", tmp_path / "made", reference=tiny_evaluation, target=aimed("onnxruntime")
        )
    assert not (tmp_path / "made").exists()
