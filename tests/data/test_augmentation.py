"""What is drawn for a view has the distribution that the fields name; each change does what it says to the pixels."""

import math

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from vit_edge.data.augmentation import Augmentation, crop_box
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig

SIDE, DRAWS = 20, 2000
NOTHING = {"shift": 0.0, "scale": 0.0}


def drawn(image_HWC: np.ndarray, count: int = DRAWS, **fields: float) -> list[np.ndarray]:
    augment = Augmentation(AugmentConfig(**{**NOTHING, **fields}), Preprocessing(image_size=len(image_HWC)))
    return [augment(Image.fromarray(image_HWC), np.random.default_rng([1, i])) for i in range(count)]


def dot(y: int, x: int) -> np.ndarray:
    image_HWC = np.zeros((SIDE, SIDE, 3), np.uint8)
    image_HWC[y, x] = 255
    return image_HWC


def test_shifts_are_uniform_whole_pixels_up_to_the_largest() -> None:
    views = drawn(dot(10, 9), shift=0.25)
    places = np.array([np.unravel_index(view[..., 0].argmax(), (SIDE, SIDE)) for view in views]) - (10, 9)
    assert all(view.max() == 255 and (view[..., 0] > 0).sum() == 1 for view in views)
    for shifts in places.T:
        counts = np.bincount(shifts + 5, minlength=11) / DRAWS
        assert len(counts) == 11
        assert np.allclose(counts[1:-1], 0.1, atol=0.03)
        assert np.allclose(counts[[0, -1]], 0.05, atol=0.02)
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.07


def test_half_of_the_views_are_mirrored_and_otherwise_untouched() -> None:
    image_HWC = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    views = drawn(image_HWC, flip=True)
    mirrored = [np.array_equal(view, image_HWC[:, ::-1]) for view in views]
    assert all(turned or np.array_equal(view, image_HWC) for view, turned in zip(views, mirrored, strict=True))
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.04)


def test_sizes_and_angles_are_uniform() -> None:
    disc_HW = np.hypot(*np.mgrid[-49.5:50, -49.5:50]) < 25
    image_HWC = np.repeat((disc_HW * 255).astype(np.uint8)[..., None], 3, -1)
    scales = np.sqrt([view[..., 0].sum() / image_HWC[..., 0].sum() for view in drawn(image_HWC, 600, scale=0.3)])
    assert (scales.min(), scales.max()) == (pytest.approx(0.7, abs=0.02), pytest.approx(1.3, abs=0.02))
    assert (scales.mean(), scales.std()) == (pytest.approx(1, abs=0.03), pytest.approx(0.6 / math.sqrt(12), abs=0.02))
    image_HWC = np.zeros((101, 101, 3), np.uint8)
    image_HWC[48:53, 90:95] = 255
    angles = []
    for view in drawn(image_HWC, 600, rotate_degrees=40):
        y, x = np.average(np.indices((101, 101)).reshape(2, -1), axis=1, weights=view[..., 0].ravel())
        angles.append(math.degrees(math.atan2(y - 50, x - 50)))
    assert (min(angles), max(angles)) == (pytest.approx(-40, abs=2), pytest.approx(40, abs=2))
    assert np.std(angles) == pytest.approx(80 / math.sqrt(12), abs=1.5)


def test_turning_and_scaling_is_what_torchvision_does_with_the_same_numbers() -> None:
    image_HWC = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    config = AugmentConfig(shift=0.2, rotate_degrees=30, scale=0.2)
    view_HWC = Augmentation(config, Preprocessing(image_size=32))(Image.fromarray(image_HWC), np.random.default_rng(3))
    right, down, turn, grow = (2 * np.random.default_rng(3).random(4) - 1).tolist()
    expected = functional.affine(
        Image.fromarray(image_HWC), turn * 30, [round(right * 6.4), round(down * 6.4)], 1 + grow * 0.2, [0.0],
        InterpolationMode.BILINEAR,
    )  # fmt: skip
    assert np.array_equal(view_HWC, np.asarray(expected))


def test_crops_have_inceptions_areas_and_shapes_and_lie_anywhere() -> None:
    boxes = np.array([crop_box(400, 300, 0.3, np.random.default_rng(i)) for i in range(DRAWS)])
    left, top, right, bottom = boxes.T
    width, height = right - left, bottom - top
    assert (boxes[:, :2] >= 0).all()
    assert (bottom.max(), right.max()) <= (300, 400)
    areas, shapes = height * width / 120_000, np.log(width / height) / math.log(4 / 3)
    assert (areas.min(), areas.max()) == (pytest.approx(0.3, abs=0.01), pytest.approx(1, abs=0.04))
    small = areas < 0.5  # larger ones do not fit in every shape and are drawn again
    assert np.quantile(areas[small], 0.5) == pytest.approx(0.4, abs=0.02)
    assert np.quantile(shapes[small], [0.25, 0.5, 0.75]) == pytest.approx([-0.5, 0, 0.5], abs=0.12)
    assert np.mean(top / np.maximum(300 - height, 1)) == pytest.approx(0.5, abs=0.03)


def test_an_image_that_no_crop_fits_is_cut_in_the_middle() -> None:
    assert crop_box(1000, 10, 0.99, np.random.default_rng(0)) == (493, 0, 506, 10)
    assert crop_box(10, 1000, 0.99, np.random.default_rng(0)) == (0, 493, 10, 506)


def test_erasing_puts_uniform_noise_into_a_rectangle_of_some_views() -> None:
    image_HWC = np.full((32, 32, 3), 7, np.uint8)
    views = drawn(image_HWC, 600, erase=0.25)
    erased = [view for view in views if (view != 7).any()]
    assert len(erased) / 600 == pytest.approx(0.25, abs=0.06)
    noise = np.concatenate([view[(view != 7).any(-1)].ravel() for view in erased])
    assert noise.mean() == pytest.approx(127.5, abs=2)
    assert noise.std() == pytest.approx(255 / math.sqrt(12), abs=2)
    assert 0.02 <= np.mean([(view != 7).any(-1).mean() for view in erased]) <= 0.33


def test_rand_augment_changes_views_and_leaves_the_images_alone() -> None:
    image_HWC = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    before = image_HWC.copy()
    views = drawn(image_HWC, 50, rand_augment=9, erase=0.5, flip=True)
    assert np.array_equal(image_HWC, before)
    assert len({view.tobytes() for view in views}) > 40


def test_the_largest_magnitude_of_rand_augment_works() -> None:
    assert len(drawn(np.zeros((SIDE, SIDE, 3), np.uint8), 400, rand_augment=10)) == 400
