"""Outputs of convolutions in uint8, which one runtime's int8 convolutions write: kept in mind wherever int8 is judged."""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from vit_edge.quantization.products import products, why_float
from vit_edge.quantization.steps import Bounds

aten = torch.ops.aten
RELUS = {aten.relu.default, aten.relu_.default}
CLIPS = {aten.hardtanh.default, aten.hardtanh_.default, aten.clamp.default, aten.clamp_.default}


def written(graph_module: GraphModule, float_layers: Collection[str] = ()) -> dict[Node, Bounds]:
    """Each int8 convolution whose output gets a range of its own, with the bounds of the ReLU or clip that alone reads it.

    What another int8 product reads, right away or after such an activation, has that product's range instead.
    """
    int8 = [p for p in products(graph_module) if why_float(p, float_layers) is None]
    read = {p.inputs[0] for p in int8}
    found = {}
    for product in int8:
        activation, bounds = _activation(product.node)
        if product.kind == "conv" and activation not in read:
            found[product.node] = bounds
    return found


def _activation(node: Node) -> tuple[Node, Bounds]:
    """The node that ends with the convolution's pass, itself or what alone reads it, and what that leaves."""
    everything = (-float("inf"), float("inf"))
    users: list[Any] = list(node.users)
    if len(users) != 1 or users[0].op != "call_function":
        return node, everything
    (user,) = users
    if user.target in RELUS:
        return user, (0.0, float("inf"))
    if user.target in CLIPS:
        low, high = (*user.args[1:3], None, None)[:2]
        hardtanh = "hardtanh" in str(user.target)
        low, high = (-1.0 if hardtanh and low is None else low), (1.0 if hardtanh and high is None else high)
        return user, (everything[0] if low is None else float(low), everything[1] if high is None else float(high))
    return node, everything
