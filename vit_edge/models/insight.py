"""What a model has learnt to see: its filters, its positions, how far it looks (Dosovitskiy et al. 2021, figure 7).

Numbers alone; figures.py draws them. B batch, N patches, T tokens (prefix + N), D width, h heads, L layers, C channels,
P side of a filter in pixels, M components.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer

COMPONENTS = 28
ATTENTION_BYTES = 256 << 20  # of attention maps held at a time
CHANNELS = 3


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters that read the pixels: float64 (M, P, P, C), of norm 1, largest value positive.

    shares_M: of the filters' variance around their mean. count: of the filters.
    """

    components_MPPC: np.ndarray
    shares_M: np.ndarray
    count: int


@dataclass(frozen=True)
class Tokens:
    """The sequence of a ViT: `prefix` tokens before the patches of a grid (rows, columns)."""

    grid: tuple[int, int]
    prefix: int

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Insight:
    """What could be found out. `missing` says why of the parts that are None.

    similarity_RCRC: cosine of each patch position with every other, rows and columns twice.
    distances_Lh: mean attention distance in pixels of the input image. uniform_distance: what it would be if every patch
    attended to all alike.
    """

    filters: Filters | None
    similarity_RCRC: np.ndarray | None
    distances_Lh: np.ndarray | None
    uniform_distance: float
    missing: dict[str, str]


def look(classifier: Classifier, images_NHWC: np.ndarray, device: torch.device) -> Insight:
    """Looks inside a classifier on uint8 images (N, H, W, 3) of its own size; its attention is explicit afterwards."""
    backbone, tokens = classifier.backbone, tokens_of(classifier.backbone)
    conv, positions_ND = pixel_filters(backbone), patch_positions(backbone, tokens)
    distances_Lh = None if tokens is None else attention_distances(classifier, tokens, images_NHWC, device)
    found = {
        "filters": (conv, "no convolution reads the pixels"),
        "positions": (positions_ND, "the architecture has no position embedding of its patches"),
        "attention": (distances_Lh, "the architecture has no attention of every patch to every patch"),
    }
    return Insight(
        filters=None if conv is None else principal_components(conv.weight),
        similarity_RCRC=None
        if positions_ND is None or tokens is None
        else position_similarity(positions_ND, tokens.grid),
        distances_Lh=distances_Lh,
        uniform_distance=0.0 if tokens is None else float(patch_distances(tokens.grid, classifier.image_size).mean()),
        missing={part: why for part, (value, why) in found.items() if value is None},
    )


def pixel_filters(backbone: nn.Module) -> nn.Conv2d | None:
    """The first convolution of the image: a ViT's patch projection, or a CNN's or hybrid's stem."""
    convolutions = (module for module in backbone.modules() if isinstance(module, nn.Conv2d))
    return next((conv for conv in convolutions if conv.in_channels == CHANNELS), None)


def principal_components(filters_DCPP: Tensor, most: int = COMPONENTS) -> Filters:
    """The `most` directions in which the filters differ most."""
    count, channels, height, width = filters_DCPP.shape
    rows = filters_DCPP.detach().cpu().double().reshape(count, -1).numpy()
    _, singular, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    components = directions[:most]
    peaks = components[np.arange(len(components)), np.abs(components).argmax(axis=1)]
    components = components * np.sign(peaks)[:, None]
    shares = np.square(singular) / np.square(singular).sum()
    return Filters(
        components.reshape(-1, channels, height, width).transpose(0, 2, 3, 1), shares[: len(components)], count
    )


def tokens_of(backbone: Any) -> Tokens | None:
    """The token sequence of a ViT, ours or timm's; None for any other architecture."""
    if isinstance(backbone, VisionTransformer):
        return Tokens(backbone.patch_embed.grid, backbone.config.prefix_tokens)
    grid = getattr(getattr(backbone, "patch_embed", None), "grid_size", None)
    prefix = getattr(backbone, "num_prefix_tokens", None)
    return None if grid is None or prefix is None else Tokens(tuple(grid), prefix)


def patch_positions(backbone: Any, tokens: Tokens | None) -> np.ndarray | None:
    """The position embeddings of the patches alone, float64 (N, D); None where there are none."""
    positions_1TD = getattr(backbone, "pos_embed", None)
    if tokens is None or not isinstance(positions_1TD, Tensor) or positions_1TD.ndim != 3:
        return None
    if positions_1TD.shape[1] - tokens.patches not in range(tokens.prefix + 1):
        return None
    return positions_1TD[0, -tokens.patches :].detach().cpu().double().numpy()


def position_similarity(positions_ND: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Cosine of every position with every other: (rows, columns, rows, columns)."""
    units_ND = positions_ND / np.linalg.norm(positions_ND, axis=1, keepdims=True).clip(np.finfo(float).tiny)
    return (units_ND @ units_ND.T).reshape(*grid, *grid)


def attention_distances(
    classifier: Classifier, tokens: Tokens, images_NHWC: np.ndarray, device: torch.device
) -> np.ndarray | None:
    """Mean attention distance of each layer and head in pixels, over all images: float64 (L, h).

    None where no layer attends from every token to every token.
    """
    classifier = classifier.to(device).eval()
    classifier.set_fused_attention(False)
    between_NN = patch_distances(tokens.grid, classifier.image_size).to(device)
    total: Tensor | None = None
    done, batch = 0, 1
    while done < len(images_NHWC):
        pixels = torch.from_numpy(np.ascontiguousarray(images_NHWC[done : done + batch])).permute(0, 3, 1, 2).to(device)
        maps = attention_maps(classifier, pixels, tokens)
        if not maps:
            return None
        means_Lh = torch.stack([mean_distance(map_BhTT, tokens.prefix, between_NN) for map_BhTT in maps]) * len(pixels)
        total = means_Lh if total is None else total + means_Lh
        done += len(pixels)
        batch = max(1, ATTENTION_BYTES // (sum(map_BhTT[0].numel() for map_BhTT in maps) * 4))
    return None if total is None else (total / done).cpu().double().numpy()


@torch.no_grad()
def attention_maps(classifier: Classifier, pixels_BCHW: Tensor, tokens: Tokens) -> list[Tensor]:
    """The weights (B, h, T, T) of each layer that attends from every token to every token, in order."""
    if isinstance(classifier.backbone, VisionTransformer):
        _, record = classifier(pixels_BCHW, intermediates=True)
        return [value for name, value in record.items() if name.endswith(".attention")]
    with attention_of_timm(classifier.backbone) as seen:
        classifier(pixels_BCHW)
    count = tokens.prefix + tokens.patches
    return [weights for weights in seen if weights.ndim == 4 and weights.shape[-2:] == (count, count)]


@contextmanager
def attention_of_timm(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """What timm's layers give their dropout of attention weights, which explicit attention calls."""
    seen: list[Tensor] = []
    layers = [module for name, module in backbone.named_modules() if name.endswith("attn_drop")]
    handles = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def patch_distances(grid: tuple[int, int], image_size: int) -> Tensor:
    """Pixels between the centres of each two patches of a square image: float32 (N, N)."""
    rows, columns = grid
    centres = [
        (row * image_size / rows, column * image_size / columns) for row in range(rows) for column in range(columns)
    ]
    centres_N2 = torch.tensor(centres)
    return torch.cdist(centres_N2, centres_N2, compute_mode="donot_use_mm_for_euclid_dist")


def mean_distance(attention_BhTT: Tensor, prefix: int, between_NN: Tensor) -> Tensor:
    """Attention-weighted mean distance from a patch to the patches, over patches and images: (h,).

    What a patch gives to the prefix tokens, which have no place, is left out and the rest scaled to sum 1.
    """
    among_BhNN = attention_BhTT[..., prefix:, prefix:]
    weights_BhNN = among_BhNN / among_BhNN.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (weights_BhNN * between_NN).sum(dim=-1).mean(dim=(0, 2))


def as_json(insight: Insight, image_size: int) -> dict[str, Any]:
    """The numbers of vit-edge/inspect/1, plain data; a part that is missing is null."""
    filters, similarity, distances = insight.filters, insight.similarity_RCRC, insight.distances_Lh
    return {
        "filters": filters
        and {
            "count": filters.count,
            "components": rounded(filters.components_MPPC),
            "variance_shares": rounded(filters.shares_M),
        },
        "position_similarity": None if similarity is None else rounded(similarity),
        "attention_distance_px": None if distances is None else rounded(distances),
        "uniform_distance_px": None if distances is None else round(insight.uniform_distance, 5),
        "image_size": image_size,
        "missing": insight.missing,
    }


def rounded(numbers: np.ndarray) -> Sequence[Any]:
    """Nested lists with five decimals."""
    return np.round(numbers, 5).tolist()
