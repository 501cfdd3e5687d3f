import numpy as np
import pytest

from vit_edge import gate
from vit_edge.errors import UserError
from vit_edge.recipe import Limits
from vit_edge.report.schema import Check
from vit_edge.runtimes.base import UNKNOWN, Coverage, Product


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


@pytest.mark.parametrize(("counts_as", "expected"), [(None, "undecided"), ("pass", "pass"), ("fail", "fail")])
def test_what_is_undecided_counts_as_the_limits_say(counts_as: str | None, expected: str) -> None:
    checks = [check("accuracy", "undecided"), check("latency", "undecided"), check("parity", "unmeasured")]
    settled = gate.settled(checks, Limits(undecided=counts_as))  # type: ignore[arg-type]
    assert [one.verdict for one in settled] == [expected, expected, "unmeasured"]


@pytest.mark.parametrize(("name", "share"), [("mlperf-99", 0.99), ("mlperf-99.9", 0.999), ("mobile-98", 0.98)])
def test_a_preset_replaces_the_limits_on_accuracy_and_is_named(name: str, share: float) -> None:
    held = gate.HeldLimits(
        [
            ("bundle", {"max_drop_points": 0.3, "min_agreement": 0.98, "max_p90_ms": 5.0}),
            gate.preset(name),
            ("command line", {"min_top1": 0.5}),
        ]
    )
    assert {one.name: (one.value, one.origin) for one in held.listed()} == {
        "max_drop_points": (None, f"preset {name}"),
        "min_relative_top1": (share, f"preset {name}"),
        "min_agreement": (None, f"preset {name}"),
        "min_top1": (0.5, "command line"),
        "max_p90_ms": (5.0, "bundle"),
    }


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match="mlperf-99"):
        gate.preset("mlperf99")


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
