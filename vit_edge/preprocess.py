"""The one preprocessing for evaluation, in numpy and Pillow: decode, resize, crop. Normalisation is in the graph.

B batch, H×W image, C = 3 channels (red, green, blue).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
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

    def prepare(self, image_HWC: np.ndarray) -> np.ndarray:
        """Resizes the shorter side to image_size/crop and cuts the centre: uint8 (H, W, 3) → uint8 (size, size, 3)."""
        height, width = image_HWC.shape[:2]
        if height == width == self.image_size and self.crop == 1:
            return image_HWC
        shorter = round(self.image_size / self.crop)
        scale = shorter / min(height, width)
        resized_wh = (max(shorter, round(width * scale)), max(shorter, round(height * scale)))
        resized = Image.fromarray(image_HWC).resize(resized_wh, RESAMPLING[self.interpolation])
        left, top = ((side - self.image_size) // 2 for side in resized.size)
        return np.asarray(resized.crop((left, top, left + self.image_size, top + self.image_size)))

    def prepare_all(self, images: Iterable[np.ndarray]) -> np.ndarray:
        """uint8 (B, size, size, 3) of any iterable of uint8 (H, W, 3)."""
        return np.stack([self.prepare(image) for image in images])


def decode(path: Path) -> np.ndarray:
    """An image file as uint8 (H, W, 3): upright by its EXIF tag, any mode as RGB, transparency over white.

    16-bit and float greys are scaled by their format's full range (65535 or 1.0), never by the image's own.
    Raises UserError that names a file which is no readable image.
    """
    try:
        with Image.open(path) as opened:
            return to_rgb(ImageOps.exif_transpose(opened))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as err:
        raise UserError(f"cannot read the image {path}: {err}", "give a JPEG, PNG, WebP, TIFF or BMP file") from err


def to_rgb(image: Image.Image) -> np.ndarray:
    """A Pillow image of any mode as uint8 (H, W, 3)."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).clip(0, 255).round().astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray((np.asarray(image) * 255).clip(0, 255).round().astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, layer)
    return np.asarray(image.convert("RGB"))


def image_files(folder: Path) -> list[Path]:
    """Every image file below `folder`, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
