"""One process for each artefact, all alive at once, timed in turn."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """What a process opens. engine: a runtime of the product, or torch, or torch.compile; precision: the target's, or
    torch's; planes: the graph takes normalised float planes, uint8 pixels otherwise; isa: oneDNN's highest.
    """

    name: str
    model: str
    engine: str
    path: str
    precision: str
    threads: int
    batch: int
    planes: bool
    isa: str | None = None


class Worker:
    """The process of one job, ready to be timed, or with the reason why it failed."""

    def __init__(self, job: Job):
        environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
        environment |= {"OMP_NUM_THREADS": str(job.threads), "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])}
        environment |= {"ONEDNN_MAX_CPU_ISA": job.isa} if job.isa else {}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "side_by_side.worker", json.dumps(asdict(job))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        told = self._line() or {"failed": "its process died"}
        self.failed: str | None = told.get("failed")
        self._count: int = told.get("count", 0)
        self.latencies_ms: list[float] = []

    def take_turn(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._count}\n")
        self._process.stdin.flush()
        self.latencies_ms += self._line()

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def timed(jobs: Sequence[Job], seconds_each: float) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Milliseconds (N,) of each artefact's queries, and why others could not be opened.

    Turn after turn, in the reverse order every other round, so that what slows the machine slows all.
    """
    workers = {job.name: Worker(job) for job in jobs}
    ready = [worker for worker in workers.values() if worker.failed is None]
    until = time.perf_counter() + seconds_each * len(ready)
    while ready and time.perf_counter() < until:
        for worker in ready:
            worker.take_turn()
        ready.reverse()
    for worker in workers.values():
        worker.close()
    found = {name: np.asarray(one.latencies_ms) for name, one in workers.items() if one.failed is None}
    return found, {name: one.failed for name, one in workers.items() if one.failed is not None}
