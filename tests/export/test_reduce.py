"""Weights of seven bits for processors whose int8 sums saturate: OpenVINO is held to such a processor's instructions."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import require
from tests.small_models import images, logits_of, vit
from vit_edge import bundle, metrics
from vit_edge.export.graph import array, entry, producer, products
from vit_edge.export.onnx import load as load_onnx
from vit_edge.export.onnx import with_batch
from vit_edge.export.reduce import with_seven_bits
from vit_edge.models import classifier as models
from vit_edge.recipe import Int8Config, Limits, ModelConfig
from vit_edge.runtimes import machine
from vit_edge.stages import artefacts, export, int8
from vit_edge.target import load

GEOMETRY = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=2, heads=3)
RUN = """
import sys, numpy, openvino
request = openvino.Core().compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
numpy.save(sys.argv[3], numpy.concatenate([request.infer({0: image[None]})[0] for image in numpy.load(sys.argv[2])]))
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    for name in ("student", "int8"):
        (folder / name).mkdir()
    models.save(folder / "student", vit(), GEOMETRY, [str(k) for k in range(10)])
    int8.run(folder / "int8", student=folder / "student", calibration_NHWC=images(70), config=Int8Config())
    return folder


def test_no_weight_is_beyond_64_and_none_moves_by_more_than_half_a_step(stages: Path) -> None:
    full = with_batch(load_onnx(stages / "int8" / "int8.onnx"), 1)
    reduced = with_seven_bits(full)
    pairs = zip(products(full), products(reduced), strict=True)
    found = [(producer(entry(a, 1), "DequantizeLinear"), producer(entry(b, 1), "DequantizeLinear")) for a, b in pairs]
    compared = 0
    for a, b in found:
        if a is None or b is None:
            continue
        eight, seven = array(entry(a, 0)).astype(int), array(entry(b, 0)).astype(int)
        assert abs(seven).max() <= 64
        assert abs(eight - 2 * seven).max() <= 1
        np.testing.assert_array_equal(array(entry(b, 1)), 2 * array(entry(a, 1)))
        compared += 1
    assert compared > 10


def exported(stages: Path, folder: Path) -> bundle.Bundle:
    """For OpenVINO, with both sorts of int8."""
    require("openvino", "openvino")
    target = load("openvino").model_copy(update={"threads": 1, "reduced_range": True})
    export.run(
        folder, student=stages / "student", int8=stages / "int8", evaluation=None, target=target, limits=Limits(),
        provenance={},
    )  # fmt: skip
    return bundle.read(folder / "bundle")


def test_the_bundle_brings_both_and_the_processor_chooses(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = exported(stages, tmp_path)
    monkeypatch.setattr(machine, "instruction_sets", lambda: ["AVX2", "AVX-VNNI"])
    assert artefacts.int8_files(opened) == opened.int8
    assert artefacts.int8_variant(opened) is None
    monkeypatch.setattr(machine, "instruction_sets", lambda: ["AVX2"])
    assert artefacts.int8_files(opened) == opened.reduced
    assert "seven bits" in str(artefacts.int8_variant(opened))
    monkeypatch.setattr(machine, "instruction_sets", lambda: ["dot product"])
    assert artefacts.int8_files(opened) == opened.int8


def test_seven_bits_answer_as_they_should_where_eight_saturate(stages: Path, tmp_path: Path) -> None:
    opened = exported(stages, tmp_path)
    assert opened.reduced is not None
    seen_NHWC = images(60, seed=3)
    np.save(tmp_path / "images.npy", seen_NHWC)
    float_NK = logits_of(vit(), seen_NHWC)
    noise_db = {
        (isa, name): metrics.sqnr_db(float_NK, _logits(files[0], tmp_path, isa))
        for isa in ("AVX2", "DEFAULT") for name, files in (("eight", opened.int8), ("seven", opened.reduced))
    }  # fmt: skip
    assert noise_db["AVX2", "seven"] > noise_db["DEFAULT", "seven"] - 1
    assert noise_db["DEFAULT", "eight"] > noise_db["DEFAULT", "seven"]


def _logits(graph: Path, folder: Path, isa: str) -> np.ndarray:
    """In a process whose products keep to an instruction set."""
    subprocess.run(
        [sys.executable, "-c", RUN, graph, folder / "images.npy", folder / "logits.npy"],
        check=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa},
    )  # fmt: skip
    return np.asarray(np.load(folder / "logits.npy"))
