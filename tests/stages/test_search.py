"""The int8 model held against the tune split, and what is given back to float: on trained models, some of them spoilt."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import trained
from vit_edge import target
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.models import classifier as models
from vit_edge.quantization.choice import Chosen, choose
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.recipe import Int8Config, Limits, ModelConfig, SearchConfig
from vit_edge.report import quantization
from vit_edge.report.quantization import Search
from vit_edge.stages import int8, search
from vit_edge.stages.search import Ground
from vit_edge.target import Target

ROOT = Path(__file__).parents[2]
PLANTED = {"vit": {"blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}, "cnn": {"mix"}}
SEARCH = SearchConfig(max_drop_points=2.0, timing_seconds=0.02)
PLAIN = Int8Config(equalization=(), ranges="mse", rounding="nearest", bias_correction="never", search=SEARCH)
GEOMETRY = ModelConfig(name="vit_ti16", patch_size=4, width=32, depth=2, heads=2)


def tune(most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images_NHWC, labels_N = (part[trained.TRAINED_ON :][:most] for part in trained.images())
    for start in range(0, len(labels_N), 300):
        yield images_NHWC[start : start + 300], labels_N[start : start + 300]


def searched(
    folder: Path, model: models.Classifier, config: SearchConfig = SEARCH, targets: Sequence[Target] = ()
) -> tuple[Chosen, Search]:
    graph = deployable(model)
    onnx.save(onnx.to_onnx(graph, trained.SIDE), folder / "float.onnx")
    chosen = choose(graph, trained.images()[0][: trained.CALIBRATION], PLAIN, lambda line: None)
    return search.run(folder, chosen, config, Ground(tune, Limits(), targets), trained.SIDE)


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_gives_back_the_planted_layers_and_no_others(kind: str, tmp_path: Path) -> None:
    chosen, found = searched(tmp_path, trained.spoilt(kind))
    plain, taken = found.trials[0], found.trials[found.chosen]
    assert plain.drop_lower95_one_sided > 10
    assert not plain.holds
    assert taken.holds
    assert taken.drop_upper95_one_sided <= found.margin_points == 2.0
    assert set(taken.given_back) == set(chosen.float_layers) == PLANTED[kind]
    assert found.held_by == "upper95"
    assert f"keeps the limit: a drop of {taken.drop_points:.2f} points" in found.outcome
    images_NHWC, labels_N = next(tune(300))
    simulated = Simulation(chosen.on_grid, chosen.outcome, chosen.float_layers)
    right = [logits(run, images_NHWC).argmax(1) == labels_N for run in (chosen.floats, simulated.run)]
    assert right[1].mean() > right[0].mean() - 0.02
    assert quantization.search(tmp_path) == found
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_model_that_keeps_the_limit_costs_one_look_at_the_tune_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, found = searched(tmp_path, trained.trained("cnn"))
    assert chosen.float_layers == ()
    assert len(found.trials) == 1
    assert found.costs == []
    assert "nothing needs to be given back; int8 keeps the limit" in capsys.readouterr().err


def test_each_candidate_is_timed_in_turn_with_float_on_the_targets_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = target.load("openvino").model_copy(update={"name": "far", "runtime": "tensorrt"})
    _, found = searched(tmp_path, trained.spoilt("cnn"), targets=[target.load("onnxruntime"), elsewhere])
    for trial in found.trials:
        assert trial.timed[0].target == "onnxruntime"
        assert trial.time_ratio
        assert trial.time_ratio > 0
    if len(found.trials[0].timed) == 1:
        assert "far is not timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "words", "trials", "kept"),
    [
        ({"trials": 1}, "stopped, its 1 trials are spent", 1, False),
        ({"trials": 2}, "stopped, its 2 trials are spent", 2, False),
        ({"trials": 3}, "stopped, its 3 trials are spent", 3, True),
        ({"seconds": 1e-6}, "stopped, its 1e-06 s are spent", 1, False),
    ],
)
def test_a_spent_budget_is_told_and_the_best_is_taken(
    budget: dict[str, float], words: str, trials: int, kept: bool, tmp_path: Path
) -> None:
    _, found = searched(tmp_path, trained.spoilt("vit"), SEARCH.model_copy(update=budget))
    assert found.outcome.startswith(words)
    assert ("keeps the limit" if kept else "does not keep the limit") in found.outcome
    assert len(found.trials) == trials
    bounds = [trial.drop_upper95_one_sided for trial in found.trials]
    assert bounds[found.chosen] == min(bounds)


def test_images_that_decide_no_bound_hold_the_drop_itself(tmp_path: Path) -> None:
    _, found = searched(tmp_path, trained.trained("cnn"), SEARCH.model_copy(update={"tune_images": 40}))
    assert (found.n, found.held_by) == (40, "drop")
    assert "40 images of the tune split, too few for a bound" in found.outcome


def test_what_goes_to_tensorrt_too_is_fitted_to_the_others_and_judged_by_both_ways_of_rounding() -> None:
    chosen = choose(deployable(trained.spoilt("cnn")), trained.images()[0][: trained.CALIBRATION], PLAIN, print)
    points, fitted = {}, {}
    for names in (("openvino",), ("tensorrt",), ("openvino", "tensorrt"), ()):
        ground = Ground(tune, Limits(), [target.load(name) for name in names])
        points[names] = search._Judge(chosen, SEARCH, ground).drop(chosen).points
        fitted[names] = ground.roundings.symmetric == 1
    assert points["openvino",] != points["tensorrt",]
    assert points["openvino", "tensorrt"] == max(points["openvino",], points["tensorrt",])
    assert points[()] == points["openvino",]
    assert [names for names, symmetric in fitted.items() if symmetric] == [("tensorrt",)]


def test_without_any_limit_nothing_is_held_against_the_tune_split() -> None:
    unlimited = Ground(tune, Limits(max_drop_points=None, min_relative_top1=None), ())
    assert not search.has_limit(SearchConfig(), unlimited)
    assert search.has_limit(SEARCH, unlimited)
    assert search.has_limit(SearchConfig(), Ground(tune, Limits(), ()))


def stage(folder: Path, student: Path, looks: int = -1) -> None:
    """The whole int8 stage; kills this process when the tune split is looked at for the time numbered `looks`."""
    seen = []

    def killing(most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        seen.append(most)
        if len(seen) == looks:
            signal.raise_signal(signal.SIGKILL)
        return tune(most)

    images_NHWC = trained.images()[0][: trained.CALIBRATION]
    int8.run(folder, student=student, calibration_NHWC=images_NHWC, config=PLAIN, ground=Ground(killing, Limits(), ()))


def test_a_killed_search_goes_on_to_the_same_result_without_a_trial_repeated(tmp_path: Path) -> None:
    student, whole, killed = (tmp_path / name for name in ("student", "whole", "killed"))
    for folder in (student, whole, killed):
        folder.mkdir()
    models.save(student, trained.spoilt("vit"), GEOMETRY, [str(k) for k in range(10)])
    stage(whole, student)
    call = f"from pathlib import Path; from tests.stages.test_search import stage; stage(Path({str(killed)!r}), Path({str(student)!r}), 4)"
    ended = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    log = killed / "search.jsonl"
    before = [json.loads(line)["trial"] for line in log.read_text().splitlines() if "trial" in line]
    with log.open("a") as file:
        file.write('{"trial": {"given_back": ["cut')
    stage(killed, student)
    found, expected = quantization.search(killed), quantization.search(whole)
    assert found
    assert expected
    assert [t.given_back for t in found.trials] == [t.given_back for t in expected.trials]
    assert [t.kl for t in found.trials] == [t.kl for t in expected.trials]
    assert found.chosen == expected.chosen
    known = {tuple(trial["given_back"]): trial["seconds"] for trial in before}
    assert len(known) >= 2
    assert all(t.seconds == known.get(tuple(t.given_back), t.seconds) for t in found.trials)
    for name in ("int8.onnx", "layers.json", "ranges.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    reasons = {layer.name: layer.reason for layer in quantization.layers(killed)}
    assert all((reasons[name] or "").startswith("given back to float: KL ") for name in PLANTED["vit"])
