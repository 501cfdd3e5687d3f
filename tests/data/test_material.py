"""What a run works on: the splits, and the unlabelled images that a student may learn from instead."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_edge.data import datasets, material
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.pipeline import Pipeline
from vit_edge.recipe import AugmentConfig, DataConfig, DistillationConfig, Recipe, StudentConfig


def photographs(folder: Path, count: int = 5) -> Path:
    for i in range(count):
        path = folder / f"roll {i % 2}·ü" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 14), (i, 0, 0)).save(path)
    return folder


def test_a_student_learns_from_the_train_split_or_from_unlabelled_images(tmp_path: Path) -> None:
    plain = material.load(DataConfig(), 32, None)
    images, indices = plain.student_images()
    assert images is plain.data.train
    assert np.array_equal(indices, plain.splits.train)
    config = DataConfig(unlabelled=str(photographs(tmp_path)), train_images=100)
    found = material.load(config, 32, None)
    images, indices = found.student_images()
    assert sorted(int(images.image(int(i))[0, 0, 0]) for i in indices) == list(range(5))
    assert found.summary() == {"train": 100, "tune": 90, "calibration": 100, "gate": 898, "unlabelled": 5}
    pixels_CHW, label, position = Views(images, indices, found.view, AugmentConfig(), 0)[(0, 3)]
    assert (tuple(pixels_CHW.shape), label, position) == ((3, 32, 32), -1, 3)


def test_unlabelled_images_are_checked_as_labelled_ones_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*none"):
        datasets.unlabelled(tmp_path / "none", False)
    with pytest.raises(UserError, match="holds no images"):
        datasets.unlabelled(tmp_path, False)
    photographs(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot read the image deep/er/broken\.jpg.*\n.*--skip-bad-images"):
        datasets.unlabelled(tmp_path, False)
    assert len(datasets.unlabelled(tmp_path, True)) == 5
    assert "left out 1 unreadable of 6 images" in capsys.readouterr().err


def test_the_students_fingerprint_covers_the_unlabelled_images_and_the_teachers_does_not(tmp_path: Path) -> None:
    photographs(tmp_path / "photographs")
    student = StudentConfig(distillation=DistillationConfig(labels=0.0))
    recipe = Recipe(name="x", data=DataConfig(unlabelled=str(tmp_path / "photographs")), student=student)

    def plans() -> tuple[str, str]:
        pipeline = Pipeline(recipe, tmp_path / "run")
        steps = [pipeline._steps(stage)[0] for stage in ("teacher", "student")]
        return steps[0].plan.fingerprint, steps[1].plan.fingerprint

    before = plans()
    os.utime(next((tmp_path / "photographs").rglob("*.png")), ns=(1, 1))
    after = plans()
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_unlabelled_images_without_a_teacher_have_no_effect() -> None:
    with pytest.raises(ValueError, match=r"data\.unlabelled has no labels to learn from without a teacher"):
        Recipe.model_validate(
            {"name": "x", "teacher": None, "student": {"distillation": None}, "data": {"unlabelled": "folder"}}
        )
