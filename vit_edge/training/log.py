"""What a training says of itself, epoch by epoch: a line of metrics.jsonl each, and TensorBoard where it is asked for."""

import json
import os
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError

METRICS = "metrics.jsonl"


class Log:
    """Metrics of the epochs of one training; a context manager. In a process that does not lead it writes nothing."""

    def __init__(self, folder: Path, *, epochs: int, tensorboard: bool, leads: bool):
        """epochs: how many are behind; the lines of later ones, which will be trained again, are dropped."""
        self.path, self.leads = folder / METRICS, leads
        self.board: Any = None
        if not leads:
            return
        if self.path.exists():
            _keep_lines(self.path, epochs)
        if tensorboard:
            self.board = _tensorboard(folder / "tensorboard", epochs)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()

    def write(self, metrics: dict[str, Any]) -> None:
        """One epoch's."""
        if not self.leads:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.board is not None:
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "epoch":
                    self.board.add_scalar(name, value, metrics["epoch"])


def _keep_lines(path: Path, count: int) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines[:count]), encoding="utf-8")
    os.replace(temporary, path)


def _tensorboard(folder: Path, epochs: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as err:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed", 'pip install "vit-edge[tensorboard]"'
        ) from err
    return SummaryWriter(str(folder), purge_step=epochs + 1)
