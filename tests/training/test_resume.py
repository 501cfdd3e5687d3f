"""A training that is killed and continued ends with the same weights, bit for bit; several processes with those of one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.killed import kill, kill_after, started
from tests.training.small import SGD, TRAINING, metrics_of, same_weights, small, weights
from vit_edge.pipeline import Pipeline

EVERY_STEP = {"student__training__checkpoint_seconds": 1e-3, "teacher__training__checkpoint_seconds": 1e-3}


def test_a_training_killed_at_three_random_moments_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Teacher and student; with stochastic depth, a moving average, mixing, and parts of a batch."""
    settings = {
        **EVERY_STEP,
        "augment": {"shift": 0.1, "mixup": 0.2},
        "student__training__ema_decay": 0.5,
        "student__training__accumulate": 2,
        "student__training__epochs": 12,
        "teacher__training__epochs": 12,
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small(**settings).model_dump(mode="json")), encoding="utf-8")
    began = time.monotonic()
    started(recipe, tmp_path / "whole", "student").wait()
    seconds = time.monotonic() - began
    moments = np.random.default_rng(time.time_ns()).uniform(0.4, 0.95, 3) * seconds
    for moment in moments:
        victim = started(recipe, tmp_path / "killed", "student")
        time.sleep(moment)
        kill(victim)
    last = started(recipe, tmp_path / "killed", "student")
    _, said = last.communicate()
    assert last.returncode == 0, said
    assert same_weights(tmp_path / "whole", tmp_path / "killed"), f"killed after {moments} s"
    assert [line["epoch"] for line in metrics_of(tmp_path / "killed")] == list(range(1, 13))
    whole, killed = (metrics_of(tmp_path / name) for name in ("whole", "killed"))
    assert [line["loss"] for line in whole] == [line["loss"] for line in killed]


def test_a_checkpoint_inside_an_epoch_is_continued(tmp_path: Path) -> None:
    """Killed as soon as a step of the second epoch is on disk: what is said names the step, and the weights are equal."""
    settings = {**EVERY_STEP, "student__training__epochs": 8, "data__train_images": 800}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small(**settings).model_dump(mode="json")), encoding="utf-8")
    Pipeline(small(**settings), tmp_path / "whole", "cpu").run("student")
    victim = started(recipe, tmp_path / "killed", "student")
    checkpoint = tmp_path / "killed" / "student.partial" / "checkpoint.pt"
    assert kill_after(victim, checkpoint, 14) % 12, "killed at the end of an epoch"
    again = started(recipe, tmp_path / "killed", "student")
    _, said = again.communicate()
    assert "student: going on after" in said
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """On gloo, the same global batch: the same loss in every epoch. No BatchNorm and no stochastic depth."""
    model = {"name": "vit_ti16", "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
    training = TRAINING | SGD
    settings = {
        "teacher__model": model,
        "teacher__training": training,
        "student__model": model,
        "student__training": training | {"ema_decay": 0.5},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small(**settings).model_dump(mode="json")), encoding="utf-8")
    Pipeline(small(**settings), tmp_path / "one", "cpu").run("student")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command = [*launch, "-m", "vit_edge", "run", str(recipe), "--until", "student", "--device", "cpu", "--out", str(tmp_path / "two")]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-5)
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, atol=1e-5, rtol=1e-4)
    assert done.stderr.count("student: done in") == 1
    record = json.loads((tmp_path / "two" / "student" / "stage.json").read_text(encoding="utf-8"))
    assert record["fingerprint"] == json.loads((tmp_path / "one" / "student" / "stage.json").read_text(encoding="utf-8"))["fingerprint"]  # fmt: skip
