"""Training views: augmented uint8 images, each a function of (seed, epoch, image) alone.

That makes a view the same for teacher and student, for one worker or many, and after a killed training goes on.
B batch, H×W image, C = 3 channels.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

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
        self.preprocessing = preprocessing
        self.crops = augment.crop > 0
        self.transform = _transform(augment, preprocessing.image_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int, int]:
        epoch, position = draw
        i = int(self.indices[position])
        pixels_HWC = self.images.image(i)
        if not self.crops:
            pixels_HWC = self.preprocessing.prepare(pixels_HWC)
        if self.transform is None:
            view_HWC = pixels_HWC
        else:
            with _seeded(self.seed, epoch, i):
                view_HWC = np.asarray(self.transform(Image.fromarray(pixels_HWC)))
        return torch.from_numpy(np.array(view_HWC)).permute(2, 0, 1), int(self.images.labels_N[i]), position


class EpochSampler(Sampler[Draw]):
    """Draws every position once an epoch in an order that (seed, epoch) decides."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Draw]:
        order = np.random.default_rng([self.seed, 2, self.epoch]).permutation(self.count)
        return iter([(self.epoch, int(position)) for position in order])


def training_loader(views: Views, batch_size: int, workers: int) -> tuple[DataLoader, EpochSampler]:
    """Batches of views, the last incomplete one left out; set `sampler.epoch` before each epoch."""
    sampler = EpochSampler(len(views), views.seed)
    batch_size = min(batch_size, len(views))
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    return DataLoader(views, batch_size, sampler=sampler, drop_last=True, num_workers=workers, **options), sampler


def _transform(config: AugmentConfig, size: int) -> v2.Compose | None:
    """PIL image → PIL image; None when nothing is to be changed."""
    steps: list[Any] = []
    if config.crop:
        steps.append(
            v2.RandomResizedCrop(size, scale=(1 - config.crop, 1.0), interpolation=v2.InterpolationMode.BICUBIC)
        )
    if config.shift or config.rotate_degrees or config.scale:
        affine = v2.RandomAffine(
            degrees=config.rotate_degrees,
            translate=(config.shift, config.shift),
            scale=(1 - config.scale, 1 + config.scale),
            interpolation=v2.InterpolationMode.BILINEAR,
        )
        steps.append(affine)
    if config.flip:
        steps.append(v2.RandomHorizontalFlip())
    if config.rand_augment:
        from timm.data.auto_augment import rand_augment_transform

        steps.append(rand_augment_transform(f"rand-m{config.rand_augment:g}-n2-mstd0.5-inc1", {}))
    if config.erase:
        steps.append(_Erase(config.erase))
    return v2.Compose(steps) if steps else None


class _Erase:
    """Random erasing (Zhong et al. 2020) with uniform noise, on a PIL image."""

    def __init__(self, probability: float):
        self.erase = v2.RandomErasing(p=probability, value="random")

    def __call__(self, image: Image.Image) -> Image.Image:
        noisy_CHW = self.erase(v2.functional.pil_to_tensor(image).float() / 255 - 0.5)
        return v2.functional.to_pil_image(((noisy_CHW + 0.5).clamp(0, 1) * 255).round().to(torch.uint8))


class _seeded:  # noqa: N801 a context manager, used like a function
    """Python's, numpy's and torch's generators seeded by (seed, epoch, image) inside the context, restored after it."""

    def __init__(self, *key: int):
        self.seed = int(np.random.SeedSequence([k & 0xFFFFFFFF for k in key]).generate_state(1)[0])

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        python, numpy_state, torch_state = self.states
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
