"""Features judged without training: a linear probe in closed form on a few images of each class (vit-spec §1).

N images, D feature dimensions, K classes. A quick look at features, no measure of a trained classifier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_edge.data.datasets import Images
from vit_edge.errors import UserError
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer
from vit_edge.progress import progress

BATCH = 64
LEAST_DEVIATION = 1e-5


@dataclass(frozen=True)
class Row:
    """Top-1 of each draw with `shots` training images a class."""

    shots: int
    top1: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.top1))

    @property
    def spread(self) -> float:
        """Standard deviation over the draws, of a sample (n - 1); 0 of a single draw."""
        return float(np.std(self.top1, ddof=1)) if len(self.top1) > 1 else 0.0


def ridge(features_ND: np.ndarray, targets_NK: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """W (D, K) and intercept (K,) that minimise ‖XW + b - Y‖² + penalty·‖W‖², the intercept free of the penalty.

    W = (XᵀX + λI)⁻¹XᵀY of the centred X and Y; with fewer images than dimensions the equal Xᵀ(XXᵀ + λI)⁻¹Y.
    """
    mean_D, mean_K = features_ND.mean(axis=0), targets_NK.mean(axis=0)
    X, Y = features_ND - mean_D, targets_NK - mean_K
    if len(X) < X.shape[1]:
        weights_DK = X.T @ np.linalg.solve(X @ X.T + penalty * np.eye(len(X)), Y)
    else:
        weights_DK = np.linalg.solve(X.T @ X + penalty * np.eye(X.shape[1]), X.T @ Y)
    return weights_DK, mean_K - mean_D @ weights_DK


def draw(labels_N: np.ndarray, classes: Sequence[str], most: int, seed: Sequence[int]) -> np.ndarray:
    """Positions in `labels_N` of `most` random images of each class: int64 (most, K), so that rows are shots.

    Raises UserError when a class has fewer.
    """
    random = np.random.default_rng(seed)
    chosen = []
    for k, name in enumerate(classes):
        places = np.flatnonzero(labels_N == k)
        if len(places) < most:
            raise UserError(
                f"the class {name!r} has {len(places)} training images, {most} shots need as many",
                "ask for fewer with --shots, or give a data set with more images",
            )
        chosen.append(random.permutation(places)[:most])
    return np.stack(chosen, axis=1)


def few_shot(
    train_ND: np.ndarray, train_labels_N: np.ndarray, test_ND: np.ndarray, test_labels_N: np.ndarray, *, classes: int,
    penalty: float,
) -> float:  # fmt: skip
    """Top-1 on the test images of the probe that is fitted on the training images.

    Both are standardised by the training images' mean and deviation in each dimension, so that one penalty suits the
    features of any model, as in the paper's own few-shot evaluation (google-research/big_vision, fewshot_lsr).
    """
    mean_D, std_D = train_ND.mean(axis=0), train_ND.std(axis=0) + LEAST_DEVIATION
    weights_DK, intercept_K = ridge((train_ND - mean_D) / std_D, np.eye(classes)[train_labels_N], penalty)
    scores_NK = (test_ND - mean_D) / std_D @ weights_DK + intercept_K
    return float((scores_NK.argmax(axis=1) == test_labels_N).mean())


def features(classifier: Classifier, images: Images, indices: np.ndarray, device: torch.device) -> np.ndarray:
    """What the classifier's head reads of the images at `indices`: float64 (N, D), in their order."""
    classifier = classifier.to(device).eval()
    prepare, parts = classifier.preprocessing.prepare_all, []
    with progress("features", len(indices), unit="images") as advance:
        for start in range(0, len(indices), BATCH):
            pixels_BHWC = prepare(images.image(int(i)) for i in indices[start : start + BATCH])
            pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).to(device)
            parts.append(head_input(classifier, pixels_BCHW).double().cpu().numpy())
            advance(len(pixels_BHWC))
    return np.concatenate(parts)


@torch.inference_mode()
def head_input(classifier: Classifier, pixels_BCHW: Tensor) -> Tensor:
    """The features (B, D) before the head: the readout's, with DeiT's distillation token beside the class token."""
    backbone: Any = classifier.backbone
    if isinstance(backbone, VisionTransformer):
        _, record = classifier(pixels_BCHW, intermediates=True)
        distilled = [record["encoded"][:, 1]] if backbone.dist_token is not None else []
        return torch.cat([record["features"], *distilled], dim=1)
    if not hasattr(backbone, "forward_head"):
        raise UserError(
            f"{type(backbone).__name__} does not give its features apart from its head",
            "probe another architecture",
        )
    maps = backbone.forward_features(classifier.normalise(pixels_BCHW))
    return backbone.forward_head(maps, pre_logits=True).flatten(1)
