"""Accuracy, agreement and latency statistics, in numpy.

N images, K classes. top1 and agreement are fractions; drops and margins are percentage points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import TypedDict

Z95_ONE_SIDED = 1.6448536269514722
Z80_POWER = 0.8416212335729143


def answers(logits_NK: np.ndarray) -> np.ndarray:
    """The class with the largest logit (N,); -1, which is never right, where a logit is NaN or infinite."""
    return np.where(np.isfinite(logits_NK).all(axis=1), logits_NK.argmax(axis=1), -1)


def top1(answers_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Share of images whose answer (class index) is the label."""
    return float(np.mean(answers_N == labels_N))


def agreement(answers_N: np.ndarray, others_N: np.ndarray) -> float:
    """Share of images that two models give the same answer to."""
    return float(np.mean(answers_N == others_N))


def mean_kl(reference_NK: np.ndarray, target_NK: np.ndarray) -> float:
    """Mean over images of KL(softmax(reference) ‖ softmax(target)), in nats."""
    reference, target = _log_softmax(reference_NK), _log_softmax(target_NK)
    return float(np.mean(np.sum(np.exp(reference) * (reference - target), axis=1)))


def sqnr_db(reference: np.ndarray, target: np.ndarray) -> float:
    """Signal to quantization noise ratio, 10·log10(Σ reference² / Σ (reference − target)²), in decibels."""
    signal = float(np.sum(np.square(reference, dtype=np.float64)))
    noise = float(np.sum(np.square(np.subtract(reference, target, dtype=np.float64))))
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def logit_error(reference_NK: np.ndarray, target_NK: np.ndarray) -> float:
    """Largest absolute difference of any logit, in standard deviations of the reference's logits.

    The largest, since a wrong export may be wrong on a few images only. The standard deviation is taken over the
    classes of each image (root mean square over images): what all classes of an image share decides nothing.
    Infinite when the target holds a NaN or an infinity.
    """
    if not np.isfinite(target_NK).all():
        return math.inf
    spread = math.sqrt(float(np.mean(np.var(reference_NK, axis=1, dtype=np.float64))))
    worst = float(np.max(np.abs(np.subtract(reference_NK, target_NK, dtype=np.float64))))
    return 0.0 if worst == 0 else math.inf if spread == 0 else worst / spread


class Percentiles(TypedDict):
    """Milliseconds of a query, over n of them."""

    p50: float
    p90: float
    p99: float
    n: int


def percentiles(latencies_ms: Sequence[float] | np.ndarray) -> Percentiles:
    """Of measured latencies."""
    p50, p90, p99 = np.percentile(latencies_ms, (50, 90, 99))
    return Percentiles(p50=float(p50), p90=float(p90), p99=float(p99), n=len(latencies_ms))


@dataclass(frozen=True)
class PairedDrop:
    """Two models on the same n images: lost = only the reference right, won = only the target right."""

    n: int
    lost: int
    won: int

    @property
    def points(self) -> float:
        """Top-1 of the reference minus that of the target, in percentage points."""
        return 100 * (self.lost - self.won) / self.n

    @property
    def lower95(self) -> float:
        """The drop is at least this, with 95 % confidence (one-sided), in percentage points."""
        return 100 * tango_bound(self.lost, self.won, self.n, Z95_ONE_SIDED)

    @property
    def upper95(self) -> float:
        """The drop is at most this, with 95 % confidence (one-sided), in percentage points."""
        return -100 * tango_bound(self.won, self.lost, self.n, Z95_ONE_SIDED)

    @property
    def discordance(self) -> float:
        """Share of images that exactly one of the two gets right."""
        return (self.lost + self.won) / self.n


def paired_drop(reference_right_N: np.ndarray, target_right_N: np.ndarray) -> PairedDrop:
    """The drop between two models from boolean "was right" arrays over the same images."""
    assert reference_right_N.shape == target_right_N.shape
    lost = int(np.sum(reference_right_N & ~target_right_N))
    won = int(np.sum(~reference_right_N & target_right_N))
    return PairedDrop(len(reference_right_N), lost, won)


def tango_bound(b: int, c: int, n: int, z: float) -> float:
    """Lower bound of Tango's score interval for a difference of paired proportions, (b − c)/n; a fraction in [−1, 1].

    b, c: discordant counts out of n; z: quantile of the normal distribution. The upper bound is −tango_bound(c, b, n, z).
    The bound is the difference Δ at which the score statistic equals z (Tango, Statistics in Medicine 17, 1998, eq. 21).
    """
    estimate = (b - c) / n

    def excess(delta: float) -> float:
        return _score(b, c, n, delta) - z

    return -1.0 if excess(-1 + 1e-12) <= 0 else _falling_root(excess, -1 + 1e-12, estimate)


def _score(b: int, c: int, n: int, delta: float) -> float:
    """Score statistic of "the true difference is delta"; falls as delta grows."""
    linear = -b - c + (2 * n - b + c) * delta
    constant = -c * delta * (1 - delta)
    p21 = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * p21 + delta * (1 - delta))
    difference = b - c - n * delta
    return difference / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, difference)


def _falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero between low and high, to the last bit that matters."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def images_needed(discordance: float, margin_points: float, *, drop_points: float = 0.0) -> int | None:
    """Images that decide a margin with one-sided 95 % confidence and 80 % power.

    discordance: share of images that exactly one model gets right; drop_points: the true drop. Null when no number
    decides, because the drop equals the margin. Normal approximation: n = (z₉₅ + z₈₀)²·var / (margin − drop)²,
    and at least what Tango's interval asks for when no image differs at all: z₉₅²·(1 − margin)/margin.
    """
    margin, drop = margin_points / 100, drop_points / 100
    if math.isclose(margin, drop, abs_tol=1e-9):
        return None
    variance = max(discordance - drop * drop, 0.0)
    by_power = (Z95_ONE_SIDED + Z80_POWER) ** 2 * variance / (margin - drop) ** 2
    by_interval = Z95_ONE_SIDED**2 * (1 - margin) / margin if margin > 0 else 0.0
    return math.ceil(max(by_power, by_interval))


def chance_of_at_least(count: int, n: int, rate: float) -> float:
    """P(X ≥ count) of a binomial X with n trials at `rate`."""
    below = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
             + k * math.log(rate) + (n - k) * math.log1p(-rate) for k in range(count))  # fmt: skip
    return max(0.0, 1 - math.fsum(math.exp(logarithm) for logarithm in below))


def _log_softmax(logits_NK: np.ndarray) -> np.ndarray:
    shifted = logits_NK.astype(np.float64) - logits_NK.max(axis=1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
