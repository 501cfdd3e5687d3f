"""From measurements and limits to a verdict. No file is read and nothing is measured here. (Accuracy: accuracy.py.)

N images, K classes. top1 is a fraction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_edge import metrics
from vit_edge.errors import unknown
from vit_edge.recipe import Limits
from vit_edge.report.schema import (
    Artefact,
    Check,
    CoverageReport,
    FloatParity,
    Latency,
    Limit,
    Parity,
    Verdict,
)
from vit_edge.runtimes.base import Coverage
from vit_edge.settings import parse

# Worst first: what the whole gate is when a check is this.
SEVERITY: tuple[Verdict, ...] = ("fail", "unmeasured", "undecided")

# Least share of the reference's top-1. MLPerf Inference: 99 % of the f32 reference, 99.9 % in its stricter division;
# MLPerf Mobile: 98 %. Only the limit is theirs: an MLPerf result also needs their models, data and rules.
PRESETS = {"mlperf-99": 0.99, "mlperf-99.9": 0.999, "mobile-98": 0.98}

PARITY_TOLERANCE = 1e-3
PARITY_AGREEMENT = 0.995
# p90 over p50 of every artefact beyond which something else was using the machine.
UNSTEADY = 3.0


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
    """A layer of limits for HeldLimits by its name in PRESETS."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return f"preset {name}", {"max_drop_points": None, "min_relative_top1": PRESETS[name]}


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


def latency(
    artefacts: Sequence[Artefact], sound: Sequence[str], reference_ms: metrics.Percentiles | None, *, batch: int,
    peak_memory_bytes: int | None,
) -> Latency:  # fmt: skip
    """int8 (the artefact of that name) against the fastest float artefact whose parity holds (`sound`: their names).

    reference_ms is at batch 1 and is compared at batch 1 alone.
    """
    int8 = next((one for one in artefacts if one.name == "int8"), None)
    floats = [one for one in artefacts if one.name in sound]
    best = min(floats, key=lambda one: one.ms["p50"], default=None)
    f32 = next((one for one in floats if one.precision == "f32"), None)
    speedup = _ratio(_p50(best), _p50(int8))
    return Latency(
        target_ms=int8.ms if int8 else None,
        float_ms=best.ms if best else None,
        float_precision=best.precision if best else None,
        reference_ms=reference_ms,
        speedup_vs_float=speedup,
        speedup_vs_f32=_ratio(_p50(f32), _p50(int8)),
        ratio_vs_reference=_ratio(_p50(int8), reference_ms["p50"]) if reference_ms and batch == 1 else None,
        recommended=None if speedup is None else "int8" if speedup >= 1 else "float",
        batch=batch,
        peak_memory_bytes=peak_memory_bytes,
        artefacts=list(artefacts),
    )


def check_latency(found: Latency, limits: Limits) -> Check:
    """Slower than float is told; it fails only under a limit. A limit on what was not measured stays unmeasured."""
    told = _told_latency(found)
    measured = {
        "min_speedup": found.speedup_vs_float,
        "max_p90_ms": found.target_ms["p90"] if found.target_ms else None,
        "max_vs_reference": found.ratio_vs_reference,
    }
    held = {name: limit for name in measured if (limit := getattr(limits, name)) is not None}
    broken = [
        f"{name} is {limit:g}, found {value:.3g}"
        for name, limit in held.items()
        if (value := measured[name]) is not None and (value < limit if name == "min_speedup" else value > limit)
    ]
    unknown = [name for name in held if measured[name] is None]
    if broken:
        return Check(name="latency", verdict="fail", detail=f"{'; '.join(broken)}; {told}")
    if unknown:
        return Check(
            name="latency", verdict="unmeasured", detail=f"nothing to hold {', '.join(unknown)} against; {told}"
        )
    return Check(name="latency", verdict="pass", detail=told if held else f"{told}; no limit is set")


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


def _told_latency(found: Latency) -> str:
    if found.target_ms is None:
        return "int8 was not timed"
    told = f"int8 p50 {found.target_ms['p50']:.3g} ms, p90 {found.target_ms['p90']:.3g} ms"
    if found.speedup_vs_float is None or found.float_ms is None:
        told += "; no sound float artefact to compare with"
    else:
        told += f"; float ({found.float_precision}) p50 {found.float_ms['p50']:.3g} ms: {found.speedup_vs_float:.2f}×"
    if found.recommended == "float":
        told += "; int8 is slower here: ship the float artefact"
    if all(one.ms["p90"] > UNSTEADY * one.ms["p50"] for one in found.artefacts):
        told += "; unsteady, the machine was busy: time again when it is idle"
    return told


def _p50(artefact: Artefact | None) -> float | None:
    return artefact.ms["p50"] if artefact else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
