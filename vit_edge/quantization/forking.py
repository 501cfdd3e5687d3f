"""What one product's int8 alone does to the answers: one float evaluation, from which the rest of the graph is run again at
each product, with that product's int8 output.

B images of a batch, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge import metrics
from vit_edge.quantization.layerwise import Outcome, to_int8
from vit_edge.quantization.products import Product, parameter, products
from vit_edge.quantization.ranges import Range

BATCH = 16
"""Images at once, since two evaluations of them are in memory."""


@torch.no_grad()
def divergences(
    floats: GraphModule, on_grid: GraphModule, outcome: Outcome, images_NHWC: np.ndarray,
    tried: Mapping[str, Sequence[Range]] | None = None,
) -> dict[str, list[float]]:  # fmt: skip
    """By the name of each product that is int8, in the graph's order: KL from float, in nats, with it alone in int8.

    tried: other ranges of the inputs, by the inputs' names, of which each is tried in turn, and no other product; None:
    every product with the range that it has.
    """
    ranges = {name: [found] for name, found in outcome.ranges.items()} if tried is None else tried
    run, summed = _Forking(floats, on_grid, outcome, ranges), dict[str, list[float]]()
    for start in range(0, len(images_NHWC), BATCH):
        batch_BHWC = torch.from_numpy(images_NHWC[start : start + BATCH].copy())
        share = len(batch_BHWC) / len(images_NHWC)
        for name, found in run.divergences(batch_BHWC).items():
            before = summed.get(name, [0.0] * len(found))
            summed[name] = [total + share * one for total, one in zip(before, found, strict=True)]
    return summed


class _Forking(Interpreter):
    """The float graph, node by node; `divergences` also gives what each int8 product alone makes of the logits."""

    def __init__(
        self, floats: GraphModule, on_grid: GraphModule, outcome: Outcome, ranges: Mapping[str, Sequence[Range]]
    ):
        super().__init__(floats)
        self.nodes = list(floats.graph.nodes)
        self.outcome, self.ranges = outcome, ranges
        stored = {p.name: p for p in products(on_grid)}
        found = [p for p in products(floats) if p.name in outcome.scales and p.inputs[0].name in ranges]
        self.products = {p.node: p for p in found}
        self.weights = {p.name: parameter(on_grid, stored[p.name].weight) for p in found}

    def divergences(self, images_BHWC: Tensor) -> dict[str, list[float]]:
        self.env, self.args_iter = {}, iter([images_BHWC])
        forked: dict[str, list[np.ndarray]] = {}
        for index, node in enumerate(self.nodes):
            self.env[node] = self.run_node(node)
            if node in self.products:
                product = self.products[node]
                outputs = (self._int8(product, found) for found in self.ranges[product.inputs[0].name])
                forked[product.name] = [self._rest(index + 1, self.env | {node: output}).numpy() for output in outputs]
            self._forget(self.env, node)
        float_BK = self._logits(self.env).numpy()
        return {name: [metrics.mean_kl(float_BK, one_BK) for one_BK in found] for name, found in forked.items()}

    def _int8(self, product: Product, found: Range) -> Tensor:
        """The product's output in int8 from float inputs, its mean corrected where the model corrects the bias."""
        args, _ = self.fetch_args_kwargs_from_env(product.node)
        target: Any = product.node.target
        output = target(to_int8(args[0], found), self.weights[product.name], *args[2:])
        if product.name in self.outcome.corrected:
            axis = 1 if product.kind == "conv" else output.ndim - 1
            others = [dim for dim in range(output.ndim) if dim != axis]
            output = output + (self.env[product.node] - output).mean(dim=others, keepdim=True)
        return output

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
