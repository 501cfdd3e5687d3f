"""The one preprocessing: every kind of image file to the same RGB bytes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_edge.errors import UserError
from vit_edge.pixels import decode
from vit_edge.preprocess import Preprocessing

RAMP = np.tile(np.linspace(0, 255, 16, dtype=np.uint8), (8, 1))
RGB = np.stack([RAMP, RAMP[:, ::-1], np.full_like(RAMP, 40)], axis=-1)


def saved(tmp_path: Path, image: Image.Image, name: str = "image.png", **options: object) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


def test_rgb_and_grey_come_back_byte_for_byte(tmp_path: Path) -> None:
    assert np.array_equal(decode(saved(tmp_path, Image.fromarray(RGB))), RGB)
    assert np.array_equal(decode(saved(tmp_path, Image.fromarray(RAMP))), np.repeat(RAMP[..., None], 3, -1))


def test_palette_transparency_and_bits(tmp_path: Path) -> None:
    palette = Image.fromarray(RGB).quantize(256)
    assert np.abs(decode(saved(tmp_path, palette)).astype(int) - RGB).max() <= 8
    clear = Image.fromarray(np.dstack([RGB, np.zeros_like(RAMP)]))
    assert (decode(saved(tmp_path, clear)) == 255).all()
    assert set(np.unique(decode(saved(tmp_path, Image.fromarray(RAMP > 127))))) == {0, 255}


def test_sixteen_bits_are_scaled_by_their_full_range(tmp_path: Path) -> None:
    sixteen = Image.fromarray(RAMP.astype(np.uint16) * 257)
    assert np.array_equal(decode(saved(tmp_path, sixteen))[..., 0], RAMP)
    dark = Image.fromarray(np.full((4, 4), 257, np.uint16))
    assert (decode(saved(tmp_path, dark)) == 1).all()


def test_cmyk_is_converted(tmp_path: Path) -> None:
    cmyk = Image.fromarray(RGB).convert("CMYK")
    found = decode(saved(tmp_path, cmyk, "image.jpg", quality=100))
    assert np.abs(found.astype(int) - RGB).mean() < 12


def test_exif_orientation_turns_the_image_upright(tmp_path: Path) -> None:
    image = Image.fromarray(RGB)
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode(saved(tmp_path, image, exif=exif.tobytes())).shape == (16, 8, 3)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"broken\.jpg"):
        decode(broken)


def test_resize_keeps_the_aspect_and_cuts_the_centre() -> None:
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, 16:48] = 255
    assert (Preprocessing(image_size=32).prepare(wide) == 255).all()


def test_crop_share_cuts_the_border_away() -> None:
    framed = np.full((64, 64, 3), 255, np.uint8)
    framed[:4] = framed[-4:] = 0
    assert Preprocessing(image_size=32, crop=0.875).prepare(framed).shape == (32, 32, 3)
    assert Preprocessing(image_size=32, crop=0.5).prepare(framed).min() == 255
    assert Preprocessing(image_size=32).prepare(framed).min() == 0


def test_an_image_of_the_right_size_is_not_touched() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert np.array_equal(Preprocessing(image_size=32).prepare(image), image)
