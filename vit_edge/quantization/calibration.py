"""Ranges of activations, recorded on real images of the calibration split: a superset for every lowering.

B batch, H×W image; images are uint8 (B, H, W, 3) as `preprocess.Preprocessing` makes them.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.errors import UserError
from vit_edge.quantization.products import Product, products

aten = torch.ops.aten
BINS = 4096
STEPS = 127  # of int8 on each side of zero
CANDIDATES = np.linspace(0.2, 1.0, 81)
PIXEL_CHAIN = {aten.to.dtype, aten._to_copy.default, aten.permute.default, aten.sub.Tensor}


@dataclass(frozen=True)
class Range:
    """What calibration saw of a tensor: smallest and largest value, and the magnitude at which int8 clips."""

    low: float
    high: float
    limit: float

    @property
    def scale(self) -> float:
        """Of symmetric int8."""
        return self.limit / STEPS


class Statistics:
    """A tensor's extremes and a histogram of its magnitudes, whose span doubles when a larger one comes."""

    def __init__(self) -> None:
        self.low, self.high, self.span = np.inf, -np.inf, 0.0
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def update(self, values: torch.Tensor) -> None:
        values = values.detach().float()
        low, high = (float(extreme) for extreme in values.aminmax())
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        if not np.isfinite(largest) or largest == 0:
            return
        self.span = self.span or largest
        while largest > self.span:
            self.counts = torch.cat([self.counts.reshape(-1, 2).sum(1), torch.zeros(BINS // 2, dtype=torch.float64)])
            self.span *= 2
        self.counts += torch.histc(values.abs(), BINS, 0, self.span).cpu()


def minmax(statistics: Statistics) -> float:
    """Clips nothing that calibration saw."""
    return max(-statistics.low, statistics.high)


def least_error(statistics: Statistics) -> float:
    """The limit with the least mean squared error of rounding and clipping together (Banner et al. 2019, eq. 2)."""
    width = statistics.span / BINS
    magnitudes = (np.arange(BINS) + 0.5) * width
    weights = statistics.counts.numpy()
    limits = minmax(statistics) * CANDIDATES
    errors = [weights @ (magnitudes - _rounded(magnitudes, limit)) ** 2 for limit in limits]
    return float(limits[int(np.argmin(errors))])


METHODS: dict[str, Callable[[Statistics], float]] = {"minmax": minmax, "mse": least_error}


def calibrate(
    graph_module: GraphModule, images_NHWC: np.ndarray, *, minimum_images: int, method: str = "mse", batch: int = 32
) -> dict[str, Range]:
    """Ranges by node name of the unquantized exported graph: all that any lowering might quantize.

    Inputs of linear and conv, outputs of conv, both operands of products of activations. The pixels (the graph's
    input minus 128) get their exact range: int8 holds each of them without error.
    Raises UserError for images that cannot be calibrated on and for a model with NaN.
    """
    check_images(images_NHWC, minimum_images)
    check_weights(graph_module)
    recorder = _Recorder(graph_module, recorded_nodes(products(graph_module)))
    with torch.no_grad():
        for start in range(0, len(images_NHWC), batch):
            logits = recorder.run(torch.from_numpy(np.ascontiguousarray(images_NHWC[start : start + batch])))
            _check_logits(logits)
    return {node.name: _range(node, statistics, method) for node, statistics in recorder.statistics.items()}


def recorded_nodes(found: list[Product]) -> list[Node]:
    """The nodes whose values any lowering might quantize, in order and each once."""
    nodes = (node for p in found for node in (*p.inputs, *([p.node] if p.kind == "conv" else [])))
    return list(dict.fromkeys(nodes))


def check_images(images_NHWC: np.ndarray, minimum: int) -> None:
    """Refuses fewer than `minimum` images, counting neither copies nor images of one colour."""
    assert images_NHWC.dtype == np.uint8
    useful = [image for image in images_NHWC if (image != image[:1, :1]).any()]
    distinct = len(set(digests(useful)))
    if distinct < minimum:
        raise UserError(
            f"calibration has {distinct} usable images (of {len(images_NHWC)}; copies and images of one colour "
            f"are not counted), expected at least {minimum}",
            "give more training images: data.calibration_images, or lower int8.minimum_images if you must",
        )


def check_weights(graph_module: GraphModule) -> None:
    """Refuses a model with a weight that is not a finite number."""
    for name, weight in [*graph_module.named_parameters(), *graph_module.named_buffers()]:
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise UserError(
                f"the model's weight {name} holds NaN or infinity", "train the student again, or give other weights"
            )


def refuse_gate_images(calibration_NHWC: np.ndarray, gate_NHWC: np.ndarray) -> None:
    """Refuses calibration images that the gate judges on, by their pixels: the verdict would be flattered."""
    shared = len(set(digests(calibration_NHWC)) & set(digests(gate_NHWC)))
    if shared:
        raise UserError(
            f"{shared} calibration images are also images of the gate, expected none",
            "give a data set whose splits share no image, or remove the copies",
        )


def digests(images: Any) -> Iterator[bytes]:
    """A digest of each image's pixels and shape."""
    for image in images:
        yield hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).digest()


class _Recorder(Interpreter):
    def __init__(self, graph_module: GraphModule, nodes: list[Node]):
        super().__init__(graph_module)
        self.statistics = {node: Statistics() for node in nodes}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node in self.statistics:
            self.statistics[node].update(value)
        return value


def _check_logits(logits_BK: torch.Tensor) -> None:
    if not torch.isfinite(logits_BK).all():
        raise UserError(
            "the model gives NaN or infinite logits on calibration images",
            "train the student again with a lower learning rate, or give other weights",
        )


def _range(node: Node, statistics: Statistics, method: str) -> Range:
    if holds_pixels(node):
        return Range(-128.0, 127.0, float(STEPS))
    if statistics.span == 0:
        return Range(0.0, 0.0, 1.0)
    return Range(float(statistics.low), float(statistics.high), METHODS[method](statistics))


def holds_pixels(node: Node) -> bool:
    """Whether the node's value is the graph's uint8 input, moved and shifted by 128 but not scaled."""
    shifted = False
    while node.op == "call_function" and node.target in PIXEL_CHAIN:
        if node.target == aten.sub.Tensor:
            if shifted or node.args[1] != 128:
                return False
            shifted = True
        node = node.args[0]  # type: ignore[assignment]
    return shifted and node.op == "placeholder"


def _rounded(magnitudes: np.ndarray, limit: float) -> np.ndarray:
    step = limit / STEPS
    return np.minimum(np.round(magnitudes / step), STEPS) * step
