"""Accuracy, size and speed at every station of the chain: teacher, student, then float and int8 on each runtime.

A value that was not measured is null, never invented. N images.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from vit_edge import metrics
from vit_edge.bundle import ModelInfo
from vit_edge.errors import UserError
from vit_edge.report.schema import Part, Report
from vit_edge.store import write_json

FILE = "ledger.json"
TEACHER_ANSWERS = "teacher_answers.npy"
"""In the reference's stage: the teacher's class indices, int64 (N,)."""


class Row(Part):
    station: Literal["teacher", "student", "float", "int8"]
    runtime: str
    precision: str
    top1: float | None = None
    n: int | None = Field(None, description="images that top1 was measured on")
    agreement_with_teacher: float | None = None
    parameters: int | None = None
    multiply_adds: int | None = Field(None, description="of one image")
    size_bytes: int | None = None
    p50_ms: float | None = None
    target: str | None = Field(None, description="the device profile, for a station on a runtime")


class Ledger(Part):
    schema_name: Literal["vit-edge/ledger/1"] = Field("vit-edge/ledger/1", alias="schema")
    rows: list[Row]


def torch_row(
    station: Literal["teacher", "student"], *, answers_N: np.ndarray | None = None, labels_N: np.ndarray | None = None,
    teacher_N: np.ndarray | None = None, top1: float | None = None, n: int | None = None, parameters: int | None = None,
    multiply_adds: int | None = None, size_bytes: int | None = None, p50_ms: float | None = None, precision: str = "f32",
) -> Row:  # fmt: skip
    """A station in PyTorch. top1 and n are taken from the answers where these and the labels are given."""
    if answers_N is not None and labels_N is not None:
        top1, n = metrics.top1(answers_N, labels_N), len(labels_N)
    return Row(
        station=station, runtime="torch", precision=precision, top1=top1, n=n,
        agreement_with_teacher=_agreement(answers_N, teacher_N), parameters=parameters, multiply_adds=multiply_adds,
        size_bytes=size_bytes, p50_ms=p50_ms,
    )  # fmt: skip


def gate_rows(
    report: Report, model: ModelInfo, *, answers: Mapping[str, np.ndarray], teacher_N: np.ndarray | None = None
) -> list[Row]:
    """The stations on one target, from its gate: each float artefact, then int8.

    A float artefact's top1 is on the gate's parity sample, whose size is its n. answers: the gate's answers.npz.
    """
    sizes = {one.name: one for one in report.latency.artefacts} if report.latency else {}
    common = {
        "runtime": report.runtime["name"],
        "target": report.target,
        "parameters": model.parameters,
        "multiply_adds": model.multiply_adds,
    }
    rows = []
    for entry in report.parity.floats if report.parity else ():
        artefact = sizes.get(entry.precision)
        rows.append(Row(
            station="float", precision=entry.precision, top1=entry.top1, n=entry.n,
            agreement_with_teacher=_agreement(answers.get(entry.precision), teacher_N),
            size_bytes=artefact and artefact.size_bytes, p50_ms=artefact and artefact.ms["p50"], **common,
        ))  # fmt: skip
    artefact, accuracy = sizes.get("int8"), report.accuracy
    int8 = Row(
        station="int8", precision="int8", top1=accuracy and accuracy.target_top1, n=accuracy and accuracy.n,
        agreement_with_teacher=_agreement(answers.get("int8"), teacher_N), size_bytes=artefact and artefact.size_bytes,
        p50_ms=artefact and artefact.ms["p50"], **common,
    )  # fmt: skip
    return [*rows, int8]


def write(folder: Path, ledger: Ledger) -> None:
    write_json(folder / FILE, ledger.model_dump(by_alias=True))


def read(folder: Path) -> Ledger:
    """The ledger in a run's folder; UserError when there is none or it is not one."""
    try:
        return Ledger.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError) as err:
        raise UserError(f"{folder} holds no readable {FILE}", "give the folder of a finished run") from err


def _agreement(answers_N: np.ndarray | None, teacher_N: np.ndarray | None) -> float | None:
    """On the images that both answered, which come in the same order."""
    if answers_N is None or teacher_N is None:
        return None
    return metrics.agreement(answers_N, teacher_N[: len(answers_N)])
