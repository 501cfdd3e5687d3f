"""The figures of insight.py's numbers as PNG files, drawn by matplotlib, which is loaded when the first is drawn.

L layers, h heads, M components, P side of a filter in pixels, C channels, R×C grid of patches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.errors import UserError
from vit_edge.models.insight import Filters, Insight

DPI = 150
COLUMNS = 7


def draw(insight: Insight, folder: Path, *, title: str, image_size: int) -> list[Path]:
    """Writes filters.png, positions.png and attention.png, as far as there is something to draw; returns their paths."""
    drawn = []
    if insight.filters is not None:
        drawn.append(draw_filters(insight.filters, folder / "filters.png", title))
    if insight.similarity_RCRC is not None:
        drawn.append(draw_positions(insight.similarity_RCRC, folder / "positions.png", title))
    if insight.distances_Lh is not None:
        path, uniform_px = folder / "attention.png", insight.uniform_distance
        drawn.append(
            draw_distances(insight.distances_Lh, path, title=title, image_size=image_size, uniform_px=uniform_px)
        )
    return drawn


def draw_filters(filters: Filters, path: Path, title: str) -> Path:
    """Each component as an image of its own range, the first at the top left."""
    count = len(filters.components_MPPC)
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    with figure(path, (columns, 1.25 * rows + 0.6)) as canvas:
        axes = canvas.subplots(rows, columns, squeeze=False).flatten()
        for axis, component_PPC, share in zip(axes, filters.components_MPPC, filters.shares_M, strict=False):
            axis.imshow(as_picture(component_PPC), interpolation="nearest")
            axis.set_title(f"{share:.1%}", fontsize=7, pad=2)
        for axis in axes:
            axis.axis("off")
        canvas.suptitle(f"{title}: principal components of {filters.count} filters, share of variance", fontsize=8)
    return path


def as_picture(component_PPC: np.ndarray) -> np.ndarray:
    """A component as colours in [0, 1], zero in the middle."""
    return 0.5 + component_PPC / (2 * np.abs(component_PPC).max().clip(np.finfo(float).tiny))


def draw_positions(similarity_RCRC: np.ndarray, path: Path, title: str) -> Path:
    """A grid of grids: at each patch's place, how similar its position is to every other."""
    rows, columns = similarity_RCRC.shape[:2]
    mosaic = np.full((rows * (rows + 1) - 1, columns * (columns + 1) - 1), np.nan)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (rows + 1), column * (columns + 1)
            mosaic[top : top + rows, left : left + columns] = similarity_RCRC[row, column]
    with figure(path, (6.4, 6.0)) as canvas:
        axis = canvas.subplots()
        shown = axis.imshow(mosaic, vmin=min(0.0, float(np.nanmin(mosaic))), vmax=1, interpolation="nearest")
        axis.set_xticks(
            [column * (columns + 1) + (columns - 1) / 2 for column in range(columns)], range(1, columns + 1)
        )
        axis.set_yticks([row * (rows + 1) + (rows - 1) / 2 for row in range(rows)], range(1, rows + 1))
        axis.tick_params(labelsize=6, length=0)
        axis.set_xlabel("patch's column")
        axis.set_ylabel("patch's row")
        canvas.colorbar(shown, ax=axis, label="cosine similarity", shrink=0.85)
        canvas.suptitle(f"{title}: similarity of position embeddings", fontsize=9)
    return path


def draw_distances(distances_Lh: np.ndarray, path: Path, *, title: str, image_size: int, uniform_px: float) -> Path:
    """One dot a head, layers from left to right, and a line where attention to all patches alike would be."""
    layers = np.repeat(np.arange(1, len(distances_Lh) + 1), distances_Lh.shape[1])
    with figure(path, (6.4, 4.2)) as canvas:
        axis = canvas.subplots()
        axis.scatter(layers, distances_Lh.flatten(), s=18, alpha=0.8)
        axis.set_xticks(range(1, len(distances_Lh) + 1))
        axis.axhline(uniform_px, linestyle="--", linewidth=1, color="grey", label="attention to all patches alike")
        axis.set_ylim(0, 1.1 * max(uniform_px, float(distances_Lh.max())))
        axis.legend(loc="lower right", fontsize=8)
        axis.set_xlabel("layer")
        axis.set_ylabel(f"mean attention distance, pixels of {image_size}")
        axis.grid(alpha=0.3)
        canvas.suptitle(f"{title}: mean attention distance of each head", fontsize=9)
    return path


@contextmanager
def figure(path: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """A matplotlib figure without a window, written to `path` when the context ends."""
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise UserError(
            "the figures are drawn by matplotlib, which is not installed", 'pip install "vit-edge[train]"'
        ) from err
    canvas = Figure(figsize=inches, layout="constrained")
    yield canvas
    canvas.savefig(path, dpi=DPI)
