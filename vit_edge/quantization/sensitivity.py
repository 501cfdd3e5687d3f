"""What each product's int8 costs the answers, and what it can save: the proxy that a search goes by.

A cost is the KL divergence from float, in nats, of the model with that product alone in int8, on calibration images that
nothing was fitted to. N images, K classes.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from vit_edge import metrics
from vit_edge.quantization.choice import Chosen
from vit_edge.quantization.layerwise import to_int8
from vit_edge.quantization.products import Product, parameter, products, set_parameter, tidy
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.quantization.work import multiply_adds

IMAGES, BATCH = 64, 16
"""Images that costs are measured on; so many at once, since two evaluations of them are in memory."""
SPARED, LEVERAGE, NOTICED = 0.1, 10.0, 1e-5
"""The first or the last product is left in float when that takes away this share of the divergence at least, so many
times its own share of the work, and so many nats."""


@dataclass(frozen=True)
class Cost:
    """Of a product in int8: divergence that it causes alone, and multiply-adds of an image that it does."""

    kl: float
    multiply_adds: int


@torch.no_grad()
def costs(chosen: Chosen) -> dict[str, Cost]:
    """Of every product that is int8, by name, in the graph's order.

    One float evaluation; at each product it forks: the rest of the graph is run again with that product's int8 output.
    """
    images_NHWC = chosen.held_NHWC[:IMAGES]
    work = multiply_adds(chosen.floats, images_NHWC[:1])
    run, summed = _Forking(chosen), dict.fromkeys(chosen.outcome.scales, 0.0)
    for start in range(0, len(images_NHWC), BATCH):
        batch_BHWC = torch.from_numpy(images_NHWC[start : start + BATCH].copy())
        for name, found in run.divergences(batch_BHWC).items():
            summed[name] += found * len(batch_BHWC) / len(images_NHWC)
    return {name: Cost(max(0.0, total), work[name]) for name, total in summed.items()}


def kl(chosen: Chosen) -> float:
    """Divergence of the whole int8 model from float, on the images that nothing was fitted to."""
    int8_NK = logits(Simulation(chosen.on_grid, chosen.outcome.ranges, chosen.float_layers).run, chosen.held_NHWC)
    return metrics.mean_kl(chosen.float_NK, int8_NK)


def ends_for_float(chosen: Chosen) -> dict[str, str]:
    """The patch projection or stem, and the head, where float spares much and costs little; each with its reason.

    Everything else stays in int8 as it is. What is in float already is not looked at.
    """
    names = [p.name for p in products(chosen.floats) if p.kind in ("linear", "conv")]
    ends = [name for name in dict.fromkeys((*names[:1], *names[-1:])) if name in chosen.outcome.scales]
    work = multiply_adds(chosen.floats, chosen.held_NHWC[:1])
    before = kl(chosen)
    reasons = {}
    for name in ends:
        after, share = metrics.mean_kl(chosen.float_NK, _restored(chosen, name)), work[name] / sum(work.values())
        if before - after > max(NOTICED, before * max(SPARED, LEVERAGE * share)):
            told = f"KL from float {after:.3g}, with it in int8 {before:.3g}"
            reasons[name] = f"by measurement: {told}, for {share:.1%} of the multiply-adds"
    return reasons


class _Forking(Interpreter):
    """The float graph, node by node; `divergences` also gives what each int8 product alone makes of the logits."""

    def __init__(self, chosen: Chosen):
        super().__init__(chosen.floats)
        self.nodes = list(chosen.floats.graph.nodes)
        self.outcome = chosen.outcome
        on_grid = {p.name: p for p in products(chosen.on_grid)}
        self.products = {p.node: p for p in products(chosen.floats) if p.name in chosen.outcome.scales}
        self.weights = {name: parameter(chosen.on_grid, on_grid[name].weight) for name in chosen.outcome.scales}

    def divergences(self, images_BHWC: Tensor) -> dict[str, float]:
        self.env, self.args_iter = {}, iter([images_BHWC])
        forked: dict[str, Any] = {}
        for index, node in enumerate(self.nodes):
            self.env[node] = self.run_node(node)
            if node in self.products:
                product = self.products[node]
                forked[product.name] = self._rest(index + 1, self.env | {node: self._int8(product)})
            self._forget(self.env, node)
        float_BK = self._logits(self.env).numpy()
        return {name: metrics.mean_kl(float_BK, found_BK.numpy()) for name, found_BK in forked.items()}

    def _int8(self, product: Product) -> Tensor:
        """The product's output in int8 from float inputs, its mean corrected where the model corrects the bias."""
        args, _ = self.fetch_args_kwargs_from_env(product.node)
        found = self.outcome.ranges[product.inputs[0].name]
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


def _restored(chosen: Chosen, name: str) -> np.ndarray:
    """Logits of the int8 model with one product as it was in float, and all else as it is."""
    graph = copy.deepcopy(chosen.on_grid)
    for product, source in zip(products(graph), products(chosen.floats), strict=True):
        if product.name == name:
            _copy_parameters(graph, product.node, chosen.floats, source.node)
    tidy(graph)
    simulation = Simulation(graph, chosen.outcome.ranges, (*chosen.float_layers, name))
    return logits(simulation.run, chosen.held_NHWC)


def _copy_parameters(graph: GraphModule, node: Node, source: GraphModule, twin: Node) -> None:
    """Gives the node its twin's weight, and its bias or none."""
    weight = parameter(source, twin.args[1])
    bias = parameter(source, twin.args[2]) if len(twin.args) > 2 else None
    assert weight is not None
    set_parameter(graph, node, 1, weight)
    if bias is not None:
        set_parameter(graph, node, 2, bias)
    elif len(node.args) > 2:
        node.update_arg(2, None)
