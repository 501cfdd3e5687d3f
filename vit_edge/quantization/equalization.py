"""Scales of channels moved exactly from what makes a tensor to what reads it: the float function stays the same.

A tensor is easy on int8 when its channels are of like size. Where everything between its writers and its readers
keeps a channel's positive factor, each channel is divided by s in the writers and multiplied by s in the readers:
a norm and the layers after it, v and the output projection, convolutions through identity, ReLU, pooling, gates and
residual additions, depthwise ones included (Nagel et al. 2019, §4.1; Xiao et al. 2023, eq. 4).

C channels of a tensor, O and I output and input channels of a weight.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.quantization.batches import batches
from vit_edge.quantization.layout import Layout, channel_axis, followed, layout_of_output
from vit_edge.quantization.products import Product, parameter, products, set_parameter, tidy, why_float  # fmt: skip

aten = torch.ops.aten
SMALLEST = 1e-3
"""Channels below this share of the largest count as so large: a dead channel's scale would be without bound."""


@dataclass
class Group:
    """Tensors that one scale a channel goes through: who writes them (products and plain norms) and who reads them."""

    writers: list[Node] = field(default_factory=list)
    readers: list[Product] = field(default_factory=list)

    @property
    def tensors(self) -> list[Node]:
        """What the readers read."""
        return list(dict.fromkeys(reader.inputs[0] for reader in self.readers))

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(reader.name for reader in self.readers))


def groups(graph_module: GraphModule, float_layers: Collection[str] = ()) -> list[Group]:
    """Every group with a reader that becomes int8, in the graph's order."""
    tracer = _Tracer(graph_module)
    for node in graph_module.graph.nodes:
        tracer.visit(node)
    int8 = {p.name for p in products(graph_module) if why_float(p, float_layers) is None}
    return [g for g in tracer.groups() if any(reader.name in int8 for reader in g.readers)]


def scales(graph_module: GraphModule, found: list[Group], largest: Mapping[str, Tensor], alpha: float) -> list[Tensor]:
    """s for each channel of each group: max|x|^α / max|w|^(1-α) (Xiao et al. 2023, eq. 4), about 1 on average.

    largest: magnitude (C,) of each tensor of `found` on calibration images. α = 1 puts all of it on the weights. A
    depthwise weight takes any scale without loss: a group that depthwise convolutions alone read has α = 1.
    """
    made = []
    for group in found:
        x_C = torch.stack([largest[tensor.name] for tensor in group.tensors]).amax(dim=0).double()
        weights = [_columns(graph_module, reader) for reader in group.readers if not is_depthwise(graph_module, reader)]
        strength = alpha if weights else 1.0
        s_C = _floored(x_C) ** strength
        if weights:
            s_C /= _floored(torch.stack(weights).amax(dim=0).double()) ** (1 - strength)
        made.append((s_C / s_C.log().mean().exp()).float())
    return made


def apply(graph_module: GraphModule, group: Group, s_C: Tensor) -> None:
    """Divides what the writers write by s and multiplies what the readers read by s, in the parameters alone."""
    for writer in group.writers:
        first = 2 if writer.target == aten.layer_norm.default else 1
        for index in (first, first + 1):
            value = parameter(graph_module, writer.args[index]) if len(writer.args) > index else None
            if value is None and writer.target == aten.layer_norm.default and index == first:
                value = torch.ones_like(s_C)
            if value is not None:
                set_parameter(graph_module, writer, index, value / s_C.reshape(-1, *[1] * (value.ndim - 1)))
    for reader in group.readers:
        weight = parameter(graph_module, reader.weight)
        assert weight is not None
        axis = 0 if is_depthwise(graph_module, reader) else 1
        shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
        set_parameter(graph_module, reader.node, 1, weight * s_C.reshape(shape))


def equalize(
    graph_module: GraphModule, largest: Mapping[str, Tensor], alpha: float, float_layers: Collection[str] = ()
) -> None:
    """Every group of the graph with the strength α, in place. largest: as `largest_inputs` gives it."""
    found = groups(graph_module, float_layers)
    for group, s_C in zip(found, scales(graph_module, found, largest, alpha), strict=True):
        apply(graph_module, group, s_C)
    tidy(graph_module)


def largest_inputs(graph_module: GraphModule, found: list[Group], images_NHWC: np.ndarray) -> dict[str, Tensor]:
    """The largest magnitude in each channel (C,) of what the groups' readers read, by node name."""
    axes = {reader.inputs[0]: channel_axis(reader)[0] for group in found for reader in group.readers}
    watcher = _Largest(graph_module, axes)
    with torch.no_grad():
        for images_BHWC in batches(images_NHWC):
            watcher.run(images_BHWC)
    return {node.name: found_C for node, found_C in watcher.found.items()}


class _Largest(Interpreter):
    def __init__(self, graph_module: GraphModule, axes: Mapping[Node, int]):
        super().__init__(graph_module)
        self.axes, self.found = axes, dict[Node, Tensor]()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self.axes:
            others = [axis for axis in range(value.ndim) if axis != self.axes[n]]
            seen_C = value.abs().amax(dim=others)
            self.found[n] = torch.maximum(self.found[n], seen_C) if n in self.found else seen_C
        return value


def is_depthwise(graph_module: GraphModule, product: Product) -> bool:
    """Whether each output channel reads its own input channel and no other."""
    weight = parameter(graph_module, product.weight)
    assert weight is not None
    return product.kind == "conv" and _conv_groups(product.node) == len(weight) and weight.shape[1] == 1


def _columns(graph_module: GraphModule, reader: Product) -> Tensor:
    """The largest magnitude of a weight in each input channel, relative to its output channel's own, (I,)."""
    weight = parameter(graph_module, reader.weight)
    assert weight is not None
    rows = weight.detach().abs().flatten(2) if weight.ndim > 2 else weight.detach().abs()[..., None]
    return rows.amax(dim=(0, 2))


def _floored(magnitudes: Tensor) -> Tensor:
    return magnitudes.clamp_min(max(float(magnitudes.max()) * SMALLEST, 1e-12))


def _conv_groups(node: Node) -> int:
    index = 6
    return int(node.args[index]) if len(node.args) > index else 1  # type: ignore[arg-type]


class _Tracer:
    """Which tensors share a scale: union-find over the nodes whose channels are followed."""

    def __init__(self, graph_module: GraphModule):
        self.graph_module = graph_module
        self.products = {p.node: p for p in products(graph_module) if p.kind in ("linear", "conv")}
        weights = [p.weight.target for p in self.products.values()]
        self.shared = {target for target in weights if weights.count(target) > 1}
        self.layouts: dict[Node, Layout] = {}
        self.parents: dict[Node, Node] = {}
        self.pinned: set[Node] = set()
        self.found: dict[Node, Group] = {}

    def visit(self, node: Node) -> None:
        product = self.products.get(node)
        if product is not None and product.weight.target not in self.shared:
            self._read(product)
            self._write(node)
        elif _is_plain_norm(node):
            self._pin(node.args[0])
            self._write(node)
        else:
            self._pass(node)

    def groups(self) -> list[Group]:
        merged: dict[Node, Group] = {}
        for root, group in self.found.items():
            into = merged.setdefault(self._root(root), Group())
            into.writers += group.writers
            into.readers += group.readers
        pinned = {self._root(node) for node in self.pinned}
        return [group for root, group in merged.items() if root not in pinned and group.readers]

    def _read(self, product: Product) -> None:
        (source,) = product.inputs
        grouped = product.kind == "conv" and _conv_groups(product.node) > 1
        readable = not grouped or is_depthwise(self.graph_module, product)
        if source in self.layouts and readable and self.layouts[source] == channel_axis(product):
            self.found[self._root(source)].readers.append(product)
        else:
            self._pin(source)

    def _write(self, node: Node) -> None:
        self.layouts[node] = layout_of_output(node)
        self.parents[node] = node
        self.found[node] = Group(writers=[node])

    def _pass(self, node: Node) -> None:
        sources = [source for source in node.all_input_nodes if source in self.layouts]
        layout, carriers = followed(node, self.layouts)
        for source in sources:
            if layout is None or source not in carriers:
                self._pin(source)
        if layout is not None:
            self.layouts[node], self.parents[node] = layout, carriers[0]
            for other in carriers[1:]:
                self._join(carriers[0], other)

    def _join(self, a: Node, b: Node) -> None:
        a, b = self._root(a), self._root(b)
        if a is b:
            return
        self.parents[b] = a
        gone = self.found.pop(b)
        self.found[a].writers += gone.writers
        self.found[a].readers += gone.readers

    def _pin(self, node: object) -> None:
        if isinstance(node, Node) and node in self.layouts:
            self.pinned.add(node)

    def _root(self, node: Node) -> Node:
        while self.parents[node] is not node:
            node = self.parents[node]
        return node


def _is_plain_norm(node: Node) -> bool:
    """A layer norm over the last axis."""
    return node.target == aten.layer_norm.default and len(node.args[1]) == 1  # type: ignore[arg-type]
