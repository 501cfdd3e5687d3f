"""What calibration saw of each tensor, and where int8 clips it.

ranges.json holds them by the value names of the canonical graph; a lowering may use or leave one, never make one up.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vit_edge.store import write_json

BINS = 4096
FINER = 0.75
"""Of a symmetric step: one that is longer is not worth a zero point."""
STEPS = 127  # of int8 on each side of zero
UINT8_MAX = 255
CANDIDATES = np.linspace(0.2, 1.0, 81)
SAMPLED = 1 << 16
"""Values of one batch of a tensor that enter its histogram; its extremes are of all of them."""
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

    @property
    def unsigned(self) -> tuple[float, int]:
        """Scale and zero point of uint8 that covers zero and the range, clipped at its limit."""
        low = min(0.0, max(self.low, -self.limit))
        high = max(0.0, min(self.high, self.limit))
        scale = (high - low) / UINT8_MAX or 1.0
        return scale, round(-low / scale)

    @property
    def finer(self) -> tuple[float, int] | None:
        """Scale and zero point of uint8 where that gives finer steps: for values on one side of zero, or nearly so, as
        after a ReLU, a GELU or a hardswish."""
        scale, zero_point = self.unsigned
        return (scale, zero_point) if scale <= FINER * self.scale else None

    def between(self, lowest: float, highest: float) -> "Range":
        """Of what is left of the values within these bounds."""
        low, high = (min(max(value, lowest), highest) for value in (self.low, self.high))
        return replace(self, low=low, high=high)


PIXELS = Range(-128.0, 127.0, float(STEPS))
"""Of the pixels minus 128: the scale is 1, int8 holds each without error."""


class Statistics:
    """A tensor's extremes and a histogram of its magnitudes, whose span doubles when a larger one comes.

    pixels: the tensor holds pixels minus 128, each of which int8 holds without error.
    """

    def __init__(self, pixels: bool = False) -> None:
        self.pixels = pixels
        self.low, self.high, self.span = np.inf, -np.inf, 0.0
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self._ranges: dict[str, Range] = {}

    def update(self, values: torch.Tensor) -> None:
        self._ranges.clear()
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
        step = values.numel() // SAMPLED | 1  # odd: no stride of the layout
        self.counts += torch.histc(values.flatten()[::step].abs(), BINS, 0, self.span).cpu()

    def range(self, method: str) -> Range:
        """The range with the limit that a method of METHODS chooses."""
        if self.pixels:
            return PIXELS
        if self.span == 0:
            return Range(0.0, 0.0, 1.0)
        if method not in self._ranges:
            self._ranges[method] = self.at(METHODS[method](self))
        return self._ranges[method]

    def at(self, limit: float) -> Range:
        """The range with this limit, whoever chose it."""
        noise = float(self.noise(np.array([limit]))[0])
        signal = float(self.counts.numpy() @ np.square(self._magnitudes()))
        sqnr_db = 10 * np.log10(signal / noise) if noise else None
        return Range(self.low, self.high, limit, sqnr_db and round(float(sqnr_db), 2))

    def noise(self, limits_L: np.ndarray) -> np.ndarray:
        """Sum of squared errors of rounding and clipping to int8 at each limit (L,)."""
        magnitudes, steps_L1 = self._magnitudes(), limits_L[:, None] / STEPS
        rounded_LM = np.minimum(np.rint(magnitudes / steps_L1), STEPS) * steps_L1
        return np.asarray(np.square(magnitudes - rounded_LM) @ self.counts.numpy())

    def _magnitudes(self) -> np.ndarray:
        return (np.arange(BINS) + 0.5) * (self.span / BINS)


def minmax(statistics: Statistics) -> float:
    """Clips nothing that calibration saw."""
    return max(-statistics.low, statistics.high)


def least_noise(statistics: Statistics) -> float:
    """The limit with the least squared error of rounding and clipping together (Banner et al. 2019, §3)."""
    limits = minmax(statistics) * CANDIDATES
    return float(limits[int(np.argmin(statistics.noise(limits)))])


def percentile(share: float) -> Callable[[Statistics], float]:
    """The magnitude that a share of the values stays below."""

    def limit(statistics: Statistics) -> float:
        below = statistics.counts.cumsum(0)
        index = int(torch.searchsorted(below, share * below[-1]))
        return min((index + 1) * statistics.span / BINS, minmax(statistics))

    return limit


def entropy(statistics: Statistics) -> float:
    """The limit whose histogram of magnitudes, clipped and merged into 127 steps, has the least KL divergence from the
    original (Migacz 2017, 8-bit inference with TensorRT)."""
    counts = statistics.counts.numpy().copy()
    counts[0] = counts[1]  # zeros, half of all values after a ReLU, say nothing of where to clip
    used = int(np.nonzero(counts)[0][-1]) + 1
    candidates = np.unique(np.linspace(max(STEPS + 1, used // 5), max(STEPS + 1, used), 64).astype(int))
    kept = candidates[np.argmin([_divergence(counts, int(bins)) for bins in candidates])]
    return min(float(kept) * statistics.span / BINS, minmax(statistics))


def _divergence(counts: np.ndarray, bins: int) -> float:
    reference = counts[:bins].copy()
    reference[-1] += counts[bins:].sum()
    step = np.minimum((np.arange(bins) * (STEPS + 1)) // bins, STEPS)
    filled = counts[:bins] > 0
    held = np.bincount(step, counts[:bins], STEPS + 1) / np.maximum(np.bincount(step, filled, STEPS + 1), 1)
    merged = np.where(filled, held[step], 0)
    p, q = reference / reference.sum(), merged / max(merged.sum(), 1e-30)
    there = p > 0
    return float((p[there] * np.log(p[there] / np.maximum(q[there], 1e-12))).sum())


METHODS: dict[str, Callable[[Statistics], float]] = {
    "minmax": minmax,
    "percentile-99.9": percentile(0.999),
    "percentile-99.99": percentile(0.9999),
    "mse": least_noise,
    "entropy": entropy,
}


def write(path: Path, ranges: Mapping[str, Range]) -> None:
    """Writes ranges.json."""
    write_json(path, {"schema": SCHEMA, "values": {name: asdict(found) for name, found in ranges.items()}})


def read(path: Path) -> dict[str, Range]:
    """What `write` wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))["values"]
    return {name: Range(**found) for name, found in values.items()}
