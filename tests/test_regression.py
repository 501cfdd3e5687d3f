"""A gate against an earlier one: real gates of the tiny model, and reports of theirs with one thing changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vit_edge import bundle, evaluation, regression
from vit_edge.errors import UserError
from vit_edge.evaluation import Evaluation
from vit_edge.report.schema import Check, Report
from vit_edge.stages.gate import Layers, gate_bundle

LOOSE = ("recipe", {"max_drop_points": 5.0, "min_relative_top1": None})


@pytest.fixture(scope="module")
def earlier(ort_bundle: Path) -> Report:
    return gate_bundle(ort_bundle, limits=[LOOSE]).report


@pytest.fixture(scope="module")
def images(ort_bundle: Path) -> Evaluation:
    return evaluation.read(bundle.read(ort_bundle).evaluation_folder)


@pytest.fixture
def again(ort_bundle: Path, earlier: Report, tmp_path: Path) -> Callable[..., tuple[Check, Report]]:
    """Gates the bundle against the earlier report with some of its JSON changed; the regression's check, and the report."""

    def gate(change: Callable[[dict[str, Any]], object] = lambda _: None, *limits: Layers) -> tuple[Check, Report]:
        content = json.loads(earlier.to_json())
        change(content)
        (tmp_path / "old.json").write_text(json.dumps(content))
        report = gate_bundle(ort_bundle, limits=[LOOSE, *limits], baseline=tmp_path / "old.json").report  # type: ignore[list-item]
        assert report.checks[-1].name == "regression"
        return report.checks[-1], report

    return gate


def test_the_same_bundle_again_is_no_regression(again: Callable[..., tuple[Check, Report]], earlier: Report) -> None:
    check, report = again()
    assert check.verdict == "pass"
    found = report.regression
    assert found is not None
    assert (found.n, found.lost, found.won, found.bundle_sha256) == (597, 0, 0, earlier.bundle_sha256)
    assert found.baseline_top1 == found.top1
    assert found.p50_ratio is not None
    assert found.p50_noise is not None
    assert "which tells whether the machine changed" in check.detail
    assert Report.model_validate_json(report.to_json()) == report


def set_answers(
    report: dict[str, Any], images: Evaluation, answers_N: np.ndarray, names: list[str] | None = None
) -> None:
    packed = regression.packed(names or images.names, answers_N, images.manifest.classes)
    report["answers"] = packed.model_dump()


def test_answers_that_were_right_and_are_wrong_are_a_drop(
    again: Callable[..., tuple[Check, Report]], images: Evaluation
) -> None:
    check, report = again(lambda old: set_answers(old, images, images.labels_N), ("x", {"max_drop_points": 0.1}))
    assert check.verdict in ("undecided", "fail")
    assert report.regression is not None
    assert report.regression.baseline_top1 == 1
    worst = np.where(np.arange(597) < 300, images.labels_N, 9 - images.labels_N)
    check, report = again(lambda old: set_answers(old, images, worst))
    assert check.verdict == "pass"
    assert report.regression is not None
    assert report.regression.drop_points < -30


def test_images_are_paired_by_name_in_whatever_order_and_number(
    again: Callable[..., tuple[Check, Report]], images: Evaluation, earlier: Report
) -> None:
    chosen = np.random.default_rng(0).permutation(597)[:200]
    names = [images.names[i] for i in chosen] + ["another", "twice", "twice"]
    answers_N = np.concatenate([images.labels_N[chosen], [0, 1, 2]])
    check, report = again(lambda old: set_answers(old, images, answers_N, names))
    assert report.regression is not None
    assert (report.regression.n, report.regression.baseline_top1) == (200, 1.0)
    assert "on 200 images" in check.detail


def test_another_device_is_told_and_only_a_limit_on_latency_makes_it_unmeasured(
    again: Callable[..., tuple[Check, Report]],
) -> None:
    def elsewhere(report: dict[str, Any]) -> None:
        report["device"]["processor"] = "another"

    check, _ = again(elsewhere)
    assert check.verdict == "pass"
    assert "latency is not compared, device processor is" in check.detail
    check, report = again(elsewhere, ("command line", {"max_slowdown": 2.0}))
    assert (check.verdict, report.verdict) == ("unmeasured", "unmeasured")


@pytest.mark.parametrize(("was", "verdict"), [(1e-6, "fail"), (1e6, "pass")])
def test_a_slowdown_beyond_the_limit_fails(
    again: Callable[..., tuple[Check, Report]], was: float, verdict: str
) -> None:
    def timed(report: dict[str, Any]) -> None:
        for artefact in report["latency"]["artefacts"]:
            artefact["ms"]["p50"] = was

    check, _ = again(timed, ("command line", {"max_slowdown": 1.1}))
    assert check.verdict == verdict


def test_noise_larger_than_the_margin_leaves_the_slowdown_undecided(again: Callable[..., tuple[Check, Report]]) -> None:
    def noisy(report: dict[str, Any]) -> None:
        for artefact in report["latency"]["artefacts"]:
            artefact["noise"] = 50.0

    check, _ = again(noisy, ("command line", {"max_slowdown": 1.1}))
    assert check.verdict == "undecided"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda old: old.update(answers=None), "holds no answers"),
        (lambda old: old["answers"].update(classes=["cat", "dog"]), "other classes"),
        (lambda old: old["answers"].update(int8="AAAA"), "cannot be read"),
        (lambda old: old["answers"].update(int8="%"), "cannot be read"),
        (lambda old: old["answers"].update(names=old["answers"]["int8"]), "answers to|cannot be read"),
        (lambda old: old.update(schema="x"), "not valid"),
        (lambda old: old.pop("checks"), "not valid"),
    ],
)
def test_a_report_that_cannot_be_compared_with_is_the_users_mistake(
    again: Callable[..., tuple[Check, Report]], change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        again(change)


def test_other_images_are_the_users_mistake(again: Callable[..., tuple[Check, Report]], images: Evaluation) -> None:
    names = [f"other-{name}" for name in images.names]
    with pytest.raises(UserError, match="is of other images"):
        again(lambda old: set_answers(old, images, images.labels_N, names))


def test_a_file_that_is_not_there_is_the_users_mistake(ort_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        gate_bundle(ort_bundle, baseline=tmp_path / "missing.json")
