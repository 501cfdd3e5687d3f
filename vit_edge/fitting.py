"""The largest of many candidates that is fast enough: a search that measures few of them.

A line is a row of candidates that differ in one size alone, smallest first, such as a depth at rising widths: along it
latency rises with the multiply-adds. Capacity is multiply-adds, then parameters.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a search assumes where nothing else is asked for: ImageNet's images and classes.
IMAGE_SIZE, CLASSES, SECONDS = 224, 1000, 120.0
# Measurements of a line, at most. A line is done when what may still fit has at most so much more multiply-adds than
# what is known to.
MOST_OF_A_LINE, CLOSE = 4, 1.15
# Latency ~ multiply-adds to this power, until two measurements of a line tell; and what they may tell.
USUAL_POWER, POWERS = 0.7, (0.3, 1.3)


@dataclass(frozen=True)
class Candidate:
    """A student by its settings, those of recipe.ModelConfig; multiply_adds of one image."""

    settings: Mapping[str, Any]
    parameters: int
    multiply_adds: int

    @property
    def capacity(self) -> tuple[int, int]:
        return self.multiply_adds, self.parameters


@dataclass(frozen=True)
class Trial:
    """A candidate's int8 latency on the device. noise: half the width of p90's 95 % interval, as a share of it."""

    candidate: Candidate
    p50_ms: float
    p90_ms: float
    noise: float

    def fits(self, max_p90_ms: float) -> bool:
        """As a gate decides: with its noise."""
        return self.p90_ms * (1 + self.noise) <= max_p90_ms


Line = Sequence[Candidate]
Measure = Callable[[Candidate], Trial]


def search(
    lines: Sequence[Line], measure: Measure, max_p90_ms: float, time_is_left: Callable[[], bool]
) -> list[Trial]:  # fmt: skip
    """Measures each line near where it reaches `max_p90_ms`, in order, until the time is up; all that was measured.

    Where nothing fits, the smallest of all candidates is among what was measured.
    """
    trials: list[Trial] = []
    for line in lines:
        trials += _along(line, trials, measure, max_p90_ms, time_is_left)
    smallest = min((line[0] for line in lines), key=lambda candidate: candidate.capacity)
    if not largest(trials, max_p90_ms) and all(trial.candidate is not smallest for trial in trials):
        trials.append(measure(smallest))
    return trials


def largest(trials: Iterable[Trial], max_p90_ms: float) -> list[Trial]:
    """Those that fit, the largest first."""
    fitting = (trial for trial in trials if trial.fits(max_p90_ms))
    return sorted(fitting, key=lambda trial: trial.candidate.capacity, reverse=True)


def _along(
    line: Line, before: Sequence[Trial], measure: Measure, max_p90_ms: float, time_is_left: Callable[[], bool]
) -> list[Trial]:  # fmt: skip
    """The trials of one line; `before`: of other lines, to guess from."""
    fits, too_slow = -1, len(line)
    trials: list[Trial] = []
    while too_slow - fits > 1 and len(trials) < MOST_OF_A_LINE and time_is_left():
        if fits >= 0 and line[too_slow - 1].multiply_adds <= CLOSE * line[fits].multiply_adds:
            break
        wanted = _multiply_adds_for(max_p90_ms, trials or _nearest(before, max_p90_ms))
        index = sum(candidate.multiply_adds <= wanted for candidate in line) - 1 if wanted else len(line) // 2
        index = min(max(index, fits + 1), too_slow - 1)
        trials.append(measure(line[index]))
        if trials[-1].fits(max_p90_ms):
            fits = index
        else:
            too_slow = index
    return trials


def _multiply_adds_for(p90_ms: float, trials: Sequence[Trial]) -> float | None:
    """How many would take so long, by the one or two trials that are nearest to it."""
    nearest = sorted(trials, key=lambda trial: _distance(trial, p90_ms))[:2]
    if not nearest:
        return None
    base, power = nearest[0], USUAL_POWER
    if len(nearest) == 2 and nearest[1].candidate.multiply_adds != base.candidate.multiply_adds:
        ratio = nearest[1].candidate.multiply_adds / base.candidate.multiply_adds
        power = math.log(nearest[1].p90_ms / base.p90_ms) / math.log(ratio)
        power = min(max(power, POWERS[0]), POWERS[1])
    reachable = p90_ms / (base.p90_ms * (1 + base.noise))
    return float(base.candidate.multiply_adds * reachable ** (1 / power))


def _nearest(trials: Sequence[Trial], p90_ms: float) -> list[Trial]:
    return [min(trials, key=lambda trial: _distance(trial, p90_ms))] if trials else []


def _distance(trial: Trial, p90_ms: float) -> float:
    return abs(math.log(trial.p90_ms / p90_ms))
