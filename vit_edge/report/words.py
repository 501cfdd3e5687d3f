"""The cells of every table, in words: one form for the console, Markdown and HTML. A dash stands for "not measured"."""

from collections.abc import Sequence

from vit_edge.ledger import Ledger
from vit_edge.metrics import Percentiles
from vit_edge.report.charts import Point
from vit_edge.report.quantization import Layer, Search, Timed
from vit_edge.report.schema import Accuracy, BenchRow, Report

LATENCY_HEAD = ("artefact", "p50 ms", "p90 ms", "p99 ms", "n", "images/s", "load ms", "first ms", "memory", "size")
CLASS_HEAD = ("class", "images", "reference", "target", "drop", "lost", "won", "p (Holm), * ≤ 0.05")
FLIP_HEAD = ("image", "label", "reference", "target", "effect")
LEDGER_HEAD = ("station", "runtime", "precision", "top-1", "n", "agreement", "parameters", "mult-adds", "size", "p50 ms")  # fmt: skip
BENCH_HEAD = ("bundle", "target", "artefact", "batch", "p50 ms", "p90 ms", "p99 ms", "n", "load ms", "size")
CHECKS = ("integrity", "parity", "coverage", "accuracy", "latency", "regression")
VERDICTS = ("pass", "fail", "undecided", "unmeasured", "skipped")
OVERVIEW_HEAD = ("target", "model", "bundle", "verdict", *CHECKS, "drop, points", "int8 p50 ms", "× float", "device")
SEARCH_HEAD = ("", "float", "KL", "drop", "95 %: ≤", "holds", "× float", "p50 ms", "given back to float")
LAYER_HEAD = ("product", "runs in", "weight dB", "input dB", "range", "α", "rounding", "bias", "KL alone", "why float")
PARETO_HEAD = ("", "bundle", "artefact", "top-1", "p50 ms", "on the front")
NOT_MEASURED = "–"
EFFECTS = {"lost": "lost", "won": "won", "wrong": "wrong both times"}


def conditions(report: Report) -> str:
    """What the numbers hold for: device, runtime, threads, batch, precision of what is not int8."""
    runtime = report.runtime
    parts = [
        f"{runtime['name']} {runtime['version']}",
        device(report),
        ", ".join(report.device["instruction_sets"]),
        f"{runtime['threads']} threads" if runtime.get("threads") else "",
        f"batch {runtime['batch']}" if runtime.get("batch") else "",
        f"float parts in {runtime['precision']}" if runtime.get("precision") else "",
        f"bundle {report.bundle_sha256[:12]}",
    ]
    return " · ".join(part for part in parts if part)


def reference(report: Report) -> str:
    """What the target is held against."""
    if not report.reference:
        return ""
    found = report.reference
    place = found["device"] + (", a CPU" if found["kind"] == "cpu" else "")
    return f"reference: float student in PyTorch on {place} ({found['precision']}), {found['data']}"


def overview_rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Many devices × checks."""
    return [_overview(one) for one in reports]


def pareto_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    return [
        (
            str(one.number), f"{one.report.model} on {one.report.target}", one.name, share(one.top1), ms(one.p50_ms),
            "yes" if one.front else "no",
        )
        for one in points
    ]  # fmt: skip


def search_rows(search: Search) -> list[tuple[str, ...]]:
    """Every int8 model that was tried, in order; a star is on the one that was taken."""
    return [
        (
            f"{number}{' *' if number == search.chosen else ''}", str(len(one.given_back)), f"{one.kl:.3g}",
            f"{one.drop_points:.2f}", f"{one.drop_upper95_one_sided:.2f}", "yes" if one.holds else "no",
            *(_by_target(one.timed, attribute) for attribute in ("speedup", "p50_ms")), _names(one.given_back),
        )
        for number, one in enumerate(search.trials)
    ]  # fmt: skip


def layer_rows(layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    return [
        (
            one.name, "int8" if one.reason is None else "float", _number(one.weight_sqnr_db, ".1f"),
            _number(one.input_sqnr_db, ".1f"), one.range_method or NOT_MEASURED, _number(one.equalization, "g"),
            "" if one.reason else "compensated" if one.compensated_rounding else "nearest",
            "" if one.reason else "corrected" if one.bias_corrected else "as it was",
            _number(one.kl_alone, ".2g"), one.reason or "",
        )
        for one in layers
    ]  # fmt: skip


def layers_title(layers: Sequence[Layer]) -> str:
    floats = sum(one.reason is not None for one in layers)
    return f"{len(layers)} matrix products: {len(layers) - floats} in int8, {floats} in float"


def device(report: Report) -> str:
    return str(report.runtime.get("device") or report.device.get("processor"))


def latency_rows(report: Report) -> list[tuple[str, ...]]:
    """The artefacts, int8 first, then the reference and its lower precisions, which may have run elsewhere."""
    assert report.latency is not None
    rows = [
        (
            _artefact_name(one.name, one.precision),
            *_ms(one.ms),
            count(round(one.offline.images_per_second)),
            ms(one.load_ms),
            ms(one.first_ms),
            size(one.memory_bytes),
            size(one.size_bytes),
        )
        for one in report.latency.artefacts
    ]
    references = {"reference, f32": report.latency.reference_ms}
    beside = report.reference.get("beside", {}) if report.reference else {}
    for precision, one in beside.items():
        references[f"reference, {precision}"] = one["latency_ms"]
    return rows + [(name, *_ms(found), *[NOT_MEASURED] * 5) for name, found in references.items() if found]


def bench_rows(rows: Sequence[BenchRow]) -> list[tuple[str, ...]]:
    return [
        (row.bundle, row.target, row.artefact, str(row.batch), *_ms(row.ms), ms(row.load_ms), size(row.size_bytes))
        for row in rows
    ]


def class_rows(accuracy: Accuracy) -> list[tuple[str, ...]]:
    return [
        (
            c.name, str(c.n), share(c.reference_top1), share(c.target_top1),
            f"{100 * (c.reference_top1 - c.target_top1):.2f}", str(c.lost), str(c.won),
            p_value(c.p_holm) + (" *" if c.significant else ""),
        )
        for c in accuracy.worst_classes
    ]  # fmt: skip


def flip_rows(accuracy: Accuracy, most: int) -> list[tuple[str, ...]]:
    return [
        (one.name, one.label, one.reference or NOT_MEASURED, one.target or NOT_MEASURED, EFFECTS[one.effect])
        for one in accuracy.flips[:most]
    ]


def flips_title(accuracy: Accuracy, most: int) -> str:
    """What the table of flipped images shows, and of how many."""
    shown = min(most, len(accuracy.flips))
    told = f"{accuracy.flipped} of {accuracy.n} answers changed: {accuracy.lost} lost, {accuracy.won} won"
    return told if shown == accuracy.flipped else f"{told}; the first {shown}"


def limit_rows(report: Report) -> list[tuple[str, ...]]:
    return [(one.name, value(one.value), one.origin) for one in report.limits]


def is_number(cell: str) -> bool:
    """Whether a cell belongs to the right of its column."""
    return cell.lstrip("<-")[:1].isdigit() or cell == NOT_MEASURED


def ledger_rows(ledger: Ledger) -> list[tuple[str, ...]]:
    return [
        (
            row.station, row.runtime, row.precision, share(row.top1), count(row.n), share(row.agreement_with_teacher),
            count(row.parameters), count(row.multiply_adds), size(row.size_bytes), ms(row.p50_ms),
        )
        for row in ledger.rows
    ]  # fmt: skip


def share(fraction: float | None) -> str:
    return NOT_MEASURED if fraction is None else f"{fraction:.2%}"


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def ms(milliseconds: float | None) -> str:
    return (
        NOT_MEASURED if milliseconds is None else f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"
    )


def count(number: int | None) -> str:
    """12345678 as 12.3 M."""
    if number is None:
        return NOT_MEASURED
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if number >= unit:
            return f"{number / (1e3 if letter == 'k' else unit):.3g} {letter}"
    return str(number)


def size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return NOT_MEASURED
    return f"{size_bytes / 1e6:.3g} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.3g} kB"


def value(limit: float | str | None) -> str:
    return "none" if limit is None else f"{limit:g}" if isinstance(limit, float) else str(limit)


def _overview(report: Report) -> tuple[str, ...]:
    verdicts: dict[str, str] = {check.name: check.verdict for check in report.checks}
    accuracy, latency = report.accuracy, report.latency
    return (
        report.target, report.model, report.bundle_sha256[:8], report.verdict, *(verdicts.get(name, NOT_MEASURED) for name in CHECKS),
        f"{accuracy.drop_points:.2f} (≤ {accuracy.drop_upper95_one_sided:.2f})" if accuracy else NOT_MEASURED,
        ms(latency.target_ms["p50"]) if latency and latency.target_ms else NOT_MEASURED,
        f"{latency.speedup_vs_float:.2f}" if latency and latency.speedup_vs_float else NOT_MEASURED, device(report),
    )  # fmt: skip


def _by_target(timed: Sequence[Timed], attribute: str) -> str:
    """One number for each target, in their order."""
    return " / ".join(f"{getattr(one, attribute):.3g}" for one in timed) or NOT_MEASURED


def _names(given_back: Sequence[str]) -> str:
    """Those that come first, and how many more there are."""
    more = f" and {len(given_back) - 2} more" if len(given_back) > 2 else ""
    return ", ".join(given_back[:2]) + more


def _number(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else f"{value:{form}}"


def _artefact_name(name: str, precision: str) -> str:
    return f"int8, rest {precision}" if name == "int8" else name


def _ms(found: Percentiles) -> tuple[str, ...]:
    return ms(found["p50"]), ms(found["p90"]), ms(found["p99"]), count(found["n"])
