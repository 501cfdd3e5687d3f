"""The images that a run works on: a data set, its splits, and the side of the shared training view."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vit_edge.data import datasets
from vit_edge.data.datasets import DataSet, EncodedImages, Images
from vit_edge.data.splits import Splits, split
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import DataConfig

PIECE = 256


@dataclass(frozen=True)
class Material:
    """image_size: side in pixels of the input of a model that has none of its own. view_size: of the training view."""

    data: DataSet
    splits: Splits
    image_size: int
    view_size: int
    unlabelled: EncodedImages | None = None

    @property
    def classes(self) -> list[str]:
        return self.data.classes

    @property
    def view(self) -> Preprocessing:
        """How an image becomes the training view that teacher and student share, before augmentation."""
        return Preprocessing(image_size=self.view_size)

    def seen_at(self, view_size: int) -> "Material":
        """The same images with a training view of another side."""
        return replace(self, view_size=view_size)

    def student_images(self) -> tuple[Images, np.ndarray]:
        """What the student learns from, and which of them: the unlabelled images, all labelled -1, or the train split."""
        if self.unlabelled is not None:
            return self.unlabelled, np.arange(len(self.unlabelled))
        return self.data.train, self.splits.train

    def tune(self, preprocessing: Preprocessing, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (N, H, W, 3) and labels int64 (N,) of the tune split, or of its first `most`: a random sample."""
        return self._prepared("train", self.splits.tune[:most], preprocessing)

    def tune_pieces(self, preprocessing: Preprocessing, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same, some at a time: what is looked at once need not be in memory."""
        chosen = self.splits.tune[:most]
        for start in range(0, len(chosen), PIECE):
            yield self._prepared("train", chosen[start : start + PIECE], preprocessing)

    def calibration(self, preprocessing: Preprocessing) -> np.ndarray:
        """Images uint8 (N, H, W, 3) of the calibration split, a part of train."""
        return self._prepared("train", self.splits.calibration, preprocessing)[0]

    def calibration_labels(self) -> np.ndarray:
        """int64 (N,) of the same images."""
        return self.data.train.labels_N[self.splits.calibration]

    def gate(self, preprocessing: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (N, H, W, 3) and labels int64 (N,) of the gate split."""
        return self._prepared("gate", self.splits.gate, preprocessing)

    def gate_names(self) -> list[str]:
        return [self.data.gate.name(int(i)) for i in self.splits.gate]

    def summary(self) -> dict[str, int]:
        """How many images each split holds."""
        found = {name: len(getattr(self.splits, name)) for name in ("train", "tune", "calibration", "gate")}
        return found if self.unlabelled is None else {**found, "unlabelled": len(self.unlabelled)}

    def _prepared(self, side: str, indices: np.ndarray, preprocessing: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
        images = self.data.train if side == "train" else self.data.gate
        pixels_NHWC = preprocessing.prepare_all(images.image(int(i)) for i in indices)
        return pixels_NHWC, images.labels_N[indices]


def load(config: DataConfig, image_size: int, data_dir: Path | None) -> Material:
    """Reads the data set that `config` names, and its unlabelled images, and splits it."""
    source = datasets.find(config.spec, data_dir, split_seed=config.split_seed, skip_bad_images=config.skip_bad_images)
    data = source.load()
    splits = split(len(data.train), len(data.gate), config)
    folder = Path(config.unlabelled).expanduser() if config.unlabelled is not None else None
    unlabelled = datasets.unlabelled(folder, config.skip_bad_images) if folder is not None else None
    return Material(data, splits, image_size, image_size, unlabelled)
