"""Latency of a target: what the clock measured in numbers, and held against the limits.

N queries in order. Ratios are of p50s; a noise is half the width of a 95 % interval, as a share of the value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_edge import metrics
from vit_edge.recipe import Limits
from vit_edge.report.schema import Artefact, Check, Latency
from vit_edge.runtimes.clock import TIMED, Stream

# What no single gate sees: from one process to the next, latencies move by so much (95 %), with the cores and the
# addresses that each is given. Ten gates of one bundle had speed-ups of 1.16 to 1.20, and told of 0.2 to 1.5 % each.
RESTART = 0.02
BINS, FAR = 40, 3.0
# int8 costs some accuracy: it is recommended from this speed-up over the best float on.
WORTH = 1.05
# A round is disturbed when each artefact's mean is so many times its p50; a tenth of such rounds is told.
SLOW, DISTURBED = 1.25, 0.1
# Drift, and other programs' share of the processors, beyond which they are told.
DRIFTED, BUSY = 0.1, 0.1


def span_ms(streams: Mapping[str, Stream]) -> tuple[float, float]:
    """One range for the histograms of all artefacts: from the least to the largest p99, but not far beyond a p50."""
    low = min(float(np.min(one.latencies_ms)) for one in streams.values())
    high = max(
        min(float(np.percentile(one.latencies_ms, 99)), FAR * _p50(one.latencies_ms)) for one in streams.values()
    )
    return low, high if high > low else low + 1.0


def statistics(stream: Stream, span: tuple[float, float]) -> dict[str, Any]:
    """An artefact's fields that come from its single stream."""
    latencies_ms = stream.latencies_ms
    quarters = np.array_split(latencies_ms, 4)
    return {
        "ms": metrics.percentiles(latencies_ms),
        "noise": _noise(latencies_ms, _p50),
        "p90_noise": _noise(latencies_ms, _p90),
        "drift": _p50(quarters[-1]) / _p50(quarters[0]) - 1,
        "histogram": np.histogram(latencies_ms, BINS, span)[0].tolist(),
        "warmup": stream.warmup,
        "steady": stream.steady,
    }


def disturbed(streams: Mapping[str, Stream]) -> float:
    """Share of the rounds in which all artefacts were slow at once, which is the machine's doing and not theirs."""
    slow = [_means(one.latencies_ms) > SLOW * _p50(one.latencies_ms) for one in streams.values()]
    return float(np.mean(np.all(slow, axis=0)))


def measured(
    artefacts: Sequence[Artefact], streams: Mapping[str, Stream], sound: Sequence[str],
    reference_ms: metrics.Percentiles | None, *, batch: int, elsewhere: float, peak_memory_bytes: int | None,
) -> Latency:  # fmt: skip
    """int8 (the artefact of that name) against the fastest float artefact whose parity holds (`sound`: their names).

    reference_ms is at batch 1 and is compared at batch 1 alone.
    """
    int8 = next(one for one in artefacts if one.name == "int8")
    floats = [one for one in artefacts if one.name in sound]
    best = min(floats, key=lambda one: one.ms["p50"], default=None)
    f32 = next((one for one in floats if one.precision == "f32"), None)
    speedup = _speedup(best, int8)
    low_ms, high_ms = span_ms(streams)
    return Latency(
        target_ms=int8.ms,
        float_ms=best.ms if best else None,
        float_precision=best.precision if best else None,
        reference_ms=reference_ms,
        speedup_vs_float=speedup,
        speedup_noise=_noise_of_ratio(streams[best.name], streams["int8"]) if best else None,
        speedup_vs_f32=_speedup(f32, int8),
        ratio_vs_reference=int8.ms["p50"] / reference_ms["p50"] if reference_ms and batch == 1 else None,
        recommended=None if speedup is None else "int8" if speedup >= WORTH else "float",
        batch=batch,
        low_ms=low_ms,
        high_ms=high_ms,
        disturbed=disturbed(streams),
        elsewhere=elsewhere,
        peak_memory_bytes=peak_memory_bytes,
        artefacts=list(artefacts),
    )


def check(found: Latency, limits: Limits) -> Check:
    """Slower than float is told; it fails only under a limit. A limit on what was not measured stays unmeasured.

    With noise, what was found is an interval: kept when all of it is within the limit, broken when all is beyond.
    """
    held = _held(found, limits)
    told = "; ".join([_told(found), _told_offline(found), *_told_conditions(found)])
    if not held:
        return Check(name="latency", verdict="pass", detail=f"{told}; no limit is set")
    verdicts = [verdict for verdict, _ in held]
    worst = next((kind for kind in ("fail", "unmeasured", "undecided") if kind in verdicts), "pass")
    reasons = "; ".join(reason for verdict, reason in held if verdict == worst)
    return Check.model_validate({"name": "latency", "verdict": worst, "detail": f"{reasons}; {told}"})


def _held(found: Latency, limits: Limits) -> list[tuple[str, str]]:
    """Verdict and reason of each limit that is set."""
    int8 = next(one for one in found.artefacts if one.name == "int8")
    values: dict[str, tuple[float | None, float | None]] = {
        "min_speedup": (found.speedup_vs_float, found.speedup_noise),
        "max_p90_ms": (int8.ms["p90"], int8.p90_noise),
        "max_vs_reference": (found.ratio_vs_reference, int8.noise),
    }
    held = []
    for name, (value, noise) in values.items():
        limit = getattr(limits, name)
        if limit is None:
            continue
        if value is None or noise is None:
            held.append(("unmeasured", f"nothing to hold {name} against"))
            continue
        ends = value / (1 + noise), value * (1 + noise)
        kept = [end >= limit if name == "min_speedup" else end <= limit for end in ends]
        verdict = "pass" if all(kept) else "undecided" if any(kept) else "fail"
        unsure = (
            ", too noisy to decide: leave the machine alone, or measure for longer" if any(kept) != all(kept) else ""
        )
        held.append((verdict, f"{name} is {limit:g}, found {value:.3g} ± {noise:.1%}{unsure}"))
    return held


def _told(found: Latency) -> str:
    assert found.target_ms is not None
    told = f"int8 p50 {found.target_ms['p50']:.3g} ms, p90 {found.target_ms['p90']:.3g} ms"
    if found.speedup_vs_float is None or found.float_ms is None or found.speedup_noise is None:
        told += "; no sound float artefact to compare with"
    else:
        ratio = f"{found.speedup_vs_float:.2f}× ± {found.speedup_noise:.1%}"
        told += f"; float ({found.float_precision}) p50 {found.float_ms['p50']:.3g} ms: {ratio}"
    if found.recommended == "float":
        told += f"; int8 is not {WORTH:g} times as fast here: ship the float artefact in {found.float_precision}"
    return told


def _told_offline(found: Latency) -> str:
    """int8's throughput, how it was reached, and what would allow more."""
    best = next(one for one in found.artefacts if one.name == "int8").offline
    sessions = "one session" if best.streams == 1 else f"{best.streams} sessions side by side"
    told = f"offline {best.images_per_second:.3g} images/s"
    if not best.open_batch:
        return (
            f"{told} at the file's fixed batch of {best.batch}, {sessions}: export --dynamic-batch allows larger ones"
        )
    batches = ", ".join(str(batch) for batch in sorted({way.batch for way in best.tried}))
    return f"{told} at batch {best.batch}, {sessions}, the best of {batches}"


def _told_conditions(found: Latency) -> list[str]:
    """What made the measurement worse than it could be."""
    told = [
        f"{one.name} became {abs(one.drift):.0%} {'slower' if one.drift > 0 else 'faster'} while it was timed"
        for one in found.artefacts if abs(one.drift) > DRIFTED
    ]  # fmt: skip
    told += [f"{one.name} was not steady after {one.warmup} runs" for one in found.artefacts if not one.steady]
    if found.disturbed > DISTURBED:
        told.append(
            f"in {found.disturbed:.0%} of the rounds everything was slow at once: something disturbed the machine"
        )
    if found.elsewhere > BUSY:
        told.append(f"other programs took {found.elsewhere:.0%} of the processors meanwhile")
    return told


def _p50(latencies_ms: np.ndarray) -> float:
    return float(np.median(latencies_ms))


def _p90(latencies_ms: np.ndarray) -> float:
    return float(np.percentile(latencies_ms, 90))


def _noise(samples_N: np.ndarray, statistic: Callable[[np.ndarray], float]) -> float:
    return math.hypot(metrics.noise(samples_N, statistic), RESTART)


def _means(latencies_ms: np.ndarray) -> np.ndarray:
    """Of each turn."""
    turns = np.array_split(latencies_ms, max(1, len(latencies_ms) // TIMED))
    return np.asarray([np.mean(turn) for turn in turns])


def _speedup(float_artefact: Artefact | None, int8: Artefact) -> float | None:
    return float_artefact.ms["p50"] / int8.ms["p50"] if float_artefact else None


def _noise_of_ratio(above: Stream, below: Stream) -> float:
    """Of the ratio of two p50s that were measured in turns: what slowed both alike does not count."""
    pairs_N2 = np.stack([above.latencies_ms, below.latencies_ms], axis=1)
    return _noise(pairs_N2, lambda block: _p50(block[:, 0]) / _p50(block[:, 1]))
