from collections.abc import Mapping

import numpy as np
import pytest

from vit_edge import latency
from vit_edge.recipe import Limits
from vit_edge.report.schema import Artefact, Latency, Offline
from vit_edge.runtimes.clock import Stream

N = 800


def stream(p50_ms: float, spread: float = 0.01, seed: int = 0) -> Stream:
    """Latencies around a median, with a tail above it as clocks see it."""
    rng = np.random.default_rng(seed)
    return Stream(p50_ms * (1 + np.abs(rng.normal(0, spread, N)) - 0.67 * spread), 20, True)


def artefact(name: str, timed: Stream, span_ms: tuple[float, float]) -> Artefact:
    return Artefact(
        name=name, precision=name, load_ms=1.0, first_ms=1.0, size_bytes=10, memory_bytes=None,
        offline=Offline(images_per_second=100.0, noise=0.01, batch=1, streams=1), **latency.statistics(timed, span_ms),
    )  # fmt: skip


def found(
    streams: Mapping[str, Stream], sound: tuple[str, ...] = ("f32", "bf16"), reference_p50: float = 4.0
) -> Latency:
    span_ms = latency.span_ms(streams)
    artefacts = [artefact(name, timed, span_ms) for name, timed in streams.items()]
    reference = {"p50": reference_p50, "p90": 4.0, "p99": 4.0, "n": 9}
    return latency.measured(
        artefacts, streams, sound, reference, batch=1, elsewhere=0.0, peak_memory_bytes=None,  # type: ignore[arg-type]
    )  # fmt: skip


def steady(int8_ms: float = 2.0) -> dict[str, Stream]:
    return {"int8": stream(int8_ms), "f32": stream(6.0, seed=1), "bf16": stream(3.0, seed=2)}


def test_int8_is_compared_with_the_best_float_that_is_right() -> None:
    best = found(steady())
    assert best.float_precision == "bf16"
    assert best.speedup_vs_float == pytest.approx(1.5, rel=0.01)
    assert best.speedup_vs_f32 == pytest.approx(3.0, rel=0.01)
    assert best.ratio_vs_reference == pytest.approx(0.5, rel=0.01)
    assert found(steady(), sound=("f32",)).float_precision == "f32"


@pytest.mark.parametrize(("int8_ms", "recommended"), [(4.0, "float"), (2.95, "float"), (2.8, "int8")])
def test_int8_that_is_hardly_faster_than_float_is_a_recommendation_and_no_failure(
    int8_ms: float, recommended: str
) -> None:
    slow = found(steady(int8_ms=int8_ms))
    check = latency.check(slow, Limits())
    assert (slow.recommended, check.verdict) == (recommended, "pass")
    assert ("int8 is not 1.05 times as fast here: ship the float artefact in bf16" in check.detail) == (
        recommended == "float"
    )
    assert "no limit is set" in check.detail


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"min_speedup": 1.6}, "fail"),
        ({"min_speedup": 1.4}, "pass"),
        ({"max_p90_ms": 1.9}, "fail"),
        ({"max_p90_ms": 2.2}, "pass"),
        ({"max_vs_reference": 0.4}, "fail"),
        ({"max_vs_reference": 0.6}, "pass"),
        ({"max_vs_reference": 0.6, "min_speedup": 1.6}, "fail"),
    ],
)
def test_a_limit_decides_where_the_noise_is_small(limits: dict[str, float], verdict: str) -> None:
    check = latency.check(found(steady()), Limits(**limits))  # type: ignore[arg-type]
    assert check.verdict == verdict
    assert any(f"{name} is {limit:g}" in check.detail for name, limit in limits.items())


def test_noise_beyond_the_margin_leaves_it_undecided() -> None:
    noisy = steady()
    swaying = 2.0 * (1 + 0.3 * np.sin(np.arange(N) / 60))
    noisy["int8"] = Stream(swaying, 20, True)
    for limits in (Limits(max_p90_ms=2.55), Limits(min_speedup=1.5)):
        check = latency.check(found(noisy), limits)
        assert check.verdict == "undecided"
        assert "too noisy to decide" in check.detail
    assert latency.check(found(noisy), Limits(max_p90_ms=20)).verdict == "pass"
    assert latency.check(found(noisy), Limits()).verdict == "pass", "without a limit noise decides nothing"


def test_a_limit_that_nothing_was_measured_for_is_unmeasured() -> None:
    assert latency.check(found(steady(), sound=()), Limits(min_speedup=1.0)).verdict == "unmeasured"


def test_drift_is_told_and_counts_as_noise() -> None:
    warming = steady()
    warming["int8"] = Stream(np.linspace(2, 3, N), 20, False)
    hot = found(warming)
    assert hot.artefacts[0].drift == pytest.approx(0.35, abs=0.02)
    detail = latency.check(hot, Limits()).detail
    assert "int8 became 35% slower while it was timed" in detail
    assert "int8 was not steady after 20 runs" in detail
    assert latency.check(hot, Limits(max_vs_reference=0.6)).verdict == "undecided"


def test_a_neighbour_is_what_slows_everything_at_once() -> None:
    quiet, busy = steady(), steady()
    slow_N = np.where(np.arange(N) % 80 < 24, 2.0, 1.0)
    for name, one in busy.items():
        busy[name] = Stream(one.latencies_ms * slow_N, 20, True)
    assert latency.disturbed(quiet) == 0
    assert latency.disturbed(busy) == pytest.approx(0.3)
    assert latency.disturbed({**quiet, "int8": busy["int8"]}) == 0, "int8 alone is its own doing"
    assert "in 30% of the rounds everything was slow at once" in latency.check(found(busy), Limits()).detail
    assert found(busy).speedup_noise == pytest.approx(found(quiet).speedup_noise, abs=0.01)


def test_histograms_share_one_scale_and_hold_all_but_the_tail() -> None:
    timed = found(steady())
    for one in timed.artefacts:
        assert len(one.histogram) == latency.BINS
        assert 0.98 * N <= sum(one.histogram) <= N
    step_ms = (timed.high_ms - timed.low_ms) / latency.BINS
    fullest_ms = timed.low_ms + step_ms * (np.argmax(timed.artefacts[0].histogram) + 0.5)
    assert fullest_ms == pytest.approx(2.0, abs=step_ms)


def test_equal_latencies_have_a_histogram_too() -> None:
    same = Stream(np.full(N, 2.0), 20, True)
    assert sum(found({"int8": same, "f32": same}).artefacts[0].histogram) == N


def test_noise_holds_what_no_single_gate_sees() -> None:
    same = Stream(np.full(N, 2.0), 20, True)
    still = found({"int8": same, "f32": same})
    assert still.speedup_noise == still.artefacts[0].noise == still.artefacts[0].p90_noise == latency.RESTART
    assert latency.check(still, Limits(min_speedup=1.0)).verdict == "undecided"
