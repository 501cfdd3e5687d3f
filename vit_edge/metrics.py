"""Accuracy, agreement and latency statistics, in numpy.

N images, K classes. top1 and agreement are fractions; drops and margins are percentage points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import TypedDict

Z95_ONE_SIDED = 1.6448536269514722
POWER, Z80_POWER = 0.8, 0.8416212335729143
# Counts move in whole images.
CONTINUITY = 0.5
MAX_IMAGES = 10**9
# Differing images below which their distribution is summed up instead of taken for a normal one.
FEW = 100
TINY = 1e-300
# Blocks of measurements in order, and the two-sided 95 % quantile of Student's t for so many.
BLOCKS, LEAST_IN_BLOCK = 10, 8
T975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}

# One gate's count of images, or an array of many gates'.
Count = float | np.ndarray


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


def noise(samples_N: np.ndarray, statistic: Callable[[np.ndarray], float]) -> float:
    """Half the width of a 95 % interval of a statistic of measurements in order, as a share of it.

    From its values in consecutive blocks (the method of batch means), since what disturbs a query disturbs those after
    it too, and what drifts over the blocks counts. 1, which is to say unknown, where there is but one block.
    samples_N: measurements along the first axis, of one thing or, in rows, of several at the same time.
    """
    count = min(BLOCKS, len(samples_N) // LEAST_IN_BLOCK)
    if count < 2:
        return 1.0
    values = [statistic(block) for block in np.array_split(samples_N, count)]
    return T975[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values)) / abs(statistic(samples_N))


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
        return 100 * lower_bound(self.lost, self.won, self.n)

    @property
    def upper95(self) -> float:
        """The drop is at most this, with 95 % confidence (one-sided), in percentage points."""
        return -100 * lower_bound(self.won, self.lost, self.n)

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


def within_margin(lost: Count, won: Count, n: int, margin_points: float) -> Any:
    """Whether the drop is at most the margin, with 95 % confidence (one-sided). Counts or arrays of counts."""
    return beyond_margin(won, lost, n, -margin_points)


def beyond_margin(lost: Count, won: Count, n: int, margin_points: float) -> Any:
    """Whether the drop is more than the margin, with 95 % confidence (one-sided). Counts or arrays of counts."""
    return _excess(np.asarray(lost, np.float64), np.asarray(won, np.float64), n, margin_points / 100) > 0


def lower_bound(lost: int, won: int, n: int) -> float:
    """The drop is at least this, with 95 % confidence (one-sided): where `beyond_margin` changes. A fraction in [−1, 1]."""
    low, high = -1.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(lost, won, n, middle) > 0 else (low, middle)
    return low


def _excess(lost: Count, won: Count, n: int, drop: float) -> Any:
    """Above zero where the counts speak against a true drop of at most `drop` (a fraction), with 95 % confidence.

    Tango's score for paired proportions (Statistics in Medicine 17, 1998), with the correction for skewness of Gart and
    Nam as Laud has it (Pharmaceutical Statistics 16, 2017) and half an image of continuity. Without the two, few
    differing images decide wrongly in up to 9 % of the cases (benchmarks/gate_simulation.py).
    """
    deviation, skew = null_moments(lost, won, n, drop)
    distance = lost - won - n * drop - CONTINUITY - skew * (Z95_ONE_SIDED**2 - 1) / 6
    return distance - Z95_ONE_SIDED * deviation


def null_moments(lost: Count, won: Count, n: int, drop: float) -> tuple[Any, Any]:
    """Of lost − won, were the true drop `drop` (a fraction): standard deviation, and third central moment over variance.

    The share of images won is the likeliest under that drop (Tango 1998, eq. 16 ff.).
    """
    linear = (2 * n - lost + won) * drop - lost - won
    root = np.sqrt(np.maximum(linear * linear + 8 * n * won * drop * (1 - drop), 0.0))
    won_share = np.maximum((root - linear) / (4 * n), max(0.0, -drop))
    variance = 2 * won_share + drop - drop * drop
    third = drop - 3 * drop * (2 * won_share + drop) + 2 * drop**3
    positive = variance > 1e-15
    return np.sqrt(n * np.where(positive, variance, 0.0)), np.where(
        positive, third / np.where(positive, variance, 1.0), 0.0
    )


def images_needed(discordance: float, margin_points: float, *, drop_points: float = 0.0) -> int | None:
    """Images that decide a margin with one-sided 95 % confidence and 80 % power.

    discordance: share of images that exactly one model gets right; drop_points: the true drop. Null when no number up
    to a thousand million decides, because the drop is about the margin.
    """
    margin, drop = margin_points / 100, drop_points / 100
    discordance = max(discordance, abs(drop))
    enough = MAX_IMAGES
    if not _decides(enough, discordance, margin, drop):
        return None
    too_few = 0
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if _decides(middle, discordance, margin, drop) else (middle, enough)
    while enough * discordance < FEW and power(enough, discordance, margin_points, drop_points) < POWER:
        enough += max(1, enough // 100)
    return enough


def power(n: int, discordance: float, margin_points: float, drop_points: float) -> float:
    """Share of gates on n images that decide as the true drop asks, from the trinomial distribution of their counts.

    For few differing images: the sum has (n·discordance)² terms.
    """
    most = math.ceil(n * discordance + 7 * math.sqrt(n * discordance)) + 2
    lost, won = np.indices((most, most))
    shares = (discordance + drop_points / 100) / 2, (discordance - drop_points / 100) / 2, 1 - discordance
    lost_log, won_log, same_log = (math.log(max(share, TINY)) for share in shares)
    factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most)))])
    falling = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(n - np.arange(2 * most), TINY)))])
    logarithm = falling[lost + won] - factorial[lost] - factorial[won]
    chance = np.exp(logarithm + lost * lost_log + won * won_log + (n - lost - won) * same_log)
    decide = within_margin if drop_points < margin_points else beyond_margin
    return float(np.sum(chance[decide(lost, won, n, margin_points)]))


def images_for_share(share: float, least: float) -> int | None:
    """Images that decide whether a share is at least `least`, with one-sided 95 % confidence and 80 % power.

    Null when no number does, because the two are about equal. Normal approximation.
    """
    if abs(share - least) < 1e-5:
        return None
    spread = Z95_ONE_SIDED * math.sqrt(least * (1 - least)) + Z80_POWER * math.sqrt(share * (1 - share))
    return math.ceil((spread / (share - least)) ** 2)


def _decides(n: int, discordance: float, margin: float, drop: float) -> bool:
    """Whether counts that fall short of what is expected of n images by 80 % of their distribution still decide."""
    side = 1 if drop < margin else -1  # within the margin, or beyond it
    spread = Z80_POWER * math.sqrt(n * max(discordance - drop * drop, 0.0))
    lost, won = n * (discordance + drop) / 2 + side * spread / 2, n * (discordance - drop) / 2 - side * spread / 2
    lost, won = max(lost, 0.0), max(won, 0.0)
    found = within_margin(lost, won, n, 100 * margin) if side > 0 else beyond_margin(lost, won, n, 100 * margin)
    return bool(found)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for being many (Holm, Scandinavian Journal of Statistics 6, 1979), in the order given."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def p_of_loss(lost: int, won: int) -> float:
    """p-value of "no more is lost than won": P(X ≥ lost) of lost + won fair coins (the exact one-sided McNemar test)."""
    return chance_of_at_least(lost, lost + won, 0.5)


def chance_of_at_least(count: int, n: int, rate: float) -> float:
    """P(X ≥ count) of a binomial X with n trials at `rate`."""
    below = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
             + k * math.log(rate) + (n - k) * math.log1p(-rate) for k in range(count))  # fmt: skip
    return max(0.0, 1 - math.fsum(math.exp(logarithm) for logarithm in below))


def _log_softmax(logits_NK: np.ndarray) -> np.ndarray:
    shifted = logits_NK.astype(np.float64) - logits_NK.max(axis=1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
