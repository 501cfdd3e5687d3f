"""What each product's int8 costs the answers, and what it can save: the proxy that a search goes by.

A cost is the KL divergence from float, in nats, of the model with that product alone in int8, on calibration images that
nothing was fitted to. N images, K classes.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch.fx import GraphModule, Node

from vit_edge import metrics
from vit_edge.quantization import forking
from vit_edge.quantization.choice import Chosen
from vit_edge.quantization.products import parameter, products, set_parameter, tidy
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.quantization.work import multiply_adds

IMAGES = 64
"""Images that costs are measured on."""
SPARED, LEVERAGE, NOTICED = 0.1, 10.0, 1e-5
"""The first or the last product is left in float when that takes away this share of the divergence at least, so many
times its own share of the work, and so many nats."""


@dataclass(frozen=True)
class Cost:
    """Of a product in int8: divergence that it causes alone, and multiply-adds of an image that it does."""

    kl: float
    multiply_adds: int


@torch.no_grad()
def costs(chosen: Chosen, with_outputs: bool = False) -> dict[str, Cost]:
    """Of every product that is int8, by name, in the graph's order; with_outputs: what its output costs in uint8 as well."""
    images_NHWC = chosen.held_NHWC[:IMAGES]
    work = multiply_adds(chosen.floats, images_NHWC[:1])
    alone = forking.of_inputs(chosen.floats, chosen.on_grid, chosen.outcome, images_NHWC)
    outputs: dict[str, list[float]] = {}
    if with_outputs:
        ranges = {name: [found] for name, found in chosen.outcome.ranges.items()}
        outputs = forking.of_outputs(chosen.floats, chosen.outcome, images_NHWC, chosen.float_layers, ranges)
    return {name: Cost(max(0.0, kls[0] + outputs.get(name, [0.0])[0]), work[name]) for name, kls in alone.items()}


def ends_for_float(chosen: Chosen) -> dict[str, str]:
    """The patch projection or stem, and the head, where float spares much and costs little; each with its reason.

    Everything else stays in int8 as it is. What is in float already is not looked at.
    """
    names = [p.name for p in products(chosen.floats) if p.kind in ("linear", "conv")]
    ends = [name for name in dict.fromkeys((*names[:1], *names[-1:])) if name in chosen.outcome.scales]
    work = multiply_adds(chosen.floats, chosen.held_NHWC[:1])
    before = chosen.kl
    reasons = {}
    for name in ends:
        after, share = metrics.mean_kl(chosen.float_NK, _restored(chosen, name)), work[name] / sum(work.values())
        if before - after > max(NOTICED, before * max(SPARED, LEVERAGE * share)):
            told = f"KL from float {after:.3g}, with it in int8 {before:.3g}"
            reasons[name] = f"by measurement: {told}, for {share:.1%} of the multiply-adds"
    return reasons


def _restored(chosen: Chosen, name: str) -> np.ndarray:
    """Logits of the int8 model with one product as it was in float, and all else as it is."""
    graph = copy.deepcopy(chosen.on_grid)
    for product, source in zip(products(graph), products(chosen.floats), strict=True):
        if product.name == name:
            _copy_parameters(graph, product.node, chosen.floats, source.node)
    tidy(graph)
    simulation = Simulation(graph, chosen.outcome, (*chosen.float_layers, name))
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
