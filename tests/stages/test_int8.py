import json
from pathlib import Path

import onnx
import pytest

from tests.small_models import images, vit
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.quantization import ranges
from vit_edge.recipe import Int8Config, ModelConfig
from vit_edge.stages import int8

GEOMETRY = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=2, heads=3)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    folder = tmp_path / "student"
    folder.mkdir()
    models.save(folder, vit(), GEOMETRY, [str(k) for k in range(10)])
    return folder


def test_writes_both_graphs_ranges_and_every_layer(student: Path, tmp_path: Path) -> None:
    told = int8.run(tmp_path, student=student, calibration_NHWC=images(70), config=Int8Config(float_layers=("head",)))
    layers = json.loads((tmp_path / "layers.json").read_text())
    assert (told["layers_int8"], told["layers_float"]) == (13, 5)
    assert told["calibration_images"] == 70
    assert told["calibration_agreement"] > 0.9
    reasons = {layer["name"]: layer["reason"] for layer in layers}
    assert reasons["head"] == "listed in int8.float_layers"
    assert reasons["blocks.1.attn/0"]
    assert reasons["patch_embed.proj"] is None
    assert all(layer["weight_sqnr_db"] > 30 for layer in layers if layer["kind"] == "linear")
    assert {"range_method", "equalization", "compensated_rounding", "bias_corrected"} <= set(layers[0])
    assert all(layer["range_method"] for layer in layers if layer["reason"] is None)
    assert len(ranges.read(tmp_path / "ranges.json")) > 10
    for name in ("int8.onnx", "float.onnx"):
        onnx.checker.check_model(str(tmp_path / name), full_check=True)


def test_too_few_images_are_refused(student: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="63 usable images"):
        int8.run(tmp_path, student=student, calibration_NHWC=images(63), config=Int8Config())


def test_a_misspelt_layer_is_refused_before_anything_is_written(student: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match="heed") as caught:
        int8.run(tmp_path, student=student, calibration_NHWC=images(70), config=Int8Config(float_layers=("heed",)))
    assert "'head'" in caught.value.fix
    assert set(tmp_path.iterdir()) == before
