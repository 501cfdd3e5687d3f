"""A gate's report, and a ledger, as Markdown: for a pull request, a job's summary or a wiki."""

from collections.abc import Iterable, Sequence

from vit_edge.report import words
from vit_edge.report.schema import Report


def of_report(report: Report) -> str:
    parts = [
        f"# {report.model} on {report.target}: {report.verdict}",
        words.conditions(report),
        _table(("check", "verdict", "what was found"), [(c.name, c.verdict, c.detail) for c in report.checks]),
    ]
    if report.latency:
        parts += ["## Latency", _table(words.LATENCY_HEAD, words.latency_rows(report.latency))]
    if report.accuracy and report.accuracy.worst_classes:
        parts += ["## Classes that lost most", _table(words.CLASS_HEAD, words.class_rows(report.accuracy))]
    parts += ["## Limits", _table(("limit", "value", "set by"), words.limit_rows(report))]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
