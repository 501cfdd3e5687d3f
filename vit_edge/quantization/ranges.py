"""What calibration saw of each tensor, and where int8 clips it.

ranges.json holds them by the value names of the canonical graph; a lowering may use or leave one, never make one up.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from vit_edge.store import write_json

BINS = 4096
STEPS = 127  # of int8 on each side of zero
CANDIDATES = np.linspace(0.2, 1.0, 81)
SCHEMA = "vit-edge/ranges/1"


@dataclass(frozen=True)
class Range:
    """Smallest and largest value, and the magnitude at which symmetric int8 clips.

    sqnr_db: signal to noise of int8 on what calibration saw; None where nothing is lost.
    """

    low: float
    high: float
    limit: float
    sqnr_db: float | None = None

    @property
    def scale(self) -> float:
        """One step of symmetric int8."""
        return self.limit / STEPS


PIXELS = Range(-128.0, 127.0, float(STEPS))
"""Of the pixels minus 128: the scale is 1, int8 holds each without error."""


class Statistics:
    """A tensor's extremes and a histogram of its magnitudes, whose span doubles when a larger one comes."""

    def __init__(self) -> None:
        self.low, self.high, self.span = np.inf, -np.inf, 0.0
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def update(self, values: torch.Tensor) -> None:
        values = values.detach().float()
        low, high = (float(extreme) for extreme in values.aminmax())
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        if not np.isfinite(largest) or largest == 0:
            return
        self.span = self.span or largest
        while largest > self.span:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = torch.cat([pairs, torch.zeros_like(pairs)])
            self.span *= 2
        self.counts += torch.histc(values.abs(), BINS, 0, self.span).cpu()

    def range(self, method: str) -> Range:
        """The range with the limit that a method of METHODS chooses."""
        if self.span == 0:
            return Range(0.0, 0.0, 1.0)
        limit = METHODS[method](self)
        noise = self.noise(limit)
        signal = float(self.counts.numpy() @ np.square(self._magnitudes()))
        sqnr_db = 10 * np.log10(signal / noise) if noise else None
        return Range(self.low, self.high, limit, sqnr_db and round(float(sqnr_db), 2))

    def noise(self, limit: float) -> float:
        """Sum of squared errors of rounding and clipping to int8 at a limit."""
        magnitudes, step = self._magnitudes(), limit / STEPS
        rounded = np.minimum(np.round(magnitudes / step), STEPS) * step
        return float(self.counts.numpy() @ np.square(magnitudes - rounded))

    def _magnitudes(self) -> np.ndarray:
        return (np.arange(BINS) + 0.5) * (self.span / BINS)


def minmax(statistics: Statistics) -> float:
    """Clips nothing that calibration saw."""
    return max(-statistics.low, statistics.high)


def least_noise(statistics: Statistics) -> float:
    """The limit with the least squared error of rounding and clipping together (Banner et al. 2019, §3)."""
    limits = minmax(statistics) * CANDIDATES
    return float(limits[int(np.argmin([statistics.noise(limit) for limit in limits]))])


METHODS: dict[str, Callable[[Statistics], float]] = {"minmax": minmax, "mse": least_noise}


def write(path: Path, ranges: Mapping[str, Range]) -> None:
    """Writes ranges.json."""
    write_json(path, {"schema": SCHEMA, "values": {name: asdict(found) for name, found in ranges.items()}})


def read(path: Path) -> dict[str, Range]:
    """What `write` wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))["values"]
    return {name: Range(**found) for name, found in values.items()}
