"""Reads reports that gates wrote, here or elsewhere: files from outside, so bounded before they are parsed."""

from collections.abc import Sequence
from pathlib import Path

from vit_edge.errors import UserError
from vit_edge.ledger import Ledger
from vit_edge.report.schema import Report
from vit_edge.safety import documents

MAX_REPORT_BYTES = 256 << 20
GATE_AGAIN = "gate the bundle again, with --json FILE, and give that file"


def report(path: Path) -> Report:
    """The report in a JSON file; UserError when it is none."""
    return documents.parsed(Report, _content(path), path, GATE_AGAIN)


def reports(paths: Sequence[Path]) -> tuple[list[Report], Ledger | None]:
    """The reports in JSON files, in their order, and the ledger where one of the files is a run's."""
    found: list[Report] = []
    ledger = None
    for path in paths:
        content = _content(path)
        if b'"vit-edge/ledger/1"' in content[:1000]:
            ledger = documents.parsed(Ledger, content, path, "give the ledger.json of a finished run")
        else:
            found.append(documents.parsed(Report, content, path, GATE_AGAIN))
    if not found:
        raise UserError("no report is given, only a ledger", "give reports of gates too: runs/NAME/gate/*/gate.json")
    return found, ledger


def _content(path: Path) -> bytes:
    try:
        return documents.bounded(path, path, GATE_AGAIN, MAX_REPORT_BYTES)
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}", "give the JSON that a gate wrote") from err
