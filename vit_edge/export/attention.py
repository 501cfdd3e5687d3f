"""Attention in an ONNX graph: softmax(q·kᵀ)·v, explicit as the student's modules make it, and as runtimes prefer it.

B images, h heads, d = D/h, R tokens that ask, T tokens that are asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vit_edge.export.graph import array, entry, initializer, name_of, only_consumer, producer, product_name, quantized
from vit_edge.quantization.ranges import STEPS, UINT8_MAX, Range

MICROSOFT = "com.microsoft"
SPLIT, SPLIT_TRANSPOSED = (0, 2, 1, 3), (0, 2, 3, 1)


@dataclass(frozen=True)
class Attention:
    """scores: q (B, h, R, d) times kᵀ (B, h, d, T); mixed: their softmax times v (B, h, T, d).

    bias: a constant (1 or B, 1 or h, R, T) that is added to the scores.
    """

    scores: ir.Node
    mixed: ir.Node
    bias: ir.Value | None = None


def attentions(model: ir.Model) -> list[Attention]:
    """Every attention whose softmax stands between two products, with one constant added to the scores at most."""
    found = []
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        value, bias, add = entry(softmax, 0), None, producer(entry(softmax, 0), "Add")
        if add is not None and entry(add, 1).is_initializer():
            value, bias = entry(add, 0), entry(add, 1)
        scores, mixed = producer(value, "MatMul"), only_consumer(softmax.outputs[0])
        if scores is not None and mixed is not None and mixed.op_type == "MatMul":
            found.append(Attention(scores, mixed, bias))
    return found


def fuse_attention(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Attention as ONNX Runtime's MultiHeadAttention, which takes q, k and v before they are cut into heads: exact.

    Its CPU kernel needs no transposed copies, and its softmax stays in the cache.
    """
    for found in attentions(model):
        queries, scale = _unscaled(entry(found.scores, 0))
        sources = [
            _before_heads(queries, SPLIT),
            _before_heads(entry(found.scores, 1), SPLIT_TRANSPOSED),
            _before_heads(entry(found.mixed, 1), SPLIT),
        ]
        last, heads = _joined_heads(found.mixed), _heads(found.scores)
        if last is None or heads is None or None in sources:
            continue
        inputs = sources if found.bias is None else [*sources, None, None, found.bias]
        attributes = {"num_heads": heads, "scale": scale}
        node = own_operator(model, "MultiHeadAttention", inputs, attributes, f"{found.mixed.name}/MultiHeadAttention")
        model.graph.insert_before(last, node)
        last.outputs[0].replace_all_uses_with(node.outputs[0])


def multiply_by_transposed(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Keys stay as they are cut, (B, h, T, d), and the product transposes: exact, and no transposed copy in OpenVINO."""
    for found in attentions(model):
        transpose = producer(entry(found.scores, 1), "Transpose")
        if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != SPLIT_TRANSPOSED:
            continue
        keys = ir.node("Transpose", [entry(transpose, 0)], {"perm": list(SPLIT)}, name=f"{transpose.name}/heads")
        keys.outputs[0].name = f"{name_of(transpose.outputs[0])}_heads"
        inputs = [entry(found.scores, 0), keys.outputs[0]]
        product = own_operator(model, "FusedMatMul", inputs, {"transB": 1}, str(found.scores.name))
        model.graph.insert_before(found.scores, [keys, product])
        found.scores.outputs[0].replace_all_uses_with(product.outputs[0])
        model.graph.remove(found.scores, safe=True)


def quantize_scores(model: ir.Model, ranges: Mapping[str, Range]) -> None:
    """Queries and keys in int8, by their recorded ranges."""
    for found in attentions(model):
        for index in (0, 1):
            _quantize(model, found.scores, index, ranges)


def quantize_mixing(model: ir.Model, ranges: Mapping[str, Range]) -> None:
    """Probabilities, in all 255 steps of uint8, and values in int8, by their recorded ranges."""
    for found in attentions(model):
        for index in (0, 1):
            _quantize(model, found.mixed, index, ranges)


def own_operator(
    model: ir.Model, operator: str, inputs: Sequence[ir.Value | None], attributes: dict[str, int | float], name: str
) -> ir.Node:
    """A node of the operators that ONNX Runtime adds to ONNX; the graph is told of them."""
    model.graph.opset_imports[MICROSOFT] = 1
    node = ir.node(operator, inputs, attributes, domain=MICROSOFT, name=name)
    node.outputs[0].name = f"{name}_output"
    return node


def _quantize(model: ir.Model, product: ir.Node, index: int, ranges: Mapping[str, Range]) -> None:
    value = entry(product, index)
    found = ranges.get(name_of(value))
    if found is None:
        return
    unsigned = found.low >= 0
    scale, zero = (found.limit / UINT8_MAX, np.uint8(0)) if unsigned else (found.limit / STEPS, np.int8(0))
    name = f"{product_name(product)}/operand_{index}"
    constants = [
        initializer(model, f"{name}_scale", np.array(scale, np.float32)),
        initializer(model, f"{name}_zero_point", np.array(zero)),
    ]
    nodes = quantized(value, constants, name)
    model.graph.insert_before(product, nodes)
    product.replace_input_with(index, nodes[1].outputs[0])


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Queries before a constant factor, and that factor."""
    mul = producer(value, "Mul")
    if mul is None or not entry(mul, 1).is_initializer() or array(entry(mul, 1)).size != 1:
        return value, 1.0
    return entry(mul, 0), float(array(entry(mul, 1)).item())


def _before_heads(value: ir.Value, order: tuple[int, ...]) -> ir.Value | None:
    """(B, T, D), from what was cut into heads and turned into this order, perhaps in two steps."""
    turned: tuple[int, ...] = (0, 1, 2, 3)
    while (transpose := producer(value, "Transpose")) is not None:
        step = transpose.attributes["perm"].as_ints()
        if len(step) != 4:
            return None
        turned = tuple(step[axis] for axis in turned)
        value = entry(transpose, 0)
    cut = producer(value, "Reshape")
    if turned != order or cut is None or _rank(entry(cut, 0)) != 3:
        return None
    return entry(cut, 0)


def _joined_heads(mixed: ir.Node) -> ir.Node | None:
    """The reshape to (B, R, D) after the heads, if it follows at once."""
    transpose = only_consumer(mixed.outputs[0])
    if transpose is None or transpose.op_type != "Transpose":
        return None
    joined = only_consumer(transpose.outputs[0])
    if joined is None or joined.op_type != "Reshape" or _rank(joined.outputs[0]) != 3:
        return None
    return joined


def _heads(scores: ir.Node) -> int | None:
    shape = entry(scores, 0).shape
    heads = shape[1] if shape is not None and len(shape) == 4 else None
    return heads if isinstance(heads, int) else None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)
