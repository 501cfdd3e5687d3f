"""Quantization-aware distillation of a ViT and of a CNN with batch norm, both trained here on digits of 16 px."""

import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino
import pytest
import torch
import yaml

from tests.killed import kill_after, started
from tests.planted import planted, thinned
from tests.small_models import SmallCnn, logits_of, preprocessing, run_onnx, worst
from tests.training.small import alone, small
from vit_edge import metrics
from vit_edge.data import material
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.export import lower, onnx
from vit_edge.export.fold import deployable
from vit_edge.models.classifier import Classifier, classifier_in
from vit_edge.models.vit import VisionTransformer, ViTConfig
from vit_edge.pipeline import Pipeline
from vit_edge.quantization import integers, outputs, qat, quantizer
from vit_edge.quantization.choice import Chosen, choose
from vit_edge.quantization.lessons import Lessons
from vit_edge.quantization.products import products
from vit_edge.quantization.ranges import PIXELS
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.recipe import AugmentConfig, DataConfig, Int8Config, QatConfig, TrainingConfig
from vit_edge.stages.student import learning_labels
from vit_edge.training.loop import fit
from vit_edge.training.setup import accelerator_on

SIDE = 16
AUGMENT = AugmentConfig(shift=0.1)
PLAIN = {"equalization": (), "ranges": "percentile-99.9", "rounding": "nearest", "bias_correction": "never"}
"""Post-training quantization at its worst, and outliers in the ViT so many times as large: something to learn."""
PLANTED = 30.0
LEARNING = QatConfig(epochs=3, learning_rate=3e-4)


@dataclass(frozen=True)
class Learned:
    """A student with what post-training quantization made of it, and what training made of that."""

    student: Classifier
    weights: dict[str, torch.Tensor]
    before: Chosen
    after: Chosen
    told: dict[str, Any]
    lessons: Lessons
    calibration_NHWC: np.ndarray


def student(kind: str, views: Views) -> Classifier:
    torch.manual_seed(0)
    vit = ViTConfig(image_size=SIDE, patch_size=4, width=32, depth=2, heads=2, classes=10)
    backbone = VisionTransformer(vit) if kind == "vit" else SmallCnn()
    with TemporaryDirectory() as folder:
        model, _ = fit(
            Classifier(backbone, preprocessing(SIDE)),
            views,
            learning_labels(0.0),
            TrainingConfig(epochs=40, learning_rate=3e-3, warmup_epochs=1, precision="f32"),
            augment=AUGMENT,
            classes=10,
            seed=0,
            folder=Path(folder),
            label="student",
            report=lambda model: {},
            accelerator=accelerator_on("cpu"),
        )
    return classifier_in(model).eval()


@cache
def learned(kind: str) -> Learned:
    """Of "vit" or "cnn"."""
    data = DataConfig(spec="digits", image_size=SIDE, calibration_images=64, train_images=800)
    images = material.load(data, SIDE, None)
    views = Views(*images.student_images(), images.view, AUGMENT, 1)
    made = student(kind, views)
    if kind == "vit":
        pixels_NCHW = torch.from_numpy(images.calibration(made.preprocessing)).permute(0, 3, 1, 2)
        made = planted(thinned(made, pixels_NCHW), pixels_NCHW, PLANTED)
    weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    lessons = Lessons(made, None, views, AUGMENT, *images.tune(made.preprocessing), 10, 1, "cpu")
    calibration_NHWC = images.calibration(made.preprocessing)
    config = Int8Config(**PLAIN)  # type: ignore[arg-type]
    before = choose(deployable(made), calibration_NHWC, config, lambda line: None)
    with TemporaryDirectory() as folder:
        after, told = qat.distil(before, lessons, calibration_NHWC, LEARNING, Path(folder))
    return Learned(made, weights, before, after, told, lessons, calibration_NHWC)


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_what_was_learned_answers_more_like_float(kind: str) -> None:
    found = learned(kind)
    assert found.told["kept"]
    assert found.told["tune_kl"] < found.told["before"]["tune_kl"]
    assert set(found.after.outcome.methods.values()) <= {"learned", "exact"}
    for name, before in found.before.outcome.scales.items():
        assert not torch.equal(before, found.after.outcome.scales[name])


def test_outputs_that_were_clipped_stay_so_and_the_divergence_is_that_of_what_was_learned() -> None:
    before, images_NHWC = learned("cnn").before, learned("cnn").calibration_NHWC
    (name, *_) = (node.name for node in outputs.written(before.floats))
    clipped = replace(before, options=replace(before.options, limits={name: 0.5}))
    after = qat._read(clipped, qat._prepared(clipped, share_with_outputs=0.0), images_NHWC)
    assert after.outcome.ranges[name].limit == 0.5
    int8_NK = logits(Simulation(after.on_grid, after.outcome).run, after.held_NHWC)
    assert after.kl == pytest.approx(metrics.mean_kl(after.float_NK, int8_NK))


def test_outputs_of_convolutions_start_where_they_were_and_learn_steps_of_their_own() -> None:
    before, images_NHWC = learned("cnn").before, learned("cnn").calibration_NHWC
    prepared = qat._prepared(before, share_with_outputs=0.5)
    deployed = qat.Deployed(prepared).train()
    sample_BCHW = torch.from_numpy(images_NHWC[:8].copy()).permute(0, 3, 1, 2).float()
    assert any(not torch.equal(deployed(sample_BCHW), deployed(sample_BCHW)) for _ in range(20))
    deployed.eval()
    simulation = Simulation(before.on_grid, before.outcome, with_outputs=True)
    assert worst(logits(prepared, images_NHWC), logits(simulation.run, images_NHWC)) < 1e-3
    names = {node.name for node in outputs.written(before.floats)}
    with torch.no_grad():
        for name, tensor in prepared.named_parameters():
            if name.endswith(qat.STEP):
                tensor.fill_(0.1)
    after = qat._read(before, prepared, images_NHWC).outcome
    assert names
    for name in names:
        expected, found = before.outcome.ranges[name].unsigned, after.ranges[name].unsigned
        assert found[0] == pytest.approx(expected[0] * np.exp(0.1), rel=1e-4)
        assert found[1] == expected[1]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_float_student_and_post_training_model_are_left_as_they_were(kind: str) -> None:
    found = learned(kind)
    for name, tensor in found.student.state_dict().items():
        assert torch.equal(tensor, found.weights[name])
    again = choose(deployable(found.student), found.calibration_NHWC, Int8Config(**PLAIN), lambda line: None)  # type: ignore[arg-type]
    for name, tensor in again.on_grid.state_dict().items():
        assert torch.equal(tensor, found.before.on_grid.state_dict()[name])


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_exported_graph_is_canonical_and_equals_the_simulation(kind: str) -> None:
    found = learned(kind)
    simulation = Simulation(found.after.on_grid, replace(found.after.outcome, symmetric=True))
    expected_NK = logits(simulation.run, found.lessons.tune_NHWC)
    canonical = exported(found)
    quantizes = [node for node in canonical.graph if node.op_type == "QuantizeLinear"]
    readers = {user.op_type for node in quantizes for reader, _ in node.outputs[0].uses() for user, _ in reader.outputs[0].uses()}  # fmt: skip
    assert readers <= {"Conv", "MatMul", "Gemm"}
    for node in quantizes:
        zero_point = node.inputs[2].const_value.numpy()
        assert zero_point.dtype == np.int8
        assert zero_point == 0
    assert worst(run_onnx(canonical, found.lessons.tune_NHWC, optimised=False), expected_NK) < 0.05


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_both_runtimes_answer_as_the_simulation_does(kind: str, tmp_path: Path) -> None:
    found = learned(kind)
    canonical, images_NHWC = exported(found), found.lessons.tune_NHWC
    ranges = onnx.ranges_by_value(canonical, products(found.after.floats), found.after.outcome.ranges)
    expected_N = logits(Simulation(found.after.on_grid, found.after.outcome).run, images_NHWC).argmax(1)
    lowered = lower.lowered(onnx.with_batch(canonical, len(images_NHWC)), ranges, "onnxruntime")
    assert metrics.agreement(run_onnx(lowered, images_NHWC).argmax(1), expected_N) > 0.97
    onnx.save(lower.lowered(onnx.with_batch(canonical, len(images_NHWC)), ranges, "openvino"), tmp_path / "int8.onnx")
    compiled = openvino.Core().compile_model(tmp_path / "int8.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert metrics.agreement(compiled(images_NHWC)[0].argmax(1), expected_N) > 0.97


def test_pixels_stay_exact() -> None:
    found = learned("vit").after.outcome
    assert [found.ranges[name] for name, method in found.methods.items() if method == "exact"] == [PIXELS]


def test_what_answers_worse_is_not_kept(tmp_path: Path) -> None:
    found = learned("cnn")
    ruinous = QatConfig(epochs=1, learning_rate=0.5, warmup_epochs=0)
    kept, told = qat.distil(found.before, found.lessons, found.calibration_NHWC, ruinous, tmp_path)
    assert not told["kept"]
    assert kept is found.before


def test_nothing_to_judge_on_is_refused(tmp_path: Path) -> None:
    found = learned("cnn")
    blind = replace(found.lessons, tune_N=np.zeros(0, np.int64))
    with pytest.raises(UserError, match="tune split"):
        qat.distil(found.before, blind, found.calibration_NHWC, LEARNING, tmp_path)
    assert not list(tmp_path.iterdir())


def test_layers_left_in_float_are_trained_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "run_here", lambda: False)  # summed in float as in the graph that it is held against
    found = learned("vit")
    config = Int8Config(**PLAIN, float_layers=("head",))  # type: ignore[arg-type]
    before = choose(deployable(found.student), found.calibration_NHWC, config, lambda line: None)
    learning = QatConfig(epochs=1, learning_rate=1e-3)
    after, _ = qat.distil(before, found.lessons, found.calibration_NHWC, learning, tmp_path)
    assert "head" not in after.outcome.scales
    images_NHWC = found.lessons.tune_NHWC
    simulation = Simulation(after.on_grid, replace(after.outcome, symmetric=True), config.float_layers)
    example = torch.from_numpy(images_NHWC[:2].copy())
    graph, outcome = copy.deepcopy(after.on_grid), after.outcome
    quantized = quantizer.quantize(graph, example, outcome.ranges, config.float_layers, outcome.scales)
    assert worst(logits_of(quantized, images_NHWC), logits(simulation.run, images_NHWC)) < 1e-4


def test_the_teacher_is_asked_too_and_its_answers_are_those_that_are_kept(tmp_path: Path) -> None:
    settings = {"int8__qat": {"epochs": 1}, "student__training__epochs": 2, "teacher__training__epochs": 2}
    run = Pipeline(small(**settings), tmp_path / "run", "cpu")
    run.run("student")
    kept = {path.name for path in (tmp_path / "run" / "teacher_cache").iterdir()}
    run.run("int8")
    assert {path.name for path in (tmp_path / "run" / "teacher_cache").iterdir()} == kept
    told = run.metrics("int8")["qat"]
    assert {"kept", "tune_top1", "tune_kl", "before"} <= set(told)
    assert "teacher" in run.plans["int8"].inputs


def test_many_processes_are_refused_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="runs in one process, found 2"):
        Pipeline(alone(int8__qat={}), tmp_path / "run", "cpu").run("int8")
    assert not (tmp_path / "run").exists()


def test_a_killed_training_goes_on_to_the_same_graph(tmp_path: Path) -> None:
    qat = {"epochs": 20, "checkpoint_seconds": 1e-3, "learning_rate": 1e-3}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(alone(int8__qat=qat, student__training__epochs=2).model_dump(mode="json")))
    assert started(recipe, tmp_path / "whole", "int8").wait() == 0
    victim = started(recipe, tmp_path / "killed", "int8")
    kill_after(victim, tmp_path / "killed" / "int8.partial" / "checkpoint.pt", 5)
    again = started(recipe, tmp_path / "killed", "int8")
    _, said = again.communicate()
    assert again.returncode == 0, said
    assert "qat: going on after" in said
    for name in ("int8.onnx", "ranges.json", "layers.json"):
        whole, killed = ((tmp_path / run / "int8" / name).read_bytes() for run in ("whole", "killed"))
        assert whole == killed
    assert not (tmp_path / "killed" / "int8" / "checkpoint.pt").exists()


def exported(found: Learned) -> ir.Model:
    graph, outcome = found.after.on_grid, found.after.outcome
    example = torch.from_numpy(found.calibration_NHWC[:2].copy())
    return onnx.to_onnx(quantizer.quantize(copy.deepcopy(graph), example, outcome.ranges, (), outcome.scales), SIDE)
