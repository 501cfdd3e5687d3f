"""What one product's int8 alone does to the answers: one float evaluation, from which the rest of the graph is run again at
each product, with what int8 makes of that product's output.

B images of a batch, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge import metrics
from vit_edge.quantization.layerwise import Outcome
from vit_edge.quantization.outputs import written
from vit_edge.quantization.products import Product, beside_channels, parameter, products
from vit_edge.quantization.ranges import Range
from vit_edge.quantization.steps import to_int8, to_uint8

BATCH = 16
"""Images at once, since two evaluations of them are in memory."""
Made = Callable[[Tensor, Tensor], Tensor]
"""A product's output in int8, from its float input and output."""
Ranges = Mapping[str, Sequence[Range]]


def of_inputs(
    floats: GraphModule, on_grid: GraphModule, outcome: Outcome, images_NHWC: np.ndarray, tried: Ranges | None = None
) -> dict[str, list[float]]:
    """By the name of each product that is int8, in the graph's order: KL from float, in nats, with it alone in int8.

    tried: other ranges of the inputs, by the inputs' names, of which each is tried in turn, and no other product; None:
    every product with the range that it has.
    """
    ranges = {name: [found] for name, found in outcome.ranges.items()} if tried is None else tried
    stored = {p.name: parameter(on_grid, p.weight) for p in products(on_grid) if p.name in outcome.scales}
    forks: dict[Node, list[Made]] = {}
    for product in products(floats):
        if product.name in stored and product.inputs[0].name in ranges:
            weight, corrected = stored[product.name], product.name in outcome.corrected
            assert weight is not None
            bias = parameter(floats, product.node.args[2]) if len(product.node.args) > 2 else None
            forks[product.node] = [
                partial(_int8, product, weight, bias, found, outcome.symmetric, corrected)
                for found in ranges[product.inputs[0].name]
            ]
    return _divergences(floats, forks, images_NHWC)


def of_outputs(
    floats: GraphModule, outcome: Outcome, images_NHWC: np.ndarray, float_layers: Sequence[str], tried: Ranges
) -> dict[str, list[float]]:
    """The same with the output of one convolution alone in uint8, for the ranges that are tried, by the outputs' names."""
    forks: dict[Node, list[Made]] = {}
    for node, bounds in written(floats, float_layers).items():
        if node.name in tried:
            forks[node] = [partial(_uint8, found, bounds) for found in tried[node.name]]
    return _divergences(floats, forks, images_NHWC)


def _int8(
    product: Product, weight: Tensor, bias: Tensor | None, found: Range, symmetric: bool, corrected: bool, inputs: Tensor,
    expected: Tensor,
) -> Tensor:  # fmt: skip
    """Its mean corrected where the model corrects the bias."""
    target: Any = product.node.target
    output: Tensor = target(to_int8(inputs, found, symmetric), weight, bias, *product.node.args[3:])
    if corrected:
        output = output + (expected - output).mean(dim=beside_channels(product, output), keepdim=True)
    return output


def _uint8(found: Range, bounds: tuple[float, float], _: Tensor, expected: Tensor) -> Tensor:
    return to_uint8(expected, found, bounds)


@torch.no_grad()
def _divergences(
    floats: GraphModule, forks: Mapping[Node, Sequence[Made]], images_NHWC: np.ndarray
) -> dict[str, list[float]]:
    named = {p.node: p.name for p in products(floats)}
    run = _Forking(floats, forks)
    summed = {node: [0.0] * len(made) for node, made in forks.items()}
    for start in range(0, len(images_NHWC), BATCH):
        batch_BHWC = torch.from_numpy(images_NHWC[start : start + BATCH].copy())
        share = len(batch_BHWC) / len(images_NHWC)
        for node, found in run.divergences(batch_BHWC).items():
            summed[node] = [total + share * one for total, one in zip(summed[node], found, strict=True)]
    return {named[node]: found for node, found in summed.items()}


class _Forking(Interpreter):
    """The float graph, node by node; `divergences` also gives what each fork alone makes of the logits."""

    def __init__(self, floats: GraphModule, forks: Mapping[Node, Sequence[Made]]):
        super().__init__(floats)
        self.nodes = list(floats.graph.nodes)
        self.forks = forks

    def divergences(self, images_BHWC: Tensor) -> dict[Node, list[float]]:
        self.env, self.args_iter = {}, iter([images_BHWC])
        forked: dict[Node, list[np.ndarray]] = {}
        for index, node in enumerate(self.nodes):
            self.env[node] = self.run_node(node)
            if node in self.forks:
                inputs, expected = self.env[node.args[0]], self.env[node]  # type: ignore[index]
                forked[node] = [
                    self._rest(index + 1, self.env | {node: made(inputs, expected)}).numpy()
                    for made in self.forks[node]
                ]
            self._forget(self.env, node)
        float_BK = self._logits(self.env).numpy()
        return {node: [metrics.mean_kl(float_BK, one_BK) for one_BK in found] for node, found in forked.items()}

    def _rest(self, start: int, env: dict[Node, Any]) -> Tensor:
        """The logits, from the values `env` before the node at `start` on."""
        kept, self.env = self.env, env
        for node in self.nodes[start:]:
            env[node] = self.run_node(node)
            self._forget(env, node)
        self.env = kept
        return self._logits(env)

    def _forget(self, env: dict[Node, Any], node: Node) -> None:
        for unused in self.user_to_last_uses.get(node, []):
            env.pop(unused, None)

    def _logits(self, env: dict[Node, Any]) -> Tensor:
        found: Tensor = self.graph.process_outputs(env[self.nodes[-1]])
        return found
