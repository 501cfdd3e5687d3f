"""Linear layers as ONNX Runtime's MatMulIntegerToFloat: int8 product, scaled, float bias added, all in one pass."""

from collections.abc import Mapping

import onnx_ir as ir

from vit_edge.export.attention import own_operator
from vit_edge.export.graph import bias_of, entry, producer, products
from vit_edge.quantization.ranges import Range


def integer_products(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Every MatMul of dequantized activations and weight, with the bias after it.

    The product keeps its shape, (B, T, I) to (B, T, O): the quantized matrix product that ONNX Runtime makes of it by
    itself takes and gives matrices, and adds the bias in a pass of its own.
    """
    for product in products(model):
        activation, weight = (producer(entry(product, index), "DequantizeLinear") for index in (0, 1))
        if product.op_type != "MatMul" or activation is None or weight is None:
            continue
        if not entry(weight, 0).is_initializer():
            continue
        bias = bias_of(product)
        last = product if bias is None else bias[0]
        stored = [entry(node, index) for index in (0, 1, 2) for node in (activation, weight)]
        inputs = [*stored, None if bias is None else entry(*bias)]
        node = own_operator(model, "MatMulIntegerToFloat", inputs, {}, f"{product.name}/IntegerToFloat")
        node.outputs[0].type, node.outputs[0].shape = last.outputs[0].type, last.outputs[0].shape
        model.graph.insert_before(last, node)
        last.outputs[0].replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
