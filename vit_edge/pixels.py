"""Image files as pixels: decode, resize, cut. The only module of the base that needs Pillow, which no gate does.

H×W image, C = 3 channels (red, green, blue).
"""

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vit_edge.errors import UserError

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


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
