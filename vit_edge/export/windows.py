"""Attention as timm's models write it, brought into the form that `export.attention` knows: exact.

W windows (B images of nW windows each), h heads, d = D/h, T tokens of a window.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from vit_edge.export.graph import (
    array,
    bias_of,
    constant_of,
    entry,
    initializer,
    name_of,
    only_consumer,
    producer,
    product_name,
    skip,
)
from vit_edge.quantization.ranges import Range

PACKED = (2, 0, 3, 1, 4)
"""(W, T, 3, h, d) to (3, W, h, T, d)."""
SPLIT = [0, 2, 1, 3]


def add_bias_once(model: ir.Model, _: Mapping[str, Range]) -> None:
    """The position bias (1, h, T, T) and the mask of shifted windows (nW, 1, T, T) as one constant, for one image.

    The mask is added to another shape of the same scores; runtimes fuse an attention that has one sum and no reshape.
    """
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        scores, terms = _sum(entry(softmax, 0))
        shape = scores.shape if scores is not None else None
        if scores is None or not terms or shape is None or not all(isinstance(size, int) for size in shape):
            continue
        total = np.asarray(sum(term.reshape(-1, *term.shape[-3:]) for term in terms), np.float32)
        if total.ndim != 4 or total.shape[0] not in (1, shape[0]):
            continue
        bias = initializer(model, f"{softmax.name}/bias", total)
        add = ir.node("Add", [scores, bias], name=f"{softmax.name}/Add")
        add.outputs[0].name = f"{name_of(softmax.outputs[0])}_biased"
        add.outputs[0].type, add.outputs[0].shape = scores.type, shape
        model.graph.insert_before(softmax, add)
        softmax.replace_input_with(0, add.outputs[0])


def drop_empty_pads(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Paddings by nothing, where a map is a whole number of windows."""
    for pad in [node for node in model.graph if node.op_type == "Pad"]:
        widths = constant_of(entry(pad, 1))
        if widths is not None and not widths.any():
            skip(model, pad)


def unpack_heads(model: ir.Model, _: Mapping[str, Range]) -> None:
    """q, k and v from one int8 layer each, (W, T, D), where one made all and its output was cut along five axes."""
    for turned in [node for node in model.graph if node.op_type == "Transpose"]:
        cut = producer(entry(turned, 0), "Reshape")
        if cut is None or tuple(turned.attributes["perm"].as_ints()) != PACKED:
            continue
        add = producer(entry(cut, 0), "Add")
        parts = [_part(reader) for reader in turned.outputs[0].consumers()]
        shape = turned.outputs[0].shape
        if add is None or shape is None or None in parts or not all(isinstance(size, int) for size in shape):
            continue
        product = producer(entry(add, 0), "MatMul")
        if product is None or bias_of(product) is None or producer(entry(product, 1), "DequantizeLinear") is None:
            continue
        for index, squeezed in (part for part in parts if part):
            _unpack(model, product, add, index, squeezed, [int(size) for size in shape[1:]])  # type: ignore[arg-type]


def _sum(value: ir.Value) -> tuple[ir.Value | None, list[np.ndarray]]:
    """The output of a MatMul that a value is the sum of, and the constants that were added, whatever the shape."""
    terms: list[np.ndarray] = []
    while True:
        node = value.producer()
        if node is None or node.op_type == "MatMul":
            return (value if node is not None else None), terms
        if node.op_type == "Add":
            constant = constant_of(entry(node, 1))
            if constant is None or constant.ndim < 3 or (constant.ndim == 5 and constant.shape[0] != 1):
                return None, []
            terms.append(constant)
        elif node.op_type != "Reshape":
            return None, []
        value = entry(node, 0)


def _part(piece: ir.Node) -> tuple[int, ir.Node] | None:
    """0, 1 or 2 for what is cut out as q, k or v, and the node that gives it without its first axis."""
    squeezed = only_consumer(piece.outputs[0])
    if piece.op_type != "Slice" or squeezed is None or squeezed.op_type != "Squeeze":
        return None
    start, axis = constant_of(entry(piece, 1)), constant_of(entry(piece, 3))
    if start is None or axis is None or axis.item() != 0:
        return None
    return int(start.item()), squeezed


def _unpack(
    model: ir.Model, product: ir.Node, add: ir.Node, index: int, squeezed: ir.Node, shape: list[int]
) -> None:  # fmt: skip
    """shape: (W, h, T, d) of the part."""
    windows, heads, tokens, depth = shape
    width, name = heads * depth, f"{product_name(product)}/{'qkv'[index]}"
    columns = slice(index * width, (index + 1) * width)
    stored = producer(entry(product, 1), "DequantizeLinear")
    assert stored is not None
    suffixes = ("weight", "weight_scale", "weight_zero_point")
    constants = [
        initializer(model, f"{name}.{suffix}", array(entry(stored, place))[..., columns].copy())
        for place, suffix in enumerate(suffixes)
    ]
    bias = initializer(model, f"{name}.bias", array(entry(add, 1))[columns].copy())
    cut = initializer(model, f"{name}.shape", np.array([windows, tokens, heads, depth], np.int64))
    weight = ir.node("DequantizeLinear", constants, {"axis": 1}, name=f"{name}/DequantizeLinear")
    multiplied = ir.node("MatMul", [entry(product, 0), weight.outputs[0]], name=f"{name}/MatMul")
    made = ir.node("Add", [multiplied.outputs[0], bias], name=f"{name}/Add")
    apart = ir.node("Reshape", [made.outputs[0], cut], name=f"{name}/Reshape")
    turned = ir.node("Transpose", [apart.outputs[0]], {"perm": SPLIT}, name=f"{name}/Transpose")
    flat = [windows, tokens, width]
    shapes = ([*array(constants[0]).shape], flat, flat, [windows, tokens, heads, depth], shape)
    nodes = [weight, multiplied, made, apart, turned]
    for node, sizes in zip(nodes, shapes, strict=True):
        node.outputs[0].name = f"{node.name}_output"
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(sizes)
    model.graph.insert_before(squeezed, nodes)
    squeezed.outputs[0].replace_all_uses_with(turned.outputs[0])
