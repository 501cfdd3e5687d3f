"""Every kind of image file gives the same pixels in training, in evaluation and in the printed program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from vit_edge.data import datasets
from vit_edge.data.augmentation import crop_box
from vit_edge.data.views import Views
from vit_edge.pixels import decode
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig
from vit_edge.stages.snippet import preparing

SIDE = 24
PLAIN = AugmentConfig(shift=0.0, scale=0.0)
RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (30, 40, 3), dtype=np.uint8)
GREY = RGB[..., 0]
ALPHA = RANDOM.integers(0, 256, GREY.shape, dtype=np.uint8)
SIXTEEN = RANDOM.integers(0, 65536, GREY.shape, dtype=np.uint16)
FLOATS = RANDOM.random(GREY.shape, dtype=np.float32) * 1.2 - 0.1

Save = Callable[[Path], Any]


def turned(orientation: int) -> Save:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return lambda path: Image.fromarray(RGB).save(path, exif=exif)


def palette(path: Path, **options: Any) -> None:
    Image.fromarray(RGB).quantize(200).save(path, **options)


def animation(path: Path) -> None:
    frames = [Image.fromarray(255 - RGB).quantize(64), Image.fromarray(RGB).quantize(64)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50)


def grey_with_a_clear_value(path: Path) -> None:
    Image.fromarray(GREY // 64 * 64).save(path, transparency=64)


FILES: dict[str, Save] = {
    **{f"turned{orientation}.png": turned(orientation) for orientation in range(1, 9)},
    "turned.jpg": turned(6),
    "turned.webp": turned(5),
    "turned.tif": turned(8),
    "rgb.jpg": lambda path: Image.fromarray(RGB).save(path),
    "grey.png": lambda path: Image.fromarray(GREY).save(path),
    "bits.png": lambda path: Image.fromarray(GREY > 127).save(path),
    "cmyk.jpg": lambda path: Image.fromarray(RGB).convert("CMYK").save(path),
    "cmyk.tif": lambda path: Image.fromarray(RGB).convert("CMYK").save(path),
    "sixteen.png": lambda path: Image.fromarray(SIXTEEN).save(path),
    "sixteen.tif": lambda path: Image.fromarray(SIXTEEN).save(path),
    "sixteen.pgm": lambda path: Image.fromarray(SIXTEEN).save(path),
    "float.tif": lambda path: Image.fromarray(FLOATS).save(path),
    "nan.tif": lambda path: Image.fromarray(np.where(GREY > 200, np.float32("nan"), FLOATS)).save(path),
    "palette.png": palette,
    "palette_clear.png": lambda path: palette(path, transparency=3),
    "palette_alpha.png": lambda path: palette(path, transparency=bytes(range(200))),
    "grey_alpha.png": lambda path: Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)]).save(path),
    "grey_clear.png": grey_with_a_clear_value,
    "rgba.png": lambda path: Image.fromarray(np.dstack([RGB, ALPHA])).save(path),
    "rgba.webp": lambda path: Image.fromarray(np.dstack([RGB, ALPHA])).save(path, lossless=True),
    "animation.gif": animation,
    "animation.webp": animation,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with one image in each class, whose name is the file's name."""
    root = tmp_path_factory.mktemp("images")
    for name, save in FILES.items():
        for side in ("train", "val"):
            (root / side / name).mkdir(parents=True)
            save(root / side / name / name)
    return root


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """The names that the printed program defines before it opens its model."""
    defined: dict[str, Any] = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(preparing(), defined)
    return defined


@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("name", FILES)
def test_training_evaluation_and_the_program_see_the_same(
    folder: Path, program: dict[str, Any], name: str, crop: float
) -> None:
    preprocessing = Preprocessing(image_size=SIDE, crop=crop)
    evaluated_HWC = preprocessing.prepare(decode(folder / "val" / name / name))
    train = datasets.find(f"folder:{folder}").load().train
    views = Views(train, np.array([sorted(FILES).index(name)]), preprocessing, PLAIN, seed=0)
    assert np.array_equal(views[(0, 0)][0].permute(1, 2, 0).numpy(), evaluated_HWC)
    with Image.open(folder / "val" / name / name) as image:
        upright = program["to_rgb"](image)
    printed = program["resize_and_cut"](upright, round(SIDE / crop), SIDE, Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(printed), evaluated_HWC)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(folder: Path, orientation: int) -> None:
    expected = {
        1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
        6: RGB[::-1].transpose(1, 0, 2), 7: RGB[::-1, ::-1].transpose(1, 0, 2), 8: RGB.transpose(1, 0, 2)[::-1],
    }[orientation]  # fmt: skip
    name = f"turned{orientation}.png"
    assert np.array_equal(decode(folder / "val" / name / name), expected)


def over_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return (colour * (alpha[..., None] / 255) + 255 * (1 - alpha[..., None] / 255)).round()


@pytest.mark.parametrize(
    ("name", "expected_HWC"),
    [
        ("sixteen.png", np.repeat((SIXTEEN / 257).round()[..., None], 3, -1)),
        ("sixteen.tif", np.repeat((SIXTEEN / 257).round()[..., None], 3, -1)),
        ("sixteen.pgm", np.repeat((SIXTEEN / 257).round()[..., None], 3, -1)),
        ("float.tif", np.repeat((FLOATS * 255.0).clip(0, 255).round()[..., None], 3, -1)),
        ("grey_alpha.png", over_white(np.repeat(GREY[..., None], 3, -1), ALPHA)),
        ("rgba.png", over_white(RGB, ALPHA)),
        ("rgba.webp", over_white(RGB, ALPHA)),
        ("grey_clear.png", np.repeat(np.where(GREY // 64 == 1, 255, GREY // 64 * 64)[..., None], 3, -1)),
    ],
)
def test_depth_and_transparency(folder: Path, name: str, expected_HWC: np.ndarray) -> None:
    assert np.abs(decode(folder / "val" / name / name) - expected_HWC).max() <= 1


def test_an_animation_is_its_first_frame(folder: Path) -> None:
    first = np.asarray(Image.fromarray(255 - RGB).quantize(64).convert("RGB"))
    assert np.array_equal(decode(folder / "val" / "animation.gif" / "animation.gif"), first)


def test_a_cropped_view_is_what_preprocess_makes_of_the_same_box(folder: Path) -> None:
    train = datasets.find(f"folder:{folder}").load().train
    preprocessing, seed, squares = Preprocessing(image_size=SIDE), 5, 0
    views = Views(train, np.arange(len(train)), preprocessing, AugmentConfig(shift=0.0, scale=0.0, crop=0.6), seed)
    for epoch in range(40):
        position = epoch % len(train)
        picture, view_HWC = train.picture(position), views[(epoch, position)][0].permute(1, 2, 0).numpy()
        left, top, right, bottom = crop_box(*picture.size, 0.4, np.random.default_rng([seed, epoch, position]))
        expected = functional.resized_crop(
            picture, top, left, bottom - top, right - left, [SIDE, SIDE], InterpolationMode.BICUBIC
        )
        assert np.array_equal(view_HWC, np.asarray(expected))
        if bottom - top == right - left:
            squares += 1
            assert np.array_equal(view_HWC, preprocessing.prepare(train.image(position)[top:bottom, left:right]))
    assert squares
