import numpy as np
import pytest

from vit_edge import gate
from vit_edge.recipe import Limits
from vit_edge.report.schema import Artefact, Check
from vit_edge.runtimes.base import UNKNOWN, Coverage, Product

CLASSES = ["cat", "dog"]


def answers(right: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and logits that are right on the first `right` of n images."""
    labels_N = np.arange(n) % 2
    answers_N = np.where(np.arange(n) < right, labels_N, 1 - labels_N)
    return labels_N, np.eye(2, dtype=np.float32)[answers_N]


def accuracy_check(n: int, reference_right: int, target_right: int, limits: Limits) -> Check:
    labels_N, reference_NK = answers(reference_right, n)
    _, target_NK = answers(target_right, n)
    return gate.check_accuracy(gate.accuracy(labels_N, reference_NK, target_NK, CLASSES, limits), limits)


@pytest.mark.parametrize(
    ("n", "target_right", "verdict"),
    [
        (10_000, 8_990, "pass"),  # a drop of 0.1
        (10_000, 8_700, "fail"),  # a drop of 3
        (10_000, 8_910, "undecided"),  # a drop of 0.9, margin 0.9
        (200, 180, "undecided"),  # no drop, too few images
    ],
)
def test_accuracy_is_decided_by_the_bounds_of_the_drop(n: int, target_right: int, verdict: str) -> None:
    assert accuracy_check(n, n * 9 // 10, target_right, Limits()).verdict == verdict


def test_undecided_accuracy_says_how_many_images_would_decide() -> None:
    labels_N, reference_NK = answers(180, 200)
    _, target_NK = answers(179, 200)
    found = gate.accuracy(labels_N, reference_NK, target_NK, CLASSES, Limits())
    assert found.images_needed is not None
    assert found.images_needed > 200
    assert f"about {found.images_needed} images" in gate.check_accuracy(found, Limits()).detail


@pytest.mark.parametrize("verdict", ["fail", "pass"])
def test_undecided_counts_as_the_limits_say(verdict: str) -> None:
    assert accuracy_check(200, 180, 180, Limits(undecided=verdict)).verdict == verdict  # type: ignore[arg-type]


def test_the_tighter_of_drop_and_relative_top1_is_the_margin() -> None:
    labels_N, logits_NK = answers(600, 1000)
    relative = gate.accuracy(labels_N, logits_NK, logits_NK, CLASSES, Limits(min_relative_top1=0.99))
    absolute = gate.accuracy(labels_N, logits_NK, logits_NK, CLASSES, Limits(max_drop_points=0.5))
    assert (relative.margin_points, absolute.margin_points) == (pytest.approx(0.6), 0.5)


def test_without_limits_accuracy_is_told_and_not_judged() -> None:
    assert accuracy_check(200, 180, 0, Limits(max_drop_points=None, min_relative_top1=None)).verdict == "skipped"


def test_an_image_without_finite_logits_counts_as_wrong() -> None:
    labels_N, reference_NK = answers(100, 100)
    found = gate.accuracy(labels_N, reference_NK, np.full_like(reference_NK, np.nan), CLASSES, Limits())
    assert (found.target_top1, found.agreement, found.mean_kl) == (0, 0, None)
    assert gate.check_accuracy(found, Limits()).verdict == "fail"


def test_the_classes_that_lost_most_are_named() -> None:
    labels_N = np.array([0, 0, 1, 1])
    reference_NK = np.eye(2)[labels_N]
    target_NK = np.eye(2)[[0, 0, 1, 0]]
    [worst] = gate.accuracy(labels_N, reference_NK, target_NK, CLASSES, Limits()).worst_classes
    assert (worst.name, worst.reference_top1, worst.target_top1) == ("dog", 1.0, 0.5)


def check(name: str, verdict: str) -> Check:
    return Check.model_validate({"name": name, "verdict": verdict, "detail": ""})


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("pass", "pass", "skipped"), ("pass", None)),
        (("pass", "undecided", "fail"), ("fail", "accuracy")),
        (("fail", "pass", "fail"), ("fail", "parity")),
        (("unmeasured", "undecided", "pass"), ("unmeasured", "parity")),
        (("pass", "undecided", "pass"), ("undecided", "coverage")),
    ],
)
def test_the_worst_check_is_the_verdict_and_the_first_such_is_blamed(
    verdicts: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    checks = [check(name, verdict) for name, verdict in zip(("parity", "coverage", "accuracy"), verdicts, strict=True)]
    assert gate.overall(checks) == expected


def test_f32_parity_fails_on_one_wrong_image() -> None:
    reference_NK = np.random.default_rng(0).normal(size=(100, 10)).astype(np.float32)
    labels_N = reference_NK.argmax(1)
    wrong_NK = reference_NK.copy()
    wrong_NK[7, 3] += 0.01
    assert gate.float_parity("f32", labels_N, reference_NK, reference_NK + 1e-5).holds
    assert not gate.float_parity("f32", labels_N, reference_NK, wrong_NK).holds


def test_low_precision_parity_is_about_answers() -> None:
    reference_NK = np.eye(10, dtype=np.float32)[np.arange(400) % 10]
    labels_N = reference_NK.argmax(1)

    def holds(differing: int) -> bool:
        target_NK = reference_NK.copy()
        target_NK[:differing] = np.roll(target_NK[:differing], 1, axis=1)
        return gate.float_parity("bf16", labels_N, reference_NK, target_NK).holds

    assert [holds(0), holds(4), holds(20)] == [True, True, False]


def test_logits_that_are_not_finite_fail_parity_in_any_precision() -> None:
    reference_NK = np.eye(4, dtype=np.float32)
    found = gate.float_parity("fp16", np.arange(4), reference_NK, np.full_like(reference_NK, np.inf))
    assert not found.holds
    assert found.logit_error is None


def products(*named: tuple[str, str]) -> Coverage:
    return Coverage(tuple(Product((name,), "MatMul", precision, 10) for name, precision in named))


def test_coverage_names_what_runs_in_float_against_expectation() -> None:
    expected = ["qkv", "proj"]
    coverage = products(("qkv/Fused", "int8"), ("proj", "f32"), ("attention", "f32"))
    report = gate.covered(coverage, expected)
    found = gate.check_coverage(report, expected)
    assert (report.int8, report.floats, report.missing, report.float_nodes) == (1, 2, ["proj"], ["proj", "attention"])
    assert found.verdict == "fail"
    assert "proj" in found.detail


def test_coverage_compares_counts_where_the_runtime_renamed_everything() -> None:
    expected = ["a", "b"]
    for ran, verdict in (("int8", "pass"), ("f32", "fail")):
        coverage = products(("x1", "int8"), ("x2", ran))
        assert gate.check_coverage(gate.covered(coverage, expected), expected).verdict == verdict


def test_coverage_that_the_runtime_does_not_tell_is_unmeasured() -> None:
    expected = ["a"]
    report = gate.covered(products(("a", UNKNOWN)), expected)
    assert gate.check_coverage(report, expected).verdict == "unmeasured"


def test_coverage_without_expectation_is_skipped_in_words() -> None:
    found = gate.check_coverage(gate.covered(products(("a", "int8")), None), None)
    assert found.verdict == "skipped"
    assert "does not say which must" in found.detail


def artefact(name: str, precision: str, p50: float) -> Artefact:
    ms = {"p50": p50, "p90": 2 * p50, "p99": 3 * p50, "n": 100}
    return Artefact(name=name, precision=precision, ms=ms, load_ms=1.0, size_bytes=10)  # type: ignore[arg-type]


def latency(int8_p50: float = 2.0, sound: tuple[str, ...] = ("f32", "bf16")) -> gate.Latency:
    timed = [artefact("int8", "bf16", int8_p50), artefact("f32", "f32", 6.0), artefact("bf16", "bf16", 3.0)]
    reference = {"p50": 4.0, "p90": 4.0, "p99": 4.0, "n": 9}
    return gate.latency(timed, sound, reference, batch=1, peak_memory_bytes=None)  # type: ignore[arg-type]


def test_int8_is_compared_with_the_best_float_that_is_right() -> None:
    best = latency()
    assert (best.float_precision, best.speedup_vs_float, best.speedup_vs_f32, best.ratio_vs_reference) == (
        "bf16",
        1.5,
        3.0,
        0.5,
    )
    assert latency(sound=("f32",)).float_precision == "f32"


def test_slower_than_float_is_a_recommendation_and_no_failure() -> None:
    found = latency(int8_p50=4.0)
    assert found.recommended == "float"
    assert gate.check_latency(found, Limits()).verdict == "pass"
    assert "ship the float artefact" in gate.check_latency(found, Limits()).detail


@pytest.mark.parametrize(
    "limits",
    [{"min_speedup": 1.6}, {"max_p90_ms": 3.9}, {"max_vs_reference": 0.4}],
    ids=lambda given: next(iter(given)),
)
def test_latency_fails_under_a_limit_alone(limits: dict[str, float]) -> None:
    found = gate.check_latency(latency(), Limits(**limits))  # type: ignore[arg-type]
    assert found.verdict == "fail"
    assert next(iter(limits)) in found.detail


def test_a_limit_that_nothing_was_measured_for_is_unmeasured() -> None:
    assert gate.check_latency(latency(sound=()), Limits(min_speedup=1.0)).verdict == "unmeasured"


def test_every_limit_says_who_set_it() -> None:
    held = gate.HeldLimits(
        [("bundle", {"max_drop_points": 2.0}), ("recipe", {"min_speedup": 1.1}), ("command line", {"min_speedup": 1.2})]
    )
    assert {one.name: (one.value, one.origin) for one in held.listed()} == {
        "max_drop_points": (2.0, "bundle"),
        "min_relative_top1": (0.99, "default"),
        "min_speedup": (1.2, "command line"),
    }


def test_a_limit_can_be_lifted_by_a_later_layer() -> None:
    lifted = gate.HeldLimits([("recipe", gate.changed(Limits(min_relative_top1=None)))])
    assert lifted.values.min_relative_top1 is None
    assert lifted.origins["min_relative_top1"] == "recipe"
