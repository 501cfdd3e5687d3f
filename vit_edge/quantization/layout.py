"""Where a tensor's channels lie, followed through operators that keep a positive factor of each channel.

A layout is the axes that hold the channels, in order: (1,) of a feature map, (2,) of tokens (B, T, D), (1, 3) of
heads (B, h, T, d). Axes count from 0.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from vit_edge.quantization.products import Product

aten = torch.ops.aten
Layout = tuple[int, ...]
SAME = {
    aten.relu.default, aten.relu_.default, aten.leaky_relu.default, aten.leaky_relu_.default, aten.clone.default,
    aten.contiguous.default, aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default,
}  # fmt: skip
SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor}
PRODUCTS = {aten.mul.Tensor, aten.mul_.Tensor}


def layout_of_output(node: Node) -> Layout:
    """Of a linear layer, a convolution or a norm over the last axis."""
    return (1,) if "conv" in str(node.target) else (rank(node) - 1,)


def channel_axis(product: Product) -> Layout:
    """The layout that a linear layer or convolution reads."""
    return (1,) if product.kind == "conv" else (rank(product.inputs[0]) - 1,)


def rank(node: Node) -> int:
    return len(_shape(node))


def followed(node: Node, layouts: Mapping[Node, Layout]) -> tuple[Layout | None, list[Node]]:
    """The node's layout and the inputs whose channels it carries on; (None, []) where a factor does not come through."""
    rule = _rule(node)
    sources = [source for source in node.all_input_nodes if source in layouts]
    if rule is None or not sources:
        return None, []
    layout = rule(node, layouts)
    if layout is None:
        return None, []
    carried = sources if node.target in SUMS else [_carrier(node)]
    return layout, carried


def _carrier(node: Node) -> Node:
    """The input whose channels go on: attention's values, else the first."""
    return _args(node)[1] if node.target == aten.matmul.default else _args(node)[0]


def _rule(node: Node) -> Any:
    if node.op != "call_function":
        return None
    if node.target in SAME:
        return lambda n, layouts: layouts.get(_args(n)[0])
    if node.target in SUMS:
        return _sum
    if node.target in PRODUCTS:
        return _gated
    return RULES.get(node.target)  # type: ignore[call-overload]


def _sum(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    a, b = _args(node)[:2]
    if not (isinstance(a, Node) and isinstance(b, Node)) or node.kwargs:
        return None
    same = a in layouts and layouts[a] == layouts.get(b)
    return layouts[a] if same and _shape(a) == _shape(b) else None


def _gated(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    """A feature map times one factor a channel (squeeze and excitation); the factor is not scaled."""
    a, b = _args(node)
    if not (isinstance(a, Node) and isinstance(b, Node)) or layouts.get(a) != (1,):
        return None
    return (1,) if rank(a) == rank(b) == 4 and _shape(b)[2:] == (1, 1) != _shape(a)[2:] else None


def _mean(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    source, dims, *keep = _args(node)
    layout = layouts.get(source)
    if layout is None:
        return None
    gone = {dim % rank(source) for dim in dims}
    if gone & set(layout):
        return None
    return layout if keep == [True] else tuple(axis - sum(dim < axis for dim in gone) for axis in layout)


def _slice(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    layout = layouts.get(_args(node)[0])
    return None if layout is None or _args(node)[1] in layout else layout


def _permuted(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    return _moved(layouts.get(_args(node)[0]), [int(dim) for dim in _args(node)[1]])


def _transposed(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    source, a, b = _args(node)
    order = list(range(rank(source)))
    order[a], order[b] = order[b], order[a]
    return _moved(layouts.get(source), order)


def _moved(layout: Layout | None, order: list[int]) -> Layout | None:
    if layout is None:
        return None
    order = [dim % len(order) for dim in order]
    return tuple(order.index(axis) for axis in layout)


def _unflattened(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    source, dim, sizes = _args(node)
    layout = layouts.get(source)
    axis = dim % rank(source)
    if layout != (axis,):
        return None
    return tuple(range(axis, axis + len(sizes)))


def _flattened(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    """Of neighbouring axes that hold the channels, in their order, and other axes of size 1."""
    source: Node = _args(node)[0]
    layout, shape = layouts.get(source), _shape(source)
    start, end = (int(a) % len(shape) for a in (*_args(node)[1:], -1)[:2])
    if layout is None:
        return None
    if all(axis < start for axis in layout):
        return layout
    kept = [axis for axis in range(start, end + 1) if shape[axis] != 1]
    return (start,) if kept == [axis for axis in layout if shape[axis] != 1] else None


def _mixed(node: Node, layouts: Mapping[Node, Layout]) -> Layout | None:
    """Attention's weights (B, h, T, T) times values (B, h, T, d): channels lie in the heads and the last axis."""
    a, values = _args(node)
    layout = layouts.get(values)
    if layout is None or a in layouts or rank(values) - 2 in layout:
        return None
    return layout


RULES = {
    aten.mean.dim: _mean,
    aten.slice.Tensor: _slice,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.unflatten.int: _unflattened,
    aten.flatten.using_ints: _flattened,
    aten.matmul.default: _mixed,
}


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)
