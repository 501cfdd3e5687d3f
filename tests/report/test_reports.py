import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pytest

from vit_edge import bundle, ledger
from vit_edge.errors import UserError
from vit_edge.report import console, html, junit, markdown, reading
from vit_edge.report.schema import Check, ClassDrop, Flip, Report
from vit_edge.stages.gate import Gated, gate_bundle


@pytest.fixture(scope="session")
def gated(openvino_bundle: Path) -> Gated:
    return gate_bundle(openvino_bundle)


@pytest.fixture(scope="session")
def report(gated: Gated) -> Report:
    return gated.report


@pytest.fixture(scope="session")
def found_ledger(gated: Gated, openvino_bundle: Path) -> ledger.Ledger:
    model = bundle.read(openvino_bundle).manifest.model
    teacher = ledger.torch_row("teacher", top1=0.98, n=597, parameters=85_800_000)
    rows = [teacher, *ledger.gate_rows(gated.report, model, answers=gated.answers)]
    return ledger.Ledger(schema_name="vit-edge/ledger/1", rows=rows)


def with_checks(report: Report, *verdicts: str) -> Report:
    names = ("integrity", "parity", "coverage", "accuracy", "latency")
    checks = [
        Check.model_validate({"name": name, "verdict": verdict, "detail": 'a <b> & "c" | d'})
        for name, verdict in zip(names, verdicts, strict=True)
    ]
    return report.model_copy(update={"checks": checks})


def test_json_round_trip(report: Report) -> None:
    assert Report.model_validate_json(report.to_json()) == report


def test_junit_has_one_case_for_each_check_and_passes_only_what_passed(report: Report) -> None:
    text = junit.of_report(with_checks(report, "pass", "fail", "skipped", "undecided", "unmeasured"))
    suite = ET.fromstring(text).find("testsuite")
    assert suite is not None
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "1", "errors": "2", "skipped": "1",
    }  # fmt: skip
    children = [[child.tag for child in case] for case in suite.iter("testcase")]
    assert children == [["system-out"], ["failure"], ["skipped"], ["error"], ["error"]]


def test_markdown_tables_are_whole(report: Report) -> None:
    text = markdown.of_report(with_checks(report, "pass", "fail", "skipped", "undecided", "unmeasured"))
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1


def test_html_is_self_contained_and_escaped(report: Report, found_ledger: ledger.Ledger) -> None:
    text = html.page(reports=[with_checks(report, *["pass"] * 5)], ledger=found_ledger, title="a <run>")
    assert "a &lt;run&gt;" in text
    assert "a &lt;b&gt; &amp;" in text
    assert not re.search(r"<script|<link|https?://|@import|url\(|<img", text)
    assert "prefers-color-scheme: dark" in text
    assert "85.8 M" in text


def test_checks_that_say_the_same_are_told_once(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    console.show_report(with_checks(report, "pass", *["unmeasured"] * 4))
    assert "unmeasured parity, coverage, accuracy, latency\n" in capsys.readouterr().out


def test_names_that_a_bundle_brings_are_taken_for_nothing_else(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "[/red] <b>|`x`*_ [a](b) {{7*7}}"
    drop = ClassDrop(name=name, n=9, reference_top1=1, target_top1=0.5, lost=4, won=0, p_holm=0.01, significant=True)
    flip = Flip(name=name, label=name, reference=name, target=None, effect="lost")
    assert report.accuracy is not None
    accuracy = report.accuracy.model_copy(update={"worst_classes": [drop], "flips": [flip], "flipped": 1})
    changed = report.model_copy(update={"accuracy": accuracy, "model": name})
    console.show_report(changed)
    assert "[/red] <b>" in capsys.readouterr().out
    assert "<b>" not in html.page(reports=[changed])
    assert "49" not in re.findall(r"&lt;b&gt;.*", html.page(reports=[changed]))[0]
    text = markdown.of_report(changed)
    assert not re.search(r"<b>|(?<!\\)[\[`*]", text)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_html_of_an_unmeasured_target(report: Report) -> None:
    nothing = dict.fromkeys(("parity", "coverage", "accuracy", "latency", "reference"))
    assert "unmeasured" in html.page(reports=[report.model_copy(update={**nothing, "verdict": "unmeasured"})])


def test_the_console_is_plain_when_piped(
    report: Report, found_ledger: ledger.Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    console.show_report(report)
    console.show_ledger(found_ledger)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= console.PIPED_WIDTH
    assert out.startswith(report.verdict.upper())
    for check in report.checks:
        assert f"{check.verdict:10} {check.name}\n" in out


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths_in(child, (*path, key))


def test_a_report_with_anything_changed_is_shown_or_refused(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(report.model_copy(update={"answers": None}).to_json())
    random = Random(0)
    paths, shown = list(paths_in(plain)), 0
    for number in range(200):
        changed = deepcopy(plain)
        *above, last = random.choice(paths)
        reduce(lambda part, key: part[key], above, changed)[last] = random.choice(
            (math.nan, 0, -1, 1e308, "", None, [], {}, True)
        )
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(changed))
        try:
            found, _ = reading.reports([file])
        except UserError:
            continue
        shown += 1
        html.page(reports=found)
        junit.of_report(found[0])
        assert markdown.of_report(found[0])
        assert markdown.of_reports(found)
        console.show_report(found[0])
        console.show_reports(found)
    assert 20 < shown < 180
    capsys.readouterr()
