"""A gate's report, and a ledger, as Markdown: for a pull request, a job's summary or a wiki."""

import re
from collections.abc import Iterable, Sequence

from vit_edge.report import words
from vit_edge.report.schema import Report

FLIPS = 20
MARKS = re.compile(r"[\\`*_\[\]|~#!@]")


def of_reports(reports: Sequence[Report]) -> str:
    """Many devices × checks."""
    return "\n\n".join(["# Gates", _table(words.OVERVIEW_HEAD, words.overview_rows(reports))]) + "\n"


def of_report(report: Report) -> str:
    parts = [
        f"# {_plain(report.model)} on {_plain(report.target)}: {report.verdict}",
        _plain(words.conditions(report)),
        _table(("check", "verdict", "what was found"), [(c.name, c.verdict, c.detail) for c in report.checks]),
    ]
    if report.latency:
        parts += ["## Latency", _table(words.LATENCY_HEAD, words.latency_rows(report))]
    if report.accuracy and report.accuracy.worst_classes:
        parts += ["## Classes that lost most", _table(words.CLASS_HEAD, words.class_rows(report.accuracy))]
    if report.accuracy and report.accuracy.flips:
        title = words.flips_title(report.accuracy, FLIPS)
        parts += [f"## {title}", _table(words.FLIP_HEAD, words.flip_rows(report.accuracy, FLIPS))]
    parts += ["## Limits", _table(("limit", "value", "set by"), words.limit_rows(report))]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown and HTML take for nothing else: names in a report come from a bundle."""
    return MARKS.sub(r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
