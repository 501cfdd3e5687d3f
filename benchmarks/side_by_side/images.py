"""The images that everything is calibrated and timed on. N images, C = 3 channels."""

from functools import cache

import numpy as np

SIDE, IMAGES = 224, 64


@cache
def shaded_images() -> np.ndarray:
    """uint8: shaded colours, the same every time."""
    random = np.random.default_rng(0)
    colour = random.uniform(0, 200, (IMAGES, 1, 1, 3))
    shade = random.uniform(0.2, 1.3, (IMAGES, SIDE // 8, SIDE // 8, 3)).repeat(8, axis=1).repeat(8, axis=2)
    return (colour * shade + random.uniform(0, 20, (IMAGES, SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)


def as_planes(images: np.ndarray) -> np.ndarray:
    """float32, what a peer's graph takes; it is not timed."""
    return np.ascontiguousarray((images.astype(np.float32).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5)


def batches(batch: int, planes: bool) -> list[np.ndarray]:
    """Some batches of different images, as uint8 pixels or as normalised planes."""
    images = shaded_images()
    pieces = [images[start : start + batch] for start in range(0, len(images) - batch + 1, batch)][:16]
    return [as_planes(piece) if planes else np.ascontiguousarray(piece) for piece in pieces]
