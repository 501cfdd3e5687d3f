"""A gate against an earlier gate: accuracy paired by the images' names, latency as a ratio with its noise.

The earlier gate's answers are in its JSON. N images that both gates answered; drops in percentage points, positive when
the new bundle is worse.
"""

import base64
import binascii
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import metrics
from vit_edge.errors import UserError
from vit_edge.evaluation import Evaluation
from vit_edge.recipe import Limits
from vit_edge.report import reading
from vit_edge.report.schema import Answers, Check, Latency, Regression, Report

# What must be equal for two latencies to be compared, by where it stands in a report.
SAME = (
    ("device", "processor"),
    ("runtime", "name"),
    ("runtime", "device"),
    ("runtime", "threads"),
    ("runtime", "batch"),
)


def packed(names: list[str], answers_N: np.ndarray, classes: list[str]) -> Answers:
    """A gate's answers for its report: class indices (N,), -1 for none."""
    return Answers(
        classes=classes,
        names=_packed("\n".join(names).encode()),
        int8=_packed(answers_N.astype("<i4").tobytes()),
    )


@dataclass(frozen=True)
class Baseline:
    """An earlier gate on images that this one has too. rows_N: where they stand in this evaluation; answers_N: the old ones."""

    report: Report
    rows_N: np.ndarray
    answers_N: np.ndarray


def read(path: Path, images: Evaluation) -> Baseline:
    """The earlier gate's report in `path`; UserError unless it answered images of this evaluation, of the same classes."""
    report = reading.report(path)
    if report.answers is None:
        raise UserError(f"{path} holds no answers: that gate could not run its bundle", reading.GATE_AGAIN)
    if report.answers.classes != images.manifest.classes:
        raise UserError(
            f"{path} is of other classes ({len(report.answers.classes)}) than this bundle ({len(images.manifest.classes)})",
            "give the report of a gate on the same data",
        )
    old = _unpacked(report.answers, path)
    rows = [row for row, name in enumerate(images.names) if name in old]
    if not rows:
        raise UserError(
            f"{path} is of other images: none has the name of one here", "give the report of a gate on the same data"
        )
    return Baseline(report, np.asarray(rows), np.asarray([old[images.names[row]] for row in rows]))


def measured(
    baseline: Baseline, labels_N: np.ndarray, answers_N: np.ndarray, latency: Latency, device: dict[str, Any],
    runtime: dict[str, Any], limits: Limits,
) -> Regression:  # fmt: skip
    """labels_N, answers_N: of this gate's whole evaluation."""
    labels, new, old = labels_N[baseline.rows_N], answers_N[baseline.rows_N], baseline.answers_N
    drop = metrics.paired_drop(old == labels, new == labels)
    report = baseline.report
    differing = _differing({"device": device, "runtime": runtime}, report)
    before = report.latency
    comparable = differing is None and before is not None
    return Regression(
        bundle_sha256=report.bundle_sha256,
        n=drop.n,
        baseline_top1=metrics.top1(old, labels),
        top1=metrics.top1(new, labels),
        drop_points=drop.points,
        drop_lower95_one_sided=drop.lower95,
        drop_upper95_one_sided=drop.upper95,
        lost=drop.lost,
        won=drop.won,
        margin_points=limits.max_drop_points,
        other_device=differing,
        p50_ratio=_ratio(latency, before, "int8") if comparable else None,
        p50_noise=_noise(latency, before) if comparable else None,
        float_p50_ratio=_ratio(latency, before, "f32") if comparable else None,
        runtime_was=str(report.runtime.get("version")),
    )


def check(found: Regression, limits: Limits) -> Check:
    """Fails when the drop or the slowdown against the earlier gate is beyond its limit, with 95 % confidence."""
    verdicts, told = zip(_accuracy(found), _latency(found, limits.max_slowdown), strict=True)
    worst = next((kind for kind in ("fail", "unmeasured", "undecided") if kind in verdicts), "pass")
    detail = f"against bundle {found.bundle_sha256[:12]} on {found.n} images: {'; '.join(told)}"
    return Check.model_validate({"name": "regression", "verdict": worst, "detail": detail})


def _accuracy(found: Regression) -> tuple[str, str]:
    told = (
        f"top-1 {found.top1:.2%}, was {found.baseline_top1:.2%}: a drop of {found.drop_points:.2f} points "
        f"(95 %: at most {found.drop_upper95_one_sided:.2f})"
    )
    margin = found.margin_points
    if margin is None:
        return "pass", f"{told}, no limit is set"
    told += f", allowed {margin:.2f} (max_drop_points)"
    if metrics.within_margin(found.lost, found.won, found.n, margin):
        return "pass", told
    if metrics.beyond_margin(found.lost, found.won, found.n, margin):
        return "fail", told
    needed = metrics.images_needed((found.lost + found.won) / found.n, margin, drop_points=found.drop_points)
    return "undecided", f"{told}, about {needed} images would decide" if needed else f"{told}, about the limit"


def _latency(found: Regression, limit: float | None) -> tuple[str, str]:
    if found.p50_ratio is None or found.p50_noise is None:
        told = f"latency is not compared, {found.other_device or 'one of the two was not timed'}"
        return ("pass" if limit is None else "unmeasured"), told
    ratio, noise = found.p50_ratio, found.p50_noise
    told = f"p50 is {ratio:.2f} × what it was, ± {noise:.0%}"
    if found.float_p50_ratio is not None:
        told += f" (float f32, which tells whether the machine changed: {found.float_p50_ratio:.2f} ×)"
    if limit is None:
        return "pass", told
    told += f", allowed {limit:g} (max_slowdown)"
    if ratio * (1 + noise) <= limit:
        return "pass", told
    return ("fail" if ratio / (1 + noise) > limit else "undecided"), told


def _differing(now: dict[str, dict[str, Any]], report: Report) -> str | None:
    """What of device, runtime, threads or batch is another than it was; null when nothing is."""
    then = {"device": report.device, "runtime": report.runtime}
    for part, key in SAME:
        if now[part].get(key) != then[part].get(key):
            return f"{part} {key} is {now[part].get(key)!r}, was {then[part].get(key)!r}"
    return None


def _ratio(latency: Latency, before: Latency | None, name: str) -> float | None:
    now, then = (
        next((a.ms["p50"] for a in one.artefacts if a.name == name), None) if one else None for one in (latency, before)
    )
    return now / then if now and then else None


def _noise(latency: Latency, before: Latency | None) -> float | None:
    noises = [a.noise for one in (latency, before) if one for a in one.artefacts if a.name == "int8"]
    return math.hypot(*noises) if len(noises) == 2 else None


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _unpacked(answers: Answers, path: Path) -> dict[str, int]:
    """Name → class index, -1 for none. Names that stand twice tell nothing and are left out."""
    try:
        names = _bounded(answers.names).decode().split("\n")
        found = np.frombuffer(_bounded(answers.int8), "<i4")
    except (ValueError, zlib.error, binascii.Error) as err:
        raise UserError(f"{path} holds answers that cannot be read: {err}", reading.GATE_AGAIN) from err
    if len(names) != len(found):
        raise UserError(f"{path} holds {len(found)} answers to {len(names)} images", reading.GATE_AGAIN)
    unique, counts = np.unique(names, return_counts=True)
    twice = set(unique[counts > 1].tolist())
    return {name: int(answer) for name, answer in zip(names, found, strict=True) if name not in twice}


def _bounded(text: str) -> bytes:
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(base64.b64decode(text, validate=True), reading.MAX_REPORT_BYTES)
    if not unpacker.eof:
        raise ValueError("they are cut off, or longer than any gate's")
    return content
