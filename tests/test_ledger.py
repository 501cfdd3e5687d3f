from pathlib import Path

import numpy as np
import pytest

from vit_edge import bundle, ledger
from vit_edge.errors import UserError
from vit_edge.stages.gate import gate_bundle


def test_rows_of_a_gate_hold_what_was_measured(openvino_bundle: Path) -> None:
    gated = gate_bundle(openvino_bundle)
    model = bundle.read(openvino_bundle).manifest.model
    *floats, int8 = ledger.gate_rows(gated.report, model, answers=gated.answers, teacher_N=gated.answers["int8"])
    assert floats[0].station == "float"
    assert floats[0].precision == "f32"
    assert floats[0].n == 597
    assert floats[0].agreement_with_teacher == np.mean(gated.answers["f32"] == gated.answers["int8"])
    assert (int8.station, int8.runtime, int8.n, int8.agreement_with_teacher) == ("int8", "openvino", 597, 1.0)
    assert int8.p50_ms is not None
    assert int8.size_bytes == sum(path.stat().st_size for path in bundle.read(openvino_bundle).int8)


def test_torch_rows_take_top1_from_the_answers() -> None:
    labels_N, answers_N = np.array([0, 1, 2, 3]), np.array([0, 1, 2, 2])
    row = ledger.torch_row("student", answers_N=answers_N, labels_N=labels_N, teacher_N=labels_N)
    assert (row.top1, row.n, row.agreement_with_teacher, row.parameters) == (0.75, 4, 0.75, None)


def test_round_trip_keeps_nulls(tmp_path: Path) -> None:
    written = ledger.Ledger(schema="vit-edge/ledger/1", rows=[ledger.torch_row("teacher", top1=0.9, n=10)])
    ledger.write(tmp_path, written)
    assert '"p50_ms": null' in (tmp_path / ledger.FILE).read_text()
    assert ledger.read(tmp_path) == written


def test_a_folder_without_a_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no readable"):
        ledger.read(tmp_path)
