"""The matrix products of an exported graph: what can be int8, each under the name of its module.

The graph is what `torch.export` gives: ATen operators, parameters as get_attr nodes.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

aten = torch.ops.aten
PREFIX = "backbone."  # of every module in the exported graph; names are given without it
Kind = Literal["linear", "conv", "attention", "other"]
WEIGHTED: dict[object, Kind] = {
    aten.linear.default: "linear",
    aten.conv1d.default: "conv",
    aten.conv1d.padding: "conv",
    aten.conv2d.default: "conv",
    aten.conv2d.padding: "conv",
}
OF_ACTIVATIONS = {aten.matmul.default, aten.bmm.default}
OTHER = {
    aten.scaled_dot_product_attention.default,
    aten.einsum.default,
    aten.tensordot.default,
    aten.bilinear.default,
    aten.mm.default,
    aten.mv.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.addbmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
}


@dataclass(frozen=True)
class Product:
    """One matrix product: `name` is its module's path, with /0, /1, … for the products of activations inside it.

    `inputs` are the activations that it multiplies: one for linear and conv, both operands for attention.
    `obstacle` says why it cannot be int8, or is None.
    """

    name: str
    kind: Kind
    node: Node
    inputs: tuple[Node, ...]
    obstacle: str | None = None

    @property
    def weight(self) -> Node:
        assert self.kind in ("linear", "conv")
        return self.node.args[1]  # type: ignore[return-value]


def products(graph_module: GraphModule) -> list[Product]:
    """Every matrix product of the graph, in its order."""
    seen: Counter[str] = Counter()
    found = (_product(node, seen) for node in graph_module.graph.nodes if node.op == "call_function")
    return [product for product in found if product is not None]


def name_in(path: str, weighted: bool, seen: Counter[str]) -> str:
    """The name of the next product inside the module at `path`; `seen` counts the names given so far.

    A layer that is called again gets #1, #2, …
    """
    key = path if weighted else f"{path}/"
    count = seen[key]
    seen[key] += 1
    if weighted:
        return f"{path}#{count}" if count else path
    return f"{path}/{count}"


def module_path(node: Node) -> str:
    """The path of the module whose forward made the node, as in `named_modules` of the student's backbone."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix(PREFIX) if stack else ""


def beside_channels(product: Product, output: Tensor) -> list[int]:
    """The axes of a product's output that hold images and places."""
    channels = 1 if product.kind == "conv" else output.ndim - 1
    return [axis for axis in range(output.ndim) if axis != channels]


def parameter(graph_module: GraphModule, node: object) -> Tensor | None:
    """The parameter or buffer that a get_attr node reads, or None for anything else."""
    if not (isinstance(node, Node) and node.op == "get_attr"):
        return None
    owner, _, name = str(node.target).rpartition(".")
    return getattr(graph_module.get_submodule(owner), name)


def set_parameter(graph_module: GraphModule, node: Node, index: int, value: Tensor) -> None:
    """Gives the node a parameter of its own as its argument at `index`; call `tidy` when all are set."""
    name = f"{node.name}_argument_{index}"
    graph_module.register_parameter(name, nn.Parameter(value.detach().contiguous(), requires_grad=False))
    with graph_module.graph.inserting_before(node):
        attribute = graph_module.graph.get_attr(name)
    args = [*node.args, *[None] * (index + 1 - len(node.args))]
    node.args = (*args[:index], attribute, *args[index + 1 :])


def tidy(graph_module: GraphModule) -> None:
    """Drops what nothing reads any more, parameters too, and compiles the graph."""
    graph_module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph_module.named_parameters(remove_duplicate=False)]:
        if name not in read:
            owner, _, own = name.rpartition(".")
            delattr(graph_module.get_submodule(owner), own)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()


def why_float(product: Product, float_layers: Collection[str]) -> str | None:
    """Why the product stays float, or None when it becomes int8."""
    return product.obstacle or ("listed in int8.float_layers" if product.name in float_layers else None)


def _product(node: Node, seen: Counter[str]) -> Product | None:
    if node.target in WEIGHTED:
        return _weighted(node, WEIGHTED[node.target], name_in(module_path(node), True, seen))
    if node.target in OF_ACTIVATIONS:
        name = name_in(module_path(node), False, seen)
        return Product(name, "attention", node, tuple(node.args[:2]), "a product of two activations stays float")  # type: ignore[arg-type]
    if node.target in OTHER:
        name = name_in(module_path(node), False, seen)
        return Product(name, "other", node, (), f"the operator {node.target} has no int8 form here")
    return None


def _weighted(node: Node, kind: Kind, name: str) -> Product:
    activation, weight = node.args[:2]
    assert isinstance(activation, Node)
    assert isinstance(weight, Node)
    if weight.op != "get_attr":
        return Product(name, "other", node, (activation,), "its weight is computed in the graph")
    return Product(name, kind, node, (activation,))
