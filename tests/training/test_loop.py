"""The training loop: it learns, it goes on after a kill to the same weights, and it stops at a NaN."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vit_edge.errors import UserError
from vit_edge.pipeline import Pipeline
from vit_edge.recipe import Recipe
from vit_edge.settings import parse

SMALL = {
    "name": "small",
    "data": {"spec": "digits", "image_size": 16, "calibration_images": 64, "train_images": 256},
    "augment": {"shift": 0.1},
    "teacher": None,
    "student": {
        "model": {
            "name": "vit_ti16",
            "stem": [16, 32],
            "patch_size": 1,
            "width": 32,
            "depth": 2,
            "heads": 2,
            "drop_path": 0.1,
        },
        "training": {
            "epochs": 12,
            "batch_size": 64,
            "learning_rate": 2e-3,
            "ema_decay": 0.5,
            "checkpoint_seconds": 1e-3,
        },
        "distillation": None,
    },
}


def small(**training: object) -> Recipe:
    values = json.loads(json.dumps(SMALL))
    values["student"]["training"] |= training
    return parse(Recipe, values, "test")


def metrics_of(run: Path) -> list[dict]:
    text = (run / "student" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_training_learns_and_reports(tmp_path: Path) -> None:
    pipeline = Pipeline(small(epochs=25), tmp_path / "run", "cpu")
    pipeline.run("student")
    metrics = pipeline.metrics("student")
    losses = [line["loss"] for line in metrics_of(tmp_path / "run")]
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 0.5
    assert metrics["tune_top1"] > 0.25
    assert 0 <= metrics["share_waiting_for_data"] < 1
    assert not (tmp_path / "run" / "student" / "checkpoint.pt").exists()


def test_a_killed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(SMALL), encoding="utf-8")
    Pipeline(small(), tmp_path / "whole", "cpu").run("student")
    code = (
        "import sys, pathlib; from vit_edge import recipe, pipeline\n"
        "pipeline.Pipeline(recipe.load(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), 'cpu').run('student')"
    )
    command = [sys.executable, "-c", code, str(recipe), str(tmp_path / "killed")]
    victim = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "killed" / "student.partial" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 3):
        assert victim.poll() is None, "the training ended before it could be killed"
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "killed" / "student").exists()
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert "student: going on after epoch" in again.stderr
    whole, killed = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("whole", "killed"))
    lines = metrics_of(tmp_path / "killed")
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert whole.keys() == killed.keys()
    assert all((whole[name] == killed[name]).all() for name in whole)


def test_a_rate_that_is_too_high_stops_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss became .*\n.*learning_rate"):
        Pipeline(small(learning_rate=1e20, warmup_epochs=0.0), tmp_path, "cpu").run("student")
    assert not (tmp_path / "student").exists()


def test_mixup_and_bf16_train(tmp_path: Path) -> None:
    values = json.loads(json.dumps(SMALL))
    values["augment"] |= {"mixup": 0.8, "cutmix": 1.0}
    values["student"]["training"] |= {"precision": "bf16", "epochs": 2}
    pipeline = Pipeline(parse(Recipe, values, "test"), tmp_path, "cpu")
    pipeline.run("student")
    assert pipeline.metrics("student")["loss"] > 0
