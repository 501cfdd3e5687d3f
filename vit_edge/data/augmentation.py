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

from vit_edge.pixels import RESAMPLING
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig

WIDEST = 4 / 3
TRIES = 10
MOST_MAGNITUDE = 9.99
"""At 10 timm posterizes to 0 bits, which Pillow 13 refuses."""
Box = tuple[int, int, int, int]  # left, top, right, bottom, as Pillow has it


class Augmentation:
    """RGB image → uint8 (size, size, 3): crop or resize, shift and turn, RandAugment, mirror, erase."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing):
        self.config, self.preprocessing = config, preprocessing
        self.rand_augment = _rand_augment(config.rand_augment) if config.rand_augment else None
        self.erase = v2.RandomErasing(p=1) if config.erase else None

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> np.ndarray:
        config, size = self.config, self.preprocessing.image_size
        if config.crop:
            box = crop_box(image.width, image.height, 1 - config.crop, generator)
            view = image.crop(box).resize((size, size), RESAMPLING[self.preprocessing.interpolation])
        else:
            view = self.preprocessing.fit(image)
        if config.shift or config.rotate_degrees or config.scale:
            view = _moved(view, config, generator)
        if self.rand_augment is not None:
            with _seeded(generator):
                view = self.rand_augment(view)
        view_HWC = np.asarray(view)
        if config.flip and generator.random() < 0.5:
            view_HWC = view_HWC[:, ::-1]
        if self.erase is not None and generator.random() < config.erase:
            view_HWC = _erased(view_HWC, self.erase, generator)
        return view_HWC


def crop_box(width: int, height: int, least_area: float, generator: np.random.Generator) -> Box:
    """Inception's crop: a share of the area uniform in [least_area, 1], log(width / height) uniform up to WIDEST."""
    for area, ratio, y, x in generator.random((TRIES, 4)).tolist():
        pixels = height * width * (least_area + (1 - least_area) * area)
        aspect = WIDEST ** (2 * ratio - 1)
        h, w = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
        if 0 < h <= height and 0 < w <= width:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    h, w = min(height, round(width * WIDEST)), min(width, round(height * WIDEST))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _moved(image: Image.Image, config: AugmentConfig, generator: np.random.Generator) -> Image.Image:
    """Turned and scaled about the centre, then shifted by whole pixels, each uniform; black comes in from outside."""
    size = image.width
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
    return image.transform((size, size), Image.Transform.AFFINE, inverse, sampling)


def _rand_augment(magnitude: float) -> Any:
    """RandAugment (Cubuk et al. 2020) as timm has it: two operations an image, increasing with the magnitude."""
    from timm.data.auto_augment import rand_augment_transform

    return rand_augment_transform(f"rand-m{magnitude:g}-n2-mstd0.5-inc1", {"magnitude_max": MOST_MAGNITUDE})


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
