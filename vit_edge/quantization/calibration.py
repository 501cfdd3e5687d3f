"""Ranges of activations, recorded on real images of the calibration split: a superset for every lowering.

B batch, H×W image; images are uint8 (B, H, W, 3) as `preprocess.Preprocessing` makes them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.errors import UserError
from vit_edge.quantization.batches import batches
from vit_edge.quantization.products import Product, beside_channels, products
from vit_edge.quantization.ranges import Statistics

aten = torch.ops.aten
VIEWS = {aten.permute.default, aten.unflatten.int, aten.flatten.using_ints, aten.reshape.default, aten.view.default}
CASTS = {aten.to.dtype, aten._to_copy.default}


@dataclass(frozen=True)
class Observed:
    """statistics: of each tensor that a lowering might quantize. means: of what each linear and conv makes, over images
    and places (O,), by node name."""

    statistics: dict[Node, Statistics]
    means: dict[str, Tensor]


@torch.no_grad()
def observe(graph_module: GraphModule, images_NHWC: np.ndarray) -> Observed:
    """What a graph does with images.

    Statistics are of inputs of linear and conv, outputs of conv, both operands of products of activations. The pixels
    (the graph's input minus 128) get their exact range: int8 holds each of them without error.
    Raises UserError for logits that are not finite.
    """
    recorder = _Recorder(graph_module, products(graph_module))
    for images_BHWC in batches(images_NHWC):
        _check_logits(recorder.run(images_BHWC))
    return Observed(recorder.statistics, {name: mean.value_O.float() for name, mean in recorder.means.items()})


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


def check_labels(labels_N: np.ndarray, classes: Sequence[str]) -> None:
    """Refuses images of a single class where the model knows several: its ranges would be of that class alone."""
    shown = np.unique(labels_N)
    if len(shown) == 1 < len(classes):
        raise UserError(
            f"all {len(labels_N)} calibration images are of the class {classes[int(shown[0])]!r}, "
            f"expected images of all {len(classes)} classes",
            "give training images of the other classes, or more with data.calibration_images",
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


class _Mean:
    """Of what comes in parts, each with its own number of values (O,)."""

    def __init__(self) -> None:
        self.value_O, self.count = torch.zeros(()), 0

    def add(self, mean_O: Tensor, count: int) -> None:
        self.count += count
        self.value_O = self.value_O + (mean_O - self.value_O) * (count / self.count)


class _Recorder(Interpreter):
    def __init__(self, graph_module: GraphModule, found: list[Product]):
        super().__init__(graph_module)
        self.statistics = {node: Statistics(pixels=holds_pixels(node)) for node in recorded_nodes(found)}
        self.weighted = {p.node: p for p in found if p.kind in ("linear", "conv")}
        self.means: dict[str, _Mean] = {}

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node in self.statistics:
            self.statistics[node].update(value)
        if node in self.weighted:
            mean_O = value.mean(dim=beside_channels(self.weighted[node], value)).double()
            self.means.setdefault(node.name, _Mean()).add(mean_O, value.numel() // len(mean_O))
        return value


def _check_logits(logits_BK: Tensor) -> None:
    if not torch.isfinite(logits_BK).all():
        raise UserError(
            "the model gives NaN or infinite logits on calibration images",
            "train the student again with a lower learning rate, or give other weights",
        )


def holds_pixels(node: Node) -> bool:
    """Whether the node's value is the graph's uint8 input, cut, moved and shifted by 128 but not scaled."""
    shifts = []
    while node.op == "call_function" and node.target in VIEWS | CASTS | {aten.sub.Tensor}:
        if node.target == aten.sub.Tensor:
            shifts.append(node.args[1])
        node = node.args[0]  # type: ignore[assignment]
    return shifts == [128] and node.op == "placeholder"
