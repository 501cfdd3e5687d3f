"""What a search has found so far, a line each in its unfinished stage's folder: a killed one goes on from there."""

import json
import os
from pathlib import Path
from typing import Any

from vit_edge.report.quantization import Cost, Trial

FILE = "search.jsonl"


class TrialLog:
    """costs: of each product; empty until they are measured. trials: by the names that were given back, in order."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.costs: list[Cost] = []
        self.costs_seconds = 0.0
        self.trials: dict[frozenset[str], Trial] = {}
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # the last may have been cut off
        if len(whole) < len(lines):
            self.path.write_bytes(b"".join(whole))
        for line in whole:
            self._take(json.loads(line))

    @property
    def seconds(self) -> float:
        """That the search has taken, over all its lives."""
        return self.costs_seconds + sum(trial.seconds for trial in self.trials.values())

    def add_costs(self, costs: list[Cost], seconds: float) -> None:
        self._write({"costs": [cost.model_dump() for cost in costs], "seconds": seconds})

    def add(self, trial: Trial) -> None:
        """A later trial of the same products takes the place of the earlier one."""
        self._write({"trial": trial.model_dump()})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "costs" in line:
            self.costs = [Cost.model_validate(cost) for cost in line["costs"]]
            self.costs_seconds = line["seconds"]
        else:
            trial = Trial.model_validate(line["trial"])
            self.trials[frozenset(trial.given_back)] = trial
