"""The teacher's cache: replayed bit for bit, compact, dropped when it is of something else, refused where it is not enough."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.small import metrics_of, same_weights, small
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.pipeline import Pipeline
from vit_edge.recipe import DistillationConfig
from vit_edge.stages import student
from vit_edge.training import teacher_cache
from vit_edge.training.teacher_cache import TOP, TeacherCache

KEY = {"teacher": "abc", "augmentation": {"flip": False}}


def distil(run: Path, cache: Path | None = None, **settings: object) -> Pipeline:
    pipeline = Pipeline(small(**settings), run, "cpu", teacher_cache=cache)
    pipeline.run("student")
    return pipeline


def test_a_replay_ends_with_the_same_weights_and_asks_no_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distil(tmp_path / "run", augment={"shift": 0.1, "mixup": 0.3})
    (tmp_path / "filled").mkdir()
    (tmp_path / "run" / "student").rename(tmp_path / "filled" / "student")
    monkeypatch.setattr(models, "load", lambda folder: pytest.fail("the teacher was loaded"))
    distil(tmp_path / "run", augment={"shift": 0.1, "mixup": 0.3})
    assert same_weights(tmp_path / "filled", tmp_path / "run")
    assert "teacher's logits come from" in capsys.readouterr().err


def test_the_cached_answers_are_those_of_the_live_teacher_in_half_precision(tmp_path: Path) -> None:
    distil(tmp_path / "cached")
    distil(tmp_path / "live", student__distillation__cache=False)
    assert not (tmp_path / "live" / "teacher_cache").exists()
    cached, live = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in ("cached", "live"))
    assert cached == pytest.approx(live, rel=2e-2)
    assert cached[0] == pytest.approx(live[0], rel=1e-3)


def test_another_student_replays_the_same_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distil(tmp_path / "run")
    monkeypatch.setattr(models, "load", lambda folder: pytest.fail("the teacher was loaded"))
    distil(tmp_path / "run", student__model={"name": "mobilenetv4_conv_small_035"})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"augment": {"shift": 0.2}}, "augmentation"),
        ({"teacher__training__epochs": 2}, "teacher"),
        ({"data__train_images": 200}, "splits"),
    ],
)
def test_what_is_of_something_else_is_dropped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict, named: str
) -> None:
    distil(tmp_path / "run")
    before = (tmp_path / "run" / "teacher_cache" / "epoch_0000.npy").read_bytes()
    distil(tmp_path / "run", **settings)
    said = capsys.readouterr().err
    assert "are of another " in said
    assert named in said.split("are of another ")[1].splitlines()[0]
    assert (tmp_path / "run" / "teacher_cache" / "epoch_0000.npy").read_bytes() != before


def test_the_logits_of_another_data_set_are_dropped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TeacherCache(tmp_path, KEY | {"data set": "a"}, 4, 10).keep(0, np.arange(4), np.ones((4, 10), np.float32))
    assert TeacherCache(tmp_path, KEY | {"data set": "a"}, 4, 10).read(0, np.arange(4)) is not None
    assert capsys.readouterr().err == ""
    assert TeacherCache(tmp_path, KEY | {"data set": "b"}, 4, 10).read(0, np.arange(4)) is None
    assert "are of another data set" in capsys.readouterr().err


def test_more_epochs_ask_for_what_is_missing_only(tmp_path: Path) -> None:
    distil(tmp_path / "run")
    files = tmp_path / "run" / "teacher_cache"
    before = {path.name: path.stat().st_mtime_ns for path in files.glob("*.npy")}
    distil(tmp_path / "run", student__training__epochs=8)
    assert sorted(path.name for path in files.glob("*.npy")) == [f"epoch_{i:04d}.npy" for i in range(8)]
    assert all((files / name).stat().st_mtime_ns == written for name, written in before.items())


@pytest.mark.parametrize("classes", [10, 100, 101, 1000])
def test_what_is_kept_is_read_again(tmp_path: Path, classes: int) -> None:
    logits_BK = np.random.default_rng(0).normal(0, 4, (5, classes)).astype(np.float32)
    cache = TeacherCache(tmp_path, KEY, 20, classes)
    positions_B = np.array([3, 19, 0, 7, 8])
    kept_BK = cache.keep(2, positions_B, logits_BK)
    assert cache.read(2, np.array([3, 4])) is None
    assert cache.read(1, positions_B) is None
    again_BK = TeacherCache(tmp_path, KEY, 20, classes).read(2, positions_B[::-1].copy())
    assert again_BK is not None
    assert np.array_equal(again_BK, kept_BK[::-1])
    probabilities, kept = (torch.softmax(torch.from_numpy(v).double(), 1).numpy() for v in (logits_BK, kept_BK))
    if classes <= teacher_cache.WHOLE:
        np.testing.assert_allclose(kept_BK, logits_BK, rtol=1e-3, atol=1e-3)
    else:
        order = np.argsort(-probabilities, axis=1)
        top, rest = order[:, :TOP], order[:, TOP:]
        np.testing.assert_allclose(
            np.take_along_axis(kept, top, 1), np.take_along_axis(probabilities, top, 1), rtol=2e-2
        )
        rest_mass = np.take_along_axis(probabilities, rest, 1).sum(1)
        np.testing.assert_allclose(np.take_along_axis(kept, rest, 1).sum(1), rest_mass, rtol=2e-2)
        assert np.ptp(np.take_along_axis(kept_BK, rest, 1), axis=1).max() == 0
    size = (tmp_path / "epoch_0002.npy").stat().st_size
    assert size < 20 * 2 * min(classes, 2 * TOP + 1 if classes > 100 else 100) + 200


def test_half_a_row_is_no_row(tmp_path: Path) -> None:
    cache = TeacherCache(tmp_path, KEY, 4, 10)
    cache.keep(0, np.arange(4), np.ones((4, 10), np.float32))
    rows = np.load(tmp_path / "epoch_0000.npy", mmap_mode="r+")
    rows[2, 5:] = np.nan
    rows.flush()
    assert TeacherCache(tmp_path, KEY, 4, 10).read(0, np.array([2])) is None
    assert TeacherCache(tmp_path, KEY, 4, 10).read(0, np.array([1, 3])) is not None


def test_a_loss_that_needs_what_is_not_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"features are not in the teacher's cache.*distillation.cache to false"):
        small(student__distillation={"features": 1.0, "cache": True})
    for name in ("dist", "standardised"):
        weights = {"dist": 0.0, "kl": 0.0, name: 1.0}
        with pytest.raises(
            UserError, match=rf"distillation.{name} needs every logit, and of 1000 .*\n.*cache to false"
        ):
            student._keeps_logits(DistillationConfig(**weights, cache=True), 1000)
        assert student._keeps_logits(DistillationConfig(**weights, cache=True), 100)
        assert not student._keeps_logits(DistillationConfig(**weights), 1000)
        assert student._keeps_logits(DistillationConfig(**weights), 100)
    assert student._keeps_logits(DistillationConfig(kl=1.0, dist=0.0), 1000)
    assert not student._keeps_logits(DistillationConfig(cache=False), 10)


def test_a_disk_that_is_too_small_is_said_before_training(tmp_path: Path) -> None:
    cache = TeacherCache(tmp_path, KEY, 10**9, 1000)
    with pytest.raises(UserError, match=r"needs \d+\.\d GB .* are free"):
        cache.check_space(1000)
