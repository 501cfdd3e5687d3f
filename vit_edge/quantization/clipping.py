"""Where to clip the few tensors that cost the answers most, by the answers themselves.

Squared error, of a tensor or of the outputs that read it, keeps large values whole; where a few of them are outliers that
the answers do not need, all others lose their steps to them. Here the limit is the one that leaves the logits closest to
float's, with that tensor's products alone in int8.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch.fx import GraphModule, Node

from vit_edge.quantization import forking
from vit_edge.quantization.layerwise import Outcome
from vit_edge.quantization.products import products
from vit_edge.quantization.ranges import METHODS, Range, Statistics, minmax

SHARE = 0.01
"""Tensors are looked at whose products have at least this share of the divergence that all products cause alone."""
FRACTIONS = tuple(2 ** (-step / 2) for step in range(2, 9))
"""Of the largest magnitude: limits that are tried beside those of ranges.METHODS."""


def input_limits(
    floats: GraphModule, on_grid: GraphModule, outcome: Outcome, statistics: Mapping[Node, Statistics],
    images_NHWC: np.ndarray,
) -> dict[str, float]:  # fmt: skip
    """The limit of each such tensor for which another is better than the one that it has, by name."""
    readers: dict[str, list[str]] = {}
    for product in products(floats):
        if product.name in outcome.scales:
            readers.setdefault(product.inputs[0].name, []).append(product.name)
    known = _known(statistics)
    alone = forking.of_inputs(floats, on_grid, outcome, images_NHWC)
    least = SHARE * sum(kls[0] for kls in alone.values())
    costly = [name for name, found in readers.items() if name in known and sum(alone[one][0] for one in found) > least]
    tried = {name: _candidates(known[name], outcome.ranges[name]) for name in costly}
    found = forking.of_inputs(floats, on_grid, outcome, images_NHWC, tried)
    return _best(tried, {name: np.sum([found[product] for product in readers[name]], axis=0) for name in tried})


def output_limits(
    floats: GraphModule, outcome: Outcome, statistics: Mapping[Node, Statistics], images_NHWC: np.ndarray,
    float_layers: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    """The same of outputs of convolutions that have a range of their own."""
    known = _known(statistics)
    convs = {p.name: p.node.name for p in products(floats) if p.kind == "conv" and p.node.name in known}
    present = {name: [outcome.ranges[name]] for name in convs.values()}
    alone = forking.of_outputs(floats, outcome, images_NHWC, float_layers, present)
    least = SHARE * sum(kls[0] for kls in alone.values())
    costly = [convs[product] for product, kls in alone.items() if kls[0] > least]
    tried = {name: _candidates(known[name], outcome.ranges[name]) for name in costly}
    found = forking.of_outputs(floats, outcome, images_NHWC, float_layers, tried)
    return _best(tried, {convs[product]: np.array(kls) for product, kls in found.items()})


def _known(statistics: Mapping[Node, Statistics]) -> dict[str, Statistics]:
    return {node.name: found for node, found in statistics.items() if not found.pixels and found.span}


def _best(tried: Mapping[str, Sequence[Range]], kl_of: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of each tensor the limit with the least divergence, where that is another than the first."""
    chosen = {name: int(np.argmin(kl_of[name])) for name in tried}
    return {name: tried[name][index].limit for name, index in chosen.items() if index > 0}


def _candidates(statistics: Statistics, present: Range) -> list[Range]:
    """The range that it has first."""
    largest = minmax(statistics)
    others = [method(statistics) for method in METHODS.values()] + [largest * fraction for fraction in FRACTIONS]
    return [present, *(statistics.at(limit) for limit in sorted(set(others)) if limit > 0)]
