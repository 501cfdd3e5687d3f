"""A run in a process of its own, killed in the middle of a training."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

CODE = (
    "import sys, pathlib; from vit_edge import recipe, pipeline\n"
    "pipeline.Pipeline(recipe.load(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), 'cpu').run(sys.argv[3])"
)


def started(recipe: Path, out: Path, until: str) -> "subprocess.Popen[str]":
    """The run of a recipe up to a stage."""
    command = [sys.executable, "-c", CODE, str(recipe), str(out), until]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def kill(victim: "subprocess.Popen[str]") -> None:
    victim.send_signal(signal.SIGKILL)
    victim.wait()


def kill_after(victim: "subprocess.Popen[str]", checkpoint: Path, steps: int) -> int:
    """Kills it when a checkpoint of so many steps is on disk; the steps of the last one there."""
    while _step(checkpoint) < steps:
        assert victim.poll() is None, "the training ended before it could be killed"
        time.sleep(0.01)
    kill(victim)
    return _step(checkpoint)


def _step(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["step"]) if checkpoint.exists() else 0
