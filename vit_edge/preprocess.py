"""The one preprocessing for evaluation, in numpy and Pillow: decode, resize, crop. Normalisation is in the graph.

B batch, H×W image, C = 3 channels (red, green, blue).
"""

import os
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field, Strict

from vit_edge.errors import UserError
from vit_edge.settings import Settings

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
Triple = Annotated[tuple[float, float, float], Strict(False)]


class Preprocessing(Settings):
    """How an image file becomes the model's input; mean and std are of pixels scaled to [0, 1]."""

    image_size: int = Field(gt=0, description="side of the square input in pixels")
    crop: float = Field(1.0, gt=0, le=1, description="share of the resized image's side that the centre crop keeps")
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def fit(self, image: Image.Image) -> Image.Image:
        """Resizes the shorter side to image_size/crop and cuts the centre: an RGB image of size × size pixels."""
        shorter = round(self.image_size / self.crop)
        return resize_and_cut(image, shorter, self.image_size, RESAMPLING[self.interpolation])

    def prepare(self, image_HWC: np.ndarray) -> np.ndarray:
        """`fit` for an array: uint8 (H, W, 3) → uint8 (size, size, 3)."""
        if image_HWC.shape[:2] == (self.image_size, self.image_size) and self.crop == 1:
            return image_HWC
        return np.asarray(self.fit(Image.fromarray(image_HWC)))

    def prepare_all(self, images: Iterable[np.ndarray]) -> np.ndarray:
        """uint8 (B, size, size, 3) of any iterable of uint8 (H, W, 3)."""
        return np.stack([self.prepare(image) for image in images])


def decode(source: Path | bytes, name: str | None = None) -> np.ndarray:
    """An image file, or one's content, as uint8 (H, W, 3): see `to_rgb`."""
    return np.asarray(open_rgb(source, name))


def open_rgb(source: Path | bytes, name: str | None = None) -> Image.Image:
    """An image file, or one's content, as an RGB image: see `to_rgb`.

    Raises UserError that names a file (`name`, or its path) which is no readable image.
    """
    try:
        with Image.open(source if isinstance(source, Path) else BytesIO(source)) as opened:
            return to_rgb(opened)
    except Exception as err:  # a decoder of Pillow's may raise anything on a broken file
        reason = " ".join((str(err) or type(err).__name__).split())
        raise UserError(
            f"cannot read the image {name or source!s}: {reason}", "replace it by a JPEG, PNG, WebP, TIFF or BMP file"
        ) from err


# The two functions below need numpy and Pillow alone: vit_edge/stages/snippet.py copies them into its program.


def to_rgb(image: Image.Image) -> Image.Image:
    """A Pillow image upright by its EXIF tag, of any mode as RGB, transparency over white.

    16-bit and float greys are scaled by their format's full range (65535 or 1.0), never by the image's own.
    Of an animation it is the first frame.
    """
    image.load()
    if image.getexif().get(0x0112, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        white = 1.0 if image.mode == "F" else 65535
        grey_HW = np.nan_to_num(np.asarray(image, dtype=np.float64) * (255 / white))
        image = Image.fromarray(grey_HW.clip(0, 255).round().astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer)
    return image if image.mode == "RGB" else image.convert("RGB")


def resize_and_cut(image: Image.Image, shorter: int, size: int, resampling: Image.Resampling) -> Image.Image:
    """Resizes the shorter side to `shorter` pixels and cuts the centre, size × size pixels."""
    if min(image.size) != shorter:
        scale = shorter / min(image.size)
        width, height = (max(shorter, round(side * scale)) for side in image.size)
        image = image.resize((width, height), resampling)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


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
