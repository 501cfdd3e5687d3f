"""Random changes of a training image, drawn with one numpy generator. H×W image, C = 3 channels."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from vit_edge.preprocess import RESAMPLING, Preprocessing, resize
from vit_edge.recipe import AugmentConfig

WIDEST = 4 / 3
TRIES = 10
Box = tuple[int, int, int, int]  # top, left, height, width


class Augmentation:
    """uint8 (H, W, 3) → uint8 (size, size, 3): crop or resize, shift and turn, mirror, RandAugment, erase."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing):
        self.config, self.preprocessing = config, preprocessing
        self.rand_augment = _rand_augment(config.rand_augment) if config.rand_augment else None
        self.erase = v2.RandomErasing(p=1) if config.erase else None

    def __call__(self, image_HWC: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        config, size = self.config, self.preprocessing.image_size
        if config.crop:
            rows, columns = image_HWC.shape[:2]
            top, left, height, width = crop_box(rows, columns, 1 - config.crop, generator)
            cut_HWC = image_HWC[top : top + height, left : left + width]
            view_HWC = resize(cut_HWC, size, size, RESAMPLING[self.preprocessing.interpolation])
        else:
            view_HWC = self.preprocessing.prepare(image_HWC)
        if config.shift or config.rotate_degrees or config.scale:
            view_HWC = _moved(view_HWC, config, generator)
        if config.flip and generator.random() < 0.5:
            view_HWC = view_HWC[:, ::-1]
        if self.rand_augment is not None:
            with _seeded(generator):
                view_HWC = np.asarray(self.rand_augment(Image.fromarray(view_HWC)))
        if self.erase is not None and generator.random() < config.erase:
            view_HWC = _erased(view_HWC, self.erase, generator)
        return view_HWC


def crop_box(height: int, width: int, least_area: float, generator: np.random.Generator) -> Box:
    """Inception's crop: a share of the area uniform in [least_area, 1], log(width / height) uniform up to WIDEST."""
    for area, ratio, y, x in generator.random((TRIES, 4)).tolist():
        pixels = height * width * (least_area + (1 - least_area) * area)
        aspect = WIDEST ** (2 * ratio - 1)
        h, w = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
        if 0 < h <= height and 0 < w <= width:
            return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
    h, w = min(height, round(width * WIDEST)), min(width, round(height * WIDEST))
    return (height - h) // 2, (width - w) // 2, h, w


def _moved(image_HWC: np.ndarray, config: AugmentConfig, generator: np.random.Generator) -> np.ndarray:
    """Turned and scaled about the centre, then shifted by whole pixels, each uniform; black comes in from outside."""
    size = len(image_HWC)
    right, down, turn, grow = (2 * generator.random(4) - 1).tolist()
    right, down = (round(share * config.shift * size) for share in (right, down))
    angle, scale = math.radians(turn * config.rotate_degrees), 1 + grow * config.scale
    cosine, sine, centre = math.cos(angle) / scale, math.sin(angle) / scale, size / 2
    from_x, from_y = centre + right, centre + down
    # For each pixel of the result the place in the image that it comes from.
    inverse = (
        cosine, sine, centre - cosine * from_x - sine * from_y,
        -sine, cosine, centre + sine * from_x - cosine * from_y,
    )  # fmt: skip
    exact = not config.rotate_degrees and not config.scale
    sampling = Image.Resampling.NEAREST if exact else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(image_HWC).transform((size, size), Image.Transform.AFFINE, inverse, sampling))


def _rand_augment(magnitude: float) -> Any:
    """RandAugment (Cubuk et al. 2020) as timm has it: two operations an image, increasing with the magnitude."""
    from timm.data.auto_augment import rand_augment_transform

    return rand_augment_transform(f"rand-m{magnitude:g}-n2-mstd0.5-inc1", {})


def _erased(image_HWC: np.ndarray, erase: v2.RandomErasing, generator: np.random.Generator) -> np.ndarray:
    """Random erasing with uniform noise (Zhong et al. 2020)."""
    with _seeded(generator):
        box = erase.make_params([torch.from_numpy(np.array(image_HWC)).permute(2, 0, 1)])
    top, left, height, width = (box[side] for side in "ijhw")
    erased_HWC = np.array(image_HWC)
    erased_HWC[top : top + height, left : left + width] = generator.integers(
        256, size=(height, width, 3), dtype=np.uint8
    )
    return erased_HWC


@contextmanager
def _seeded(generator: np.random.Generator) -> Iterator[None]:
    """Python's, numpy's and torch's generators, which libraries draw from, seeded from `generator`, restored after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = int(generator.integers(2**32))
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU's too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
