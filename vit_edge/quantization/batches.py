"""Images in batches that the processor's caches hold the activations of: a larger one computes slower, a smaller one
spends its time between operators."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

PIXELS, FEWEST, MOST = 8 * 224 * 224, 4, 128


def batches(images_NHWC: np.ndarray) -> Iterator[Tensor]:
    """uint8 (B, H, W, 3), in order; the last batch may be smaller."""
    size = max(FEWEST, min(MOST, PIXELS // max(1, images_NHWC[0, ..., 0].size)))
    for start in range(0, len(images_NHWC), size):
        yield torch.from_numpy(np.array(images_NHWC[start : start + size]))
