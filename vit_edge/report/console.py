"""A gate's report, and a ledger, as text for a terminal or a pipe: readable at 80 columns."""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_edge.ledger import Ledger
from vit_edge.report import words
from vit_edge.report.quantization import Search
from vit_edge.report.schema import Report

STYLES = {"pass": "bold green", "fail": "bold red", "undecided": "bold yellow", "unmeasured": "bold yellow", "skipped": "dim"}  # fmt: skip
PIPED_WIDTH, WIDE = 100, 180


def show_report(report: Report) -> None:
    """Prints the verdict first, then why."""
    console = _console()
    heading = Text.assemble(
        (report.verdict.upper(), STYLES[report.verdict]), f"  {report.model} int8 on {report.target}"
    )
    if report.blame:
        heading.append(f" · {report.blame}")
    console.print(heading)
    console.print(Text(words.conditions(report), style="dim"))
    console.print(Text(words.reference(report), style="dim"))
    for (verdict, detail), checks in groupby(report.checks, key=lambda check: (check.verdict, check.detail)):
        console.print()
        names = ", ".join(check.name for check in checks)
        console.print(Text.assemble((f"{verdict:10}", STYLES[verdict]), " ", (names, "bold")))
        _print_indented(console, detail, 11)
    if report.latency:
        console.print(_table(words.LATENCY_HEAD, words.latency_rows(report)))
    if report.accuracy and report.accuracy.worst_classes:
        console.print(_table(words.CLASS_HEAD, words.class_rows(report.accuracy)))
    console.print()
    limits = ", ".join(f"{one.name} {words.value(one.value)} ({one.origin})" for one in report.limits)
    console.print(Text(f"limits: {limits}", style="dim"))


def show_reports(reports: Sequence[Report]) -> None:
    """Many devices × checks."""
    _console(WIDE).print(_table(words.OVERVIEW_HEAD, words.overview_rows(reports)))


def show_ledger(ledger: Ledger) -> None:
    _console().print(_table(words.LEDGER_HEAD, words.ledger_rows(ledger)))


def show_search(search: Search) -> None:
    """The int8 models that were tried on the tune split, and how that ended."""
    console = _console()
    targets = {one.target: one.float_precision for trial in search.trials for one in trial.timed}
    against = ", ".join(f"{target} ({precision})" for target, precision in targets.items())
    console.print(_table(words.SEARCH_HEAD, words.search_rows(search)))
    console.print(Text(f"× float: {against or 'no target of this machine'}", style="dim"))
    _print_indented(console, search.outcome, 0)


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    _console().print(_table(head, rows))


def show_doctor(found: Mapping[str, Any]) -> None:
    """What runtimes.doctor.findings found."""
    console, machine = _console(), found["machine"]
    console.print(" · ".join(f"{name} {version}" for name, version in found["versions"].items()))
    console.print(
        f"{machine['processor']}, {machine['physical_cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB"
    )
    console.print(
        f"for int8 and low precision: {', '.join(machine['instruction_sets']) or 'nothing that is known here'}"
    )
    for probe in found["runtimes"]:
        ready = probe["problem"] is None
        console.print()
        console.print(
            Text.assemble((probe["runtime"], "bold green" if ready else "bold yellow"), f" {probe['version'] or ''}")
        )
        lines = [f"{device}, float in {', '.join(probe['float_precisions'])}" for device in probe["devices"]]
        for line in lines if ready else [probe["problem"], f"fix: {probe['fix']}"]:
            _print_indented(console, line, 2)
    console.print()
    console.print(Text("training side (this command does not load it)", style="bold"))
    _print_indented(console, ", ".join(f"{name} {version}" for name, version in found["training"].items()), 2)
    if found["training_fix"]:
        _print_indented(console, f"fix: {found['training_fix']}", 2)


def _print_indented(console: Console, text: str, columns: int) -> None:
    """Prints with a margin, no blanks at the lines' ends."""
    for line in textwrap.wrap(text, console.width - columns, break_long_words=False, break_on_hyphens=False):
        console.print(Text(" " * columns + line), soft_wrap=True)


def _console(piped_width: int = PIPED_WIDTH) -> Console:
    """The terminal's own width; a fixed one where there is no terminal."""
    return Console(width=None if sys.stdout.isatty() else piped_width, highlight=False, soft_wrap=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Numbers to the right, words to the left."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    rows = list(rows)
    for title, column in zip_longest(head, zip(*rows, strict=True), fillvalue=()):
        numbers = all(words.is_number(str(cell)) for cell in column)
        table.add_column(str(title), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        # names hold brackets that rich would take for markup
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table
