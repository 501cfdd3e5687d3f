"""What a run ends with: the ledger, a verdict per target, the report, and the exit code."""

from pathlib import Path
from typing import Any

import numpy as np

from vit_edge import bundle, evaluation, ledger
from vit_edge.pipeline import Pipeline
from vit_edge.report import console, html, quantization, words
from vit_edge.report.schema import Report
from vit_edge.stages.gate import ANSWERS

REPORT = "report.html"
VERDICT_HEAD = ("target", "verdict", "required", "drop, points", "int8 p50", "float p50", "recommended")
WORST = (0, 3, 1)
"""Exit codes from the best to the worst: pass, undecided or unmeasured, fail."""


def write_and_print(pipeline: Pipeline) -> int:
    """Writes ledger.json and report.html of a finished run and prints both in short; returns the run's exit code."""
    reports = {name: _report(pipeline.done[f"gate/{name}"]) for name in pipeline.target_names}
    found = ledger.Ledger(
        schema_name="vit-edge/ledger/1", rows=[*_torch_rows(pipeline), *_target_rows(pipeline, reports)]
    )
    ledger.write(pipeline.folder, found)
    searched = quantization.search(pipeline.done["int8"])
    page = html.page(
        reports=list(reports.values()), ledger=found, layers=quantization.layers(pipeline.done["int8"]), search=searched,
        title=f"vit-edge: {pipeline.recipe.name}",
    )  # fmt: skip
    (pipeline.folder / REPORT).write_text(page, encoding="utf-8")
    console.show_ledger(found)
    print()
    if searched is not None and len(searched.trials) > 1:
        console.show_search(searched)
        print()
    console.show_table(
        VERDICT_HEAD, [_verdict_row(report, name in pipeline.required_names) for name, report in reports.items()]
    )
    print(f"\nreport: {pipeline.folder / REPORT}")
    return max((reports[name].exit_code for name in pipeline.required_names), key=WORST.index, default=0)


def _torch_rows(pipeline: Pipeline) -> list[ledger.Row]:
    reference = pipeline.done["reference"]
    measured, teacher_N = pipeline.metrics("reference"), _teacher_answers(reference)
    logits_NK = evaluation.read(reference / "evaluation").logits_NK
    rows = []
    if measured["teacher"] is not None:
        rows.append(ledger.torch_row("teacher", answers_N=teacher_N, teacher_N=teacher_N, **measured["teacher"]))
    answers_N = logits_NK.argmax(axis=1)
    return [*rows, ledger.torch_row("student", answers_N=answers_N, teacher_N=teacher_N, **measured["student"])]


def _target_rows(pipeline: Pipeline, reports: dict[str, Report]) -> list[ledger.Row]:
    teacher_N = _teacher_answers(pipeline.done["reference"])
    rows: list[ledger.Row] = []
    for name, report in reports.items():
        model = bundle.read(pipeline.done[f"export/{name}"] / "bundle").manifest.model
        with np.load(pipeline.done[f"gate/{name}"] / ANSWERS, allow_pickle=False) as answers:
            rows += ledger.gate_rows(report, model, answers=dict(answers), teacher_N=teacher_N)
    return rows


def _report(folder: Path) -> Report:
    return Report.model_validate_json((folder / "gate.json").read_bytes())


def _teacher_answers(reference: Path) -> Any:
    path = reference / ledger.TEACHER_ANSWERS
    return np.load(path, allow_pickle=False) if path.exists() else None


def _verdict_row(report: Report, required: bool) -> tuple[str, ...]:
    accuracy, latency = report.accuracy, report.latency
    drop = f"{accuracy.drop_points:.2f} (≤ {accuracy.drop_upper95_one_sided:.2f})" if accuracy else words.NOT_MEASURED
    int8 = words.ms(latency.target_ms["p50"]) if latency and latency.target_ms else words.NOT_MEASURED
    floats = words.ms(latency.float_ms["p50"]) if latency and latency.float_ms else words.NOT_MEASURED
    recommended = latency.recommended if latency and latency.recommended else words.NOT_MEASURED
    return (report.target, report.verdict, "yes" if required else "no", drop, int8, floats, recommended)
