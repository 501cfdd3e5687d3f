"""Training views: augmented uint8 images, each a function of (seed, epoch, image) alone.

That makes a view the same for teacher and student, for one worker or many, and after a killed training goes on.
B batch, H×W image, C = 3 channels.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vit_edge.data.augmentation import Augmentation
from vit_edge.data.datasets import Images
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig

Draw = tuple[int, int]  # epoch, position in the split


class Views(Dataset):
    """Item (epoch, position) is (uint8 (3, H, W), label, position) of a split of a data set."""

    def __init__(
        self, images: Images, indices: np.ndarray, preprocessing: Preprocessing, augment: AugmentConfig, seed: int
    ):
        self.images, self.indices, self.seed = images, indices, seed
        self.augmentation = Augmentation(augment, preprocessing)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int, int]:
        epoch, position = draw
        i = int(self.indices[position])
        generator = np.random.default_rng([self.seed, epoch, i])
        view_HWC = self.augmentation(self.images.picture(i), generator)
        pixels_CHW = torch.from_numpy(np.ascontiguousarray(view_HWC.transpose(2, 0, 1)))
        return pixels_CHW, int(self.images.labels_N[i]), position


class EpochSampler(Sampler[Draw]):
    """Draws positions once an epoch in an order that (seed, epoch) decides: `count` of them, from the one at `skip` on."""

    def __init__(self, views: int, count: int, seed: int):
        self.views, self.count, self.seed = views, count, seed
        self.epoch = self.skip = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Draw]:
        order = np.random.default_rng([self.seed, 2, self.epoch]).permutation(self.views)
        return iter([(self.epoch, int(position)) for position in order[self.skip : self.count]])


def training_loader(views: Views, batch_size: int, parts: int, workers: int) -> tuple[DataLoader, EpochSampler]:
    """Whole batches of views, each in so many parts; set `sampler.epoch` and `sampler.skip` before each epoch."""
    sampler = EpochSampler(len(views), len(views) // batch_size * batch_size, views.seed)
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    return DataLoader(views, batch_size // parts, sampler=sampler, num_workers=workers, **options), sampler
