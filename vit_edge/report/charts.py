"""Where the marks of the charts stand, in per cent of their width and height. What draws them is page.html.j2."""

from collections.abc import Sequence
from dataclasses import dataclass

from vit_edge.report.quantization import Search
from vit_edge.report.schema import Accuracy, Artefact, Latency, Report


@dataclass(frozen=True)
class Point:
    """One artefact of one report by its p50 and top-1. x, y: from the left and the top; front: nothing is better in both."""

    number: int
    report: Report
    name: str
    p50_ms: float
    top1: float
    front: bool
    x: float
    y: float


@dataclass(frozen=True)
class Candidate:
    """A model of a search on one target. ratio: of its p50 to float's; number None: float itself."""

    number: int | None
    ratio: float
    drop_points: float
    holds: bool
    chosen: bool
    front: bool
    x: float
    y: float


def searched(search: Search, target: str) -> list[Candidate]:
    """Every model that was timed on the target, and float, fastest first: x for the time, y for the drop, least on top."""
    timed = [(None, 1.0, 0.0, True)] + [
        (number, 1 / one.speedup, trial.drop_points, trial.holds)
        for number, trial in enumerate(search.trials) for one in trial.timed if one.target == target
    ]  # fmt: skip
    timed.sort(key=lambda row: (row[1], row[2]))
    fastest, slowest = _wider(*(ratio for _, ratio, _, _ in timed))
    least, most = _wider(*(drop for _, _, drop, _ in timed), search.margin_points)
    found, best = [], float("inf")
    for number, ratio, drop, holds in timed:
        x, y = _share(ratio, fastest, slowest), _share(drop, least, most)
        found.append(Candidate(number, ratio, drop, holds, number == search.chosen, drop < best, x, y))
        best = min(best, drop)
    return found


def margin_height(search: Search, points: Sequence[Candidate]) -> float:
    """Where the limit lies on the scale of `searched`."""
    least, most = _wider(*(one.drop_points for one in points), search.margin_points)
    return _share(search.margin_points, least, most)


def search_targets(search: Search) -> list[str]:
    """Those that anything was timed on."""
    return list(dict.fromkeys(one.target for trial in search.trials for one in trial.timed))


def interval(accuracy: Accuracy) -> dict[str, float]:
    """Where the drop, its bounds, zero and the margin lie on one scale."""
    points = {
        "lower": accuracy.drop_lower95_one_sided,
        "drop": accuracy.drop_points,
        "upper": accuracy.drop_upper95_one_sided,
        "zero": 0.0,
        "margin": accuracy.margin_points or 0.0,
    }
    low, high = _wider(*points.values())
    return {name: _share(point, low, high) for name, point in points.items()}


def outline(artefact: Artefact) -> str:
    """The points of a polygon that is the histogram, in a box of 100 × 100."""
    fullest, step = max(artefact.histogram) or 1, 100 / len(artefact.histogram)
    corners = ["0,100"]
    for index, number in enumerate(artefact.histogram):
        height = 100 - 100 * number / fullest
        corners += [f"{index * step:.2f},{height:.2f}", f"{(index + 1) * step:.2f},{height:.2f}"]
    return " ".join([*corners, "100,100"])


def quantiles(artefact: Artefact, latency: Latency) -> dict[str, float]:
    """Where p50 and p90 of an artefact lie on the histograms' scale."""
    return {
        name: min(100.0, _share(artefact.ms[name], latency.low_ms, latency.high_ms))  # type: ignore[literal-required]
        for name in ("p50", "p90")
    }


def by_data(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """The reports by the images that their accuracies were measured on, in their order."""
    found: dict[str, list[Report]] = {}
    for one in reports:
        found.setdefault(one.reference["data"] if one.reference else "", []).append(one)
    return found


def pareto(reports: Sequence[Report]) -> list[Point]:
    """Every artefact whose accuracy and latency were measured, fastest first; of reports on the same images."""
    measured = sorted((row for one in reports for row in _measured(one)), key=lambda row: (row[2], -row[3]))
    if not measured:
        return []
    fastest, slowest = _wider(*(p50_ms for _, _, p50_ms, _ in measured))
    worst, best = _wider(*(top1 for *_, top1 in measured))
    points, best_yet = [], -1.0
    for number, (report, name, p50_ms, top1) in enumerate(measured, start=1):
        x, y = _share(p50_ms, fastest, slowest), 100 - _share(top1, worst, best)
        points.append(Point(number, report, name, p50_ms, top1, top1 > best_yet, x, y))
        best_yet = max(best_yet, top1)
    return points


def front(points: Sequence[Point] | Sequence[Candidate]) -> str:
    """The steps of the front: the points of a line, in a box of 100 × 100."""
    corners: list[str] = []
    height = 100.0
    for point in (point for point in points if point.front):
        corners += [f"{point.x:.2f},{height:.2f}", f"{point.x:.2f},{point.y:.2f}"]
        height = point.y
    return " ".join([*corners, f"100,{height:.2f}"])


def _measured(report: Report) -> list[tuple[Report, str, float, float]]:
    """Name, p50 and top-1 of each artefact of a report."""
    if report.latency is None or report.accuracy is None or report.parity is None:
        return []
    top1 = {"int8": report.accuracy.target_top1} | {one.precision: one.top1 for one in report.parity.floats}
    return [(report, one.name, one.ms["p50"], top1[one.name]) for one in report.latency.artefacts if one.name in top1]


def _wider(*values: float) -> tuple[float, float]:
    """A scale on which the values keep off the ends."""
    low, high = min(values), max(values)
    margin = 0.15 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _share(value: float, low: float, high: float) -> float:
    return 100 * (value - low) / (high - low)
