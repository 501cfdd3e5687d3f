"""A student that learns from images without labels what its teacher says of them."""

from pathlib import Path

import pytest
from PIL import Image

from tests.training.small import MODEL, TRAINING, metrics_of, small
from vit_edge.data import datasets
from vit_edge.errors import UserError
from vit_edge.pipeline import Pipeline


def folder_of_digits(path: Path, count: int) -> Path:
    """Photographs of the training side's digits, 16 px, in no class folders."""
    images = datasets.find("digits").load().train
    path.mkdir()
    for i in range(count):
        Image.fromarray(images.image(i)).resize((16, 16), Image.Resampling.BICUBIC).save(path / f"{i:04}.png")
    return path


def test_it_learns_from_the_teacher_alone(tmp_path: Path) -> None:
    photographs = folder_of_digits(tmp_path / "photographs", 640)
    recipe = small(
        data__unlabelled=str(photographs),
        data__train_images=800,
        augment={"shift": 0.1, "mixup": 0.2},
        teacher__training=TRAINING | {"epochs": 15},
        student__model=MODEL,
        student__training=TRAINING | {"epochs": 15},
        student__distillation={"labels": 0.0, "kl": 1.0},
    )
    pipeline = Pipeline(recipe, tmp_path / "run", "cpu")
    pipeline.run("student")
    assert pipeline.metrics("student")["images"]["unlabelled"] == 640
    assert pipeline.metrics("teacher")["tune_top1"] > 0.7
    assert metrics_of(tmp_path / "run")[-1]["tune_top1"] > 0.4


def test_labels_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no labels to learn from: set student.distillation.labels to 0"):
        small(data__unlabelled=str(tmp_path))
