"""From the canonical int8 graph to the one that each runtime is fast with. All take a graph of fixed batch size.

A lowering may use a recorded range or leave it, never make one up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vit_edge.export.onnx import INPUT, PRODUCTS, initializer, product_name, tidy
from vit_edge.quantization.ranges import Range

INT32 = np.iinfo(np.int32)


def for_onnxruntime(model: ir.Model, ranges: Mapping[str, Range]) -> ir.Model:
    """Its int8 kernels need uint8 activations, int32 biases, and convolutions with quantized outputs; in place.

    Tensors that are never negative get the zero point 0 and twice the steps; the others 128, bit for bit the
    canonical int8. Its own optimiser then builds QGemm and QLinearConv under default session options.
    """
    take_pixels_as_they_are(model)
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear":
            make_unsigned(model, node, ranges)
    for node in list(model.graph):
        if node.op_type == "Conv" and _quantized_input(node) is not None:
            quantize_output(model, node, ranges)
    for node in list(model.graph):
        if node.op_type in PRODUCTS:
            quantize_bias(model, node)
    tidy(model)
    return model


def for_openvino(model: ir.Model, ranges: Mapping[str, Range]) -> ir.Model:
    """The canonical graph is what it is fast with."""
    return model


def for_tensorrt(model: ir.Model, ranges: Mapping[str, Range]) -> ir.Model:
    """Signed, symmetric, inputs only, float biases: the canonical graph."""
    return model


LOWERINGS = {"onnxruntime": for_onnxruntime, "openvino": for_openvino, "tensorrt": for_tensorrt}


def take_pixels_as_they_are(model: ir.Model) -> None:
    """Quantize(Transpose(Cast(pixel)) - 128; scale 1) is the uint8 pixel with zero point 128."""
    (cast,) = (node for node in model.graph if node.op_type == "Cast" and node.inputs[0].name == INPUT)
    chain = _only_chain(cast, ("Transpose", "Reshape", "Sub", "QuantizeLinear"))
    if chain is None or _scalar(chain[-1].inputs[1]) != 1:
        return
    quantize = chain[-1]
    subtract = quantize.inputs[0].producer()
    cast.outputs[0].replace_all_uses_with(cast.inputs[0])
    subtract.outputs[0].replace_all_uses_with(subtract.inputs[0])
    for node in chain[:-1]:
        node.outputs[0].dtype = ir.DataType.UINT8
    pixels = subtract.inputs[0]
    for dequantize in list(quantize.outputs[0].consumers()):
        dequantize.replace_input_with(0, pixels)
        dequantize.replace_input_with(2, initializer(model, "pixel_zero_point", np.array(128, np.uint8)))
    model.graph.remove([subtract, cast], safe=False)


def quantize_bias(model: ir.Model, product: ir.Node) -> None:
    """A float bias as int32 in steps of input scale × weight scale, which is what the products are summed in."""
    found = _bias(product)
    scales = _scales(product)
    if found is None or scales is None:
        return
    consumer, index = found
    bias = consumer.inputs[index].const_value.numpy().reshape(-1).astype(np.float64)
    steps = np.round(bias / scales)
    if np.abs(steps).max(initial=0) > INT32.max:
        return
    name = f"{product_name(product)}.bias"
    dequantize = ir.node(
        "DequantizeLinear",
        [
            initializer(model, f"{name}_int32", steps.astype(np.int32)),
            initializer(model, f"{name}_scale", scales.astype(np.float32)),
        ],
        {"axis": 0},
        name=f"{name}/DequantizeLinear",
    )
    dequantize.outputs[0].name = f"{name}_dequantized"
    model.graph.insert_before(consumer, dequantize)
    consumer.replace_input_with(index, dequantize.outputs[0])


def quantize_output(model: ir.Model, conv: ir.Node, ranges: Mapping[str, Range]) -> None:
    """Quantize and dequantize after a convolution, or after the ReLU that is its only consumer."""
    found = ranges[conv.outputs[0].name]
    last = conv
    consumers = conv.outputs[0].consumers()
    if len(consumers) == 1 and consumers[0].op_type in ("Relu", "Clip"):
        last = consumers[0]
        found = _clipped(last, found)
    value = last.outputs[0]
    users = [(user, index) for user, index in value.uses() if user.op_type != "QuantizeLinear"]
    quantizers = [node for node in value.consumers() if node.op_type == "QuantizeLinear"]
    if quantizers:
        dequantize = quantizers[0].outputs[0].consumers()[0]
    else:
        quantize, dequantize = _pair(model, f"{product_name(conv)}/output", value, Affine.of(found))
        model.graph.insert_after(last, [quantize, dequantize])
    for user, index in users:
        user.replace_input_with(index, dequantize.outputs[0])


def make_unsigned(model: ir.Model, quantize: ir.Node, ranges: Mapping[str, Range]) -> None:
    """int8 with zero point 0 as uint8: with zero point 128, or with 0 and half the step where nothing is negative."""
    zero_point = quantize.inputs[2].const_value.numpy()
    if zero_point.dtype != np.int8:
        return
    found = ranges.get(quantize.inputs[0].name)
    scale = _scalar(quantize.inputs[1])
    affine = Affine(scale, 128)
    if found is not None and found.low >= 0:
        affine = Affine(scale * 127 / 255, 0)
    for node in (quantize, *quantize.outputs[0].consumers()):
        for index, value in enumerate(affine.initializers(model, quantize.name), start=1):
            node.replace_input_with(index, value)
    quantize.outputs[0].dtype = ir.DataType.UINT8


@dataclass(frozen=True)
class Affine:
    """uint8 quantization: real = scale · (stored - zero_point)."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, found: Range) -> "Affine":
        """Covers the range, clipped at its limit, and zero."""
        low, high = max(found.low, -found.limit), min(found.high, found.limit)
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / 255 or 1.0
        return cls(scale, round(-low / scale))

    def initializers(self, model: ir.Model, name: str) -> tuple[ir.Value, ir.Value]:
        scale = initializer(model, f"{name}_scale", np.array(self.scale, np.float32))
        return scale, initializer(model, f"{name}_zero_point", np.array(self.zero_point, np.uint8))


def _pair(model: ir.Model, name: str, value: ir.Value, affine: Affine) -> tuple[ir.Node, ir.Node]:
    scale, zero_point = affine.initializers(model, name)
    quantize = ir.node("QuantizeLinear", [value, scale, zero_point], name=f"{name}/QuantizeLinear")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], scale, zero_point], name=f"{name}/DequantizeLinear")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{name}_quantized", f"{name}_dequantized"
    return quantize, dequantize


def _clipped(node: ir.Node, found: Range) -> Range:
    """The range of a ReLU's or a Clip's output, from that of its input."""
    low, high = 0.0, np.inf
    if node.op_type == "Clip":
        low, high = (_scalar(bound) if bound is not None else default for bound, default in zip(node.inputs[1:3], (-np.inf, np.inf), strict=True))  # fmt: skip
    return Range(*(float(np.clip(value, low, high)) for value in (found.low, found.high)), limit=found.limit)


def _quantized_input(product: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that feeds a product's activations, or None for a float one."""
    node = product.inputs[0].producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _scales(product: ir.Node) -> np.ndarray | None:
    """Input scale × weight scale for each output channel, float64; None for a float product."""
    activation, weight = _quantized_input(product), product.inputs[1].producer()
    if activation is None or weight is None or weight.op_type != "DequantizeLinear":
        return None
    return _scalar(activation.inputs[1]) * weight.inputs[1].const_value.numpy().astype(np.float64)


def _bias(product: ir.Node) -> tuple[ir.Node, int] | None:
    """Where the product's bias comes in: a node and the index of its input."""
    if product.op_type in ("Conv", "Gemm"):
        return (product, 2) if len(product.inputs) > 2 and product.inputs[2] is not None else None
    consumers = product.outputs[0].consumers()
    if len(consumers) != 1 or consumers[0].op_type != "Add":
        return None
    index = 1 if consumers[0].inputs[0] is product.outputs[0] else 0
    return (consumers[0], index) if consumers[0].inputs[index].is_initializer() else None


def _only_chain(node: ir.Node, operators: tuple[str, ...]) -> list[ir.Node] | None:
    """The node and those after it, each the only consumer of the one before, up to the first quantization."""
    chain = [node]
    while chain[-1].op_type != "QuantizeLinear":
        consumers = chain[-1].outputs[0].consumers()
        if len(consumers) != 1 or consumers[0].op_type not in operators:
            return None
        chain.append(consumers[0])
    return chain


def _scalar(value: ir.Value) -> float:
    return float(value.const_value.numpy().reshape(()))
