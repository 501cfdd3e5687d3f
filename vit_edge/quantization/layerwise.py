"""Layer by layer in the graph's order: each layer's range, rounding and bias, with the layers before it already int8.

One evaluation goes through the graph as int8 with what is decided so far; of the float model it takes the ranges and the
means that calibration recorded. N images, R rows of inputs to a product, O output channels.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.quantization import integers, rounding
from vit_edge.quantization.calibration import Observed
from vit_edge.quantization.products import (
    Product,
    beside_channels,
    parameter,
    products,
    set_parameter,
    tidy,
    why_float,
)
from vit_edge.quantization.ranges import METHODS, Range
from vit_edge.quantization.steps import steps_of, to_int8

ROWS = 4096
"""Rows that a layer's range and rounding are judged on, drawn evenly from the images."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Options:
    """method: of ranges.METHODS, or "output": the one that disturbs the layers' outputs least, tensor by tensor.

    limits: where some tensors are clipped, by name, whatever the method says. symmetric: a runtime has no finer steps
    (Range.finer).
    """

    method: str = "mse"
    limits: Mapping[str, float] = field(default_factory=dict)
    compensate: bool = False
    correct_bias: bool = False
    symmetric: bool = False

    @property
    def looks(self) -> bool:
        """Whether the layers' inputs decide anything."""
        return self.method == "output" or self.compensate or self.correct_bias


@dataclass
class Outcome:
    """What was decided: ranges and their methods by node name, weight scales (O,) by product name.

    symmetric: as the options say.
    """

    ranges: dict[str, Range] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    compensated: set[str] = field(default_factory=set)
    corrected: set[str] = field(default_factory=set)
    symmetric: bool = False


@torch.no_grad()
def decide(
    graph_module: GraphModule, images_NHWC: Tensor, observed: Observed, options: Options,
    float_layers: Collection[str] = (),
) -> Outcome:  # fmt: skip
    """Puts a float graph on int8's grid, in place: weights and biases are changed, quantizing is not added.

    observed: of this graph or a copy; the means are of these very images.
    """
    run = _Run(graph_module, observed, options, float_layers)
    return run.through(images_NHWC) if options.looks else run.at_once()


class _Run:
    def __init__(
        self, graph_module: GraphModule, observed: Observed, options: Options, float_layers: Collection[str]
    ):  # fmt: skip
        self.target, self.means, self.options = graph_module, observed.means, options
        self.statistics = {node.name: found for node, found in observed.statistics.items()}
        self.int8 = Interpreter(graph_module)
        self.outcome = Outcome(symmetric=options.symmetric)
        found = [p for p in products(graph_module) if why_float(p, float_layers) is None]
        self.products = {p.node: p for p in found}
        self.readers: dict[Node, list[Product]] = {}
        for product in found:
            self.readers.setdefault(product.inputs[0], []).append(product)
        self.quantized: dict[Node, Tensor] = {}

    def through(self, images_NHWC: Tensor) -> Outcome:
        self.int8.env, self.int8.args_iter = {}, iter([images_NHWC])
        for node in list(self.target.graph.nodes):
            product = self.products.get(node)
            self.int8.env[node] = self._layer(product) if product else self.int8.run_node(node)
            self._forget(node)
        return self._finished()

    def at_once(self) -> Outcome:
        """Without a look at the images: ranges by one method, weights to the nearest step."""
        for product in self.products.values():
            (source,) = product.inputs
            self.outcome.ranges[source.name] = self._by_method(source, self.options.method)
            self._round(product, None)
        return self._finished()

    def _finished(self) -> Outcome:
        for name, found in self.statistics.items():
            limit = self.options.limits.get(name)
            self.outcome.ranges.setdefault(name, found.range("mse") if limit is None else found.at(limit))
        tidy(self.target)
        return self.outcome

    def _forget(self, node: Node) -> None:
        for unused in self.int8.user_to_last_uses.get(node, []):
            self.int8.env.pop(unused, None)
            self.quantized.pop(unused, None)

    def _layer(self, product: Product) -> Tensor:
        """The product's int8 output, once its range, weight and bias are decided."""
        (source,) = product.inputs
        if source not in self.quantized:
            self.outcome.ranges[source.name] = self._range(source)
            self.quantized[source] = self._to_int8(self.int8.env[source], self.outcome.ranges[source.name])
        inputs = self.quantized[source]
        self._round(product, inputs)
        output = self._output(product, inputs, self.outcome.ranges[source.name])
        if self.options.correct_bias:
            output += self._correct(product, output)
        return output

    def _range(self, source: Node) -> Range:
        statistics = self.statistics[source.name]
        if self.options.method != "output" or statistics.pixels or source.name in self.options.limits:
            return self._by_method(source, self.options.method)
        ranges = {method: statistics.range(method) for method in METHODS}
        values = _sample(self.int8.env[source], ROWS // 4)
        losses = {method: self._loss(source, values, found) for method, found in ranges.items()}
        best = min(losses, key=lambda method: losses[method])
        self.outcome.methods[source.name] = best
        return ranges[best]

    def _by_method(self, source: Node, method: str) -> Range:
        statistics = self.statistics[source.name]
        if source.name in self.options.limits:
            self.outcome.methods[source.name] = "logits"
            return statistics.at(self.options.limits[source.name])
        self.outcome.methods[source.name] = "exact" if statistics.pixels else method
        return statistics.range(method)

    def _loss(self, source: Node, values: Tensor, found: Range) -> float:
        """Squared error of all outputs that read the tensor, each as a share of its power."""
        error, total = self._to_int8(values, found) - values, 0.0
        for product in self.readers[source]:
            made = _called(product, error, self._weight(product))
            power = _called(product, values, self._weight(product))
            total += float(made.square().sum() / power.square().sum().clamp_min(1e-12))
        return total

    def _round(self, product: Product, inputs: Tensor | None) -> None:
        weight = self._weight(product)
        scales_O = rounding.weight_scales(weight)
        rows_RI = _rows(product, weight, inputs) if self.options.compensate and inputs is not None else None
        if rows_RI is None:
            rounded = rounding.nearest(weight, scales_O)
        else:
            rounded = rounding.compensated(weight.flatten(1), scales_O, rows_RI).reshape(weight.shape)
            self.outcome.compensated.add(product.name)
        self.outcome.scales[product.name] = scales_O
        set_parameter(self.target, product.node, 1, rounded)

    def _correct(self, product: Product, output: Tensor) -> Tensor:
        """Moves the bias by the mean difference from float in each output channel (Nagel et al. 2019, §4.2)."""
        others = beside_channels(product, output)
        moved_O = self.means[product.node.name] - output.mean(dim=others)
        args = product.node.args
        bias = parameter(self.target, args[2]) if len(args) > 2 else None
        set_parameter(self.target, product.node, 2, moved_O if bias is None else bias + moved_O)
        self.outcome.corrected.add(product.name)
        return moved_O.reshape([1 if d in others else -1 for d in range(output.ndim)])

    def _weight(self, product: Product) -> Tensor:
        weight = parameter(self.target, product.node.args[1])
        assert weight is not None
        return weight

    def _output(self, product: Product, inputs: Tensor, found: Range) -> Tensor:
        bias = parameter(self.target, product.node.args[2]) if len(product.node.args) > 2 else None
        weight = self._weight(product)
        if product.kind == "linear" and integers.run_here():
            return integers.linear(
                inputs, steps_of(found, self.options.symmetric), weight, self.outcome.scales[product.name], bias
            )
        return _called(product, inputs, weight, bias)

    def _to_int8(self, values: Tensor, found: Range) -> Tensor:
        return to_int8(values, found, self.options.symmetric)


def _called(product: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    target: Any = product.node.target
    return target(inputs, weight, bias, *product.node.args[3:])


def _sample(values: Tensor, rows: int) -> Tensor:
    """Every so many images, so that about so many positions are left, and 8 images at least."""
    positions = values[0].numel() // (values.shape[1] if values.ndim == 4 else values.shape[-1])
    return values[:: max(1, len(values) // max(8, rows // positions))]


def _rows(product: Product, weight: Tensor, inputs: Tensor) -> Tensor | None:
    """Inputs as the flattened weight reads them (R, I·h·w); None for grouped convolutions, which are left as they are."""
    if product.kind == "linear":
        rows = inputs.flatten(0, -2)
        return rows[:: max(1, len(rows) // ROWS)]
    arguments: list[Any] = list(product.node.args[3:])
    stride, padding, dilation, groups = (arguments + [1, 0, 1, 1][len(arguments) :])[:4]
    if groups != 1 or weight.ndim != 4 or isinstance(padding, str):
        return None
    if weight.shape[2:] == (1, 1):
        pixels = inputs.permute(0, 2, 3, 1)[:, :: _first(stride), :: _first(stride)].flatten(0, 2)
        return pixels[:: max(1, len(pixels) // ROWS)]
    few = _sample(inputs, ROWS)
    return torch.nn.functional.unfold(few, weight.shape[2:], dilation, padding, stride).transpose(1, 2).flatten(0, 1)


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)
