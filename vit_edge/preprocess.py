"""The one preprocessing for evaluation: resize, crop. Normalisation is in the graph. (Pillow: pixels.py.)

B batch, H×W image, C = 3 channels (red, green, blue).
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, Strict

from vit_edge.errors import UserError
from vit_edge.settings import Settings

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
Triple = Annotated[tuple[float, float, float], Strict(False)]


class Preprocessing(Settings):
    """How an image file becomes the model's input; mean and std are of pixels scaled to [0, 1]."""

    image_size: int = Field(gt=0, description="side of the square input in pixels")
    crop: float = Field(1.0, gt=0, le=1, description="share of the resized image's side that the centre crop keeps")
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def fit(self, image: "Image.Image") -> "Image.Image":
        """Resizes the shorter side to image_size/crop and cuts the centre: an RGB image of size × size pixels."""
        from vit_edge import pixels

        shorter = round(self.image_size / self.crop)
        return pixels.resize_and_cut(image, shorter, self.image_size, pixels.RESAMPLING[self.interpolation])

    def prepare(self, image_HWC: np.ndarray) -> np.ndarray:
        """`fit` for an array: uint8 (H, W, 3) → uint8 (size, size, 3)."""
        if image_HWC.shape[:2] == (self.image_size, self.image_size) and self.crop == 1:
            return image_HWC
        from PIL import Image

        return np.asarray(self.fit(Image.fromarray(image_HWC)))

    def prepare_all(self, images: Iterable[np.ndarray]) -> np.ndarray:
        """uint8 (B, size, size, 3) of any iterable of uint8 (H, W, 3)."""
        return np.stack([self.prepare(image) for image in images])


def image_files(folder: Path) -> list[Path]:
    """Every image file below `folder`, sorted by path; links are followed, hidden files and folders are left out."""
    return list(_images_below(folder, ()))


def _images_below(folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
    """above: real paths of the folders that led here; a link back to one of them is not followed."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = [(entry.name, entry.is_dir()) for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as err:
        raise UserError(f"cannot list {folder}: {err.strerror}", "make the folder readable, or remove it") from err
    for name, is_folder in sorted(entries):
        if is_folder:
            yield from _images_below(folder / name, (*above, real))
        elif name.lower().endswith(IMAGE_SUFFIXES):
            yield folder / name
