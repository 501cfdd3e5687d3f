"""From measurements and limits to a verdict. No file is read and nothing is measured here.

Accuracy, latency and the comparison with an earlier gate have files of their own.

N images, K classes. top1 is a fraction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_edge import metrics
from vit_edge.errors import unknown
from vit_edge.recipe import Limits
from vit_edge.report.schema import Check, CoverageReport, FloatParity, Limit, Parity, Verdict
from vit_edge.runtimes.base import Coverage
from vit_edge.settings import parse

# Worst first: what the whole gate is when a check is this.
SEVERITY: tuple[Verdict, ...] = ("fail", "unmeasured", "undecided")

# Least share of the reference's top-1. MLPerf Inference: 99 % of the f32 reference, 99.9 % in its stricter division;
# MLPerf Mobile: 98 %. Only the limit is theirs: an MLPerf result also needs their models, data and rules.
PRESETS = {"mlperf-99": 0.99, "mlperf-99.9": 0.999, "mobile-98": 0.98}
ACCURACY_LIMITS = ("max_drop_points", "min_relative_top1", "min_agreement", "min_top1")

PARITY_TOLERANCE = 1e-3
PARITY_AGREEMENT = 0.995


class HeldLimits:
    """The limits in force, and who set each: later layers override earlier ones. UserError for a value that is none."""

    def __init__(self, layers: Sequence[tuple[str, Mapping[str, Any]]] = ()):
        values, self.origins = Limits().model_dump(), dict.fromkeys(Limits.model_fields, "default")
        for origin, given in layers:
            values |= given
            self.origins |= dict.fromkeys(given, origin)
        self.values = parse(Limits, values, "limits")

    def listed(self) -> list[Limit]:
        return [
            Limit(name=name, value=value, origin=self.origins[name])
            for name, value in self.values.model_dump().items()
            if value is not None or self.origins[name] != "default"
        ]


def changed(limits: Limits) -> dict[str, Any]:
    """What `limits` says that is not a default: a layer for HeldLimits."""
    defaults = Limits().model_dump()
    return {name: value for name, value in limits.model_dump().items() if value != defaults[name]}


def preset(name: str) -> tuple[str, dict[str, Any]]:
    """A layer for HeldLimits by its name in PRESETS: its limit on accuracy in place of every one before it."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return f"preset {name}", {**dict.fromkeys(ACCURACY_LIMITS), "min_relative_top1": PRESETS[name]}


def settled(checks: Sequence[Check], limits: Limits) -> list[Check]:
    """The checks, with what is undecided counted as the limits say."""
    counts_as = limits.undecided or "undecided"
    return [one.model_copy(update={"verdict": counts_as}) if one.verdict == "undecided" else one for one in checks]


def overall(checks: Sequence[Check]) -> tuple[Verdict, str | None]:
    """The gate's verdict, and the first check that makes it so; skipped checks do not count."""
    for verdict in SEVERITY:
        for check in checks:
            if check.verdict == verdict:
                return verdict, check.name
    return "pass", None


def float_parity(precision: str, labels_N: np.ndarray, reference_NK: np.ndarray, target_NK: np.ndarray) -> FloatParity:
    """A float artefact that runs in `precision` against the reference, on the same images.

    f32 must match within PARITY_TOLERANCE (metrics.logit_error). Lower precisions must give the same answer on
    PARITY_AGREEMENT of the images; on a sample, they fail when so many differ that chance explains it in less
    than one case of twenty.
    """
    error = metrics.logit_error(reference_NK, target_NK)
    answers_N, others_N = metrics.answers(reference_NK), metrics.answers(target_NK)
    differing, n = int(np.sum(answers_N != others_N)), len(answers_N)
    plausible = metrics.chance_of_at_least(differing, n, 1 - PARITY_AGREEMENT) >= 0.05
    holds = error <= PARITY_TOLERANCE if precision == "f32" else bool(np.isfinite(error)) and plausible
    return FloatParity(
        precision=precision,
        n=n,
        logit_error=error if np.isfinite(error) else None,
        agreement=1 - differing / n,
        top1=metrics.top1(others_N, labels_N),
        holds=holds,
    )


def check_parity(parity: Parity) -> Check:
    told = "; ".join(_told_parity(entry) for entry in parity.floats)
    holds = all(entry.holds for entry in parity.floats)
    return Check(name="parity", verdict="pass" if holds else "fail", detail=told)


def covered(coverage: Coverage, expected: Sequence[str] | None) -> CoverageReport:
    """Compares by name; where the runtime keeps none of the expected names, by count."""
    return CoverageReport(
        int8=coverage.int8,
        floats=len(coverage.floats),
        float_nodes=[product.names[0] for product in coverage.floats],
        missing=[name for name in expected or () if not _is_int8(name, coverage)] if _named(coverage, expected) else [],
        unknown=sum(not product.is_known for product in coverage.products),
        int8_share=coverage.int8_share,
    )


def check_coverage(report: CoverageReport, expected: Sequence[str] | None) -> Check:
    share = f", {report.int8_share:.0%} of the multiply-adds" if report.int8_share is not None else ""
    told = f"{report.int8} of {report.int8 + report.floats} products run in int8{share}"
    if expected is None:
        return Check(name="coverage", verdict="skipped", detail=f"{told}; the bundle does not say which must")
    if report.unknown:
        detail = f"{told}; the runtime does not tell the precision of {report.unknown}"
        return Check(name="coverage", verdict="unmeasured", detail=detail)
    if report.missing:
        names = ", ".join(report.missing[:3]) + (" …" if len(report.missing) > 3 else "")
        return Check(name="coverage", verdict="fail", detail=f"{told}; in float but expected in int8: {names}")
    if report.int8 < len(expected):
        return Check(name="coverage", verdict="fail", detail=f"{told}; expected {len(expected)} in int8")
    return Check(name="coverage", verdict="pass", detail=told)


def unmeasured(reason: str, *, regression: bool) -> list[Check]:
    """The checks that need the device, when it cannot be used. regression: whether there is a baseline to compare with."""
    names: tuple[Any, ...] = ("parity", "coverage", "accuracy", "latency", *(["regression"] if regression else []))
    return [Check(name=name, verdict="unmeasured", detail=reason) for name in names]


def _told_parity(entry: FloatParity) -> str:
    if entry.logit_error is None:
        return f"{entry.precision}: NaN or infinity in the logits"
    if entry.precision == "f32":
        sign = "within" if entry.holds else "beyond"
        return f"f32 logits differ by {entry.logit_error:.1e} standard deviations, {sign} {PARITY_TOLERANCE:g}"
    sign = "" if entry.holds else f", expected {PARITY_AGREEMENT:.1%}"
    return f"{entry.precision} gives the same answer on {entry.agreement:.2%} of {entry.n} images{sign}"


def _named(coverage: Coverage, expected: Sequence[str] | None) -> bool:
    return any(product.came_from(name) for name in expected or () for product in coverage.products)


def _is_int8(name: str, coverage: Coverage) -> bool:
    return any(product.is_int8 and product.came_from(name) for product in coverage.products)
