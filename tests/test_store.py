"""The store: found again, never half-written, back from the superseded ones, locked."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vit_edge.errors import UserError
from vit_edge.store import Plan, RunFolder, verify

PLAN = Plan("student", 1, {"epochs": 3}, {"teacher": "a" * 64}, "data")


def finished(run: RunFolder, plan: Plan, text: str) -> Path:
    (run.begin(plan) / "weights").write_text(text, encoding="utf-8")
    return run.finish(plan, {"top1": 0.9}, 1.0)


def test_a_finished_stage_is_found_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.find(PLAN) is None
    folder = finished(run, PLAN, "x")
    assert run.find(PLAN) == folder == tmp_path / "student"
    assert run.record("student")["metrics"] == {"top1": 0.9}
    assert not (tmp_path / "student.partial").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"config": {"epochs": 4}},
        {"inputs": {"teacher": "b" * 64}},
        {"data": "other"},
        {"versions": {"torch": "3"}},
    ],
)
def test_whatever_decides_the_result_changes_the_fingerprint(change: dict) -> None:
    assert replace(PLAN, **change).fingerprint != PLAN.fingerprint


def test_a_changed_setting_keeps_the_old_stage_and_finds_it_when_changed_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    finished(run, PLAN, "old")
    other = replace(PLAN, config={"epochs": 4})
    finished(run, other, "new")
    assert run.find(other) is not None
    back = run.find(PLAN)
    assert back is not None
    assert (back / "weights").read_text(encoding="utf-8") == "old"
    assert run.find(other) is not None


def test_a_killed_stage_goes_on_only_for_the_very_same_plan(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (run.begin(PLAN) / "checkpoint").touch()
    assert (run.begin(PLAN) / "checkpoint").exists()
    assert not (run.begin(replace(PLAN, version=2)) / "checkpoint").exists()


def test_what_another_plan_left_is_kept_said_and_goes_on_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = RunFolder(tmp_path), replace(PLAN, version=2)
    (run.begin(PLAN) / "checkpoint").write_text("far", encoding="utf-8")
    run.begin(other)
    assert capsys.readouterr().err.count("begun with other settings") == 1
    assert (run.begin(PLAN) / "checkpoint").read_text(encoding="utf-8") == "far"
    assert capsys.readouterr().err.strip().endswith("goes on from where it was stopped with them")
    finished(run, PLAN, "x")
    assert run.find(PLAN) is not None
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path).claim("mine")
    assert "is not empty and no run: it holds thesis.tex" in caught.value.problem
    assert "--out" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_run_of_another_recipe_is_left_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.claim("mine")
    (tmp_path / "recipe.yaml").write_text("name: mine\n", encoding="utf-8")
    run.claim("mine")
    run.begin(PLAN)
    run.claim("another, since nothing has been done yet")
    finished(run, PLAN, "x")
    run.claim("mine")
    with pytest.raises(UserError, match="holds the run 'mine', not 'another'"):
        run.claim("another")


def test_a_truncated_file_makes_the_stage_unfinished(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (finished(run, PLAN, "long enough") / "weights").write_text("short", encoding="utf-8")
    assert run.find(PLAN) is None


def test_a_changed_byte_is_found_before_a_stage_is_read(tmp_path: Path) -> None:
    folder = finished(RunFolder(tmp_path), PLAN, "abc")
    verify(folder)
    (folder / "weights").write_text("abd", encoding="utf-8")
    with pytest.raises(UserError, match="weights is not the file"):
        verify(folder)


def test_a_run_that_another_process_holds_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from vit_edge.store import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked():\n    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} "), RunFolder(tmp_path).locked():
            pass
    finally:
        holder.kill()
        holder.wait()
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock-holder").exists()
