"""From the canonical int8 graph to the one that each runtime is fast with. All take a graph of fixed or of open batch size.

A lowering may use a recorded range or leave it, never make one up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vit_edge.export.attention import fuse_attention, multiply_by_transposed, quantize_mixing, quantize_scores
from vit_edge.export.graph import (
    array,
    bias_of,
    entry,
    initializer,
    name_of,
    only_consumer,
    producer,
    product_name,
    products,
    quantized,
    scalar,
    skip,
)  # fmt: skip
from vit_edge.export.integer import integer_products
from vit_edge.export.moves import quantize_before_moves
from vit_edge.export.onnx import INPUT, tidy
from vit_edge.export.placement import release_small
from vit_edge.export.windows import add_bias_once, drop_empty_pads, unpack_heads
from vit_edge.quantization.ranges import Range

Ranges = Mapping[str, Range]
Rewrite = Callable[[ir.Model, Ranges], None]
"""Changes a graph in place."""
INT32_MAX = np.iinfo(np.int32).max
ACTIVATIONS = {"Relu", "Clip"}
PIXEL_OPERATORS = {"Cast", "Sub", "Transpose", "Reshape"}


def lowered(model: ir.Model, ranges: Ranges, runtime: str, variant: str | None = None) -> ir.Model:
    """The canonical graph, changed in place into a variant for a runtime; None: the one that is best as a rule."""
    variants = LOWERINGS[runtime]
    for rewrite in variants[variant or next(iter(variants))]:
        rewrite(model, ranges)
    tidy(model)
    return model


def in_uint8(model: ir.Model, ranges: Ranges) -> None:
    """ONNX Runtime's int8 kernels want uint8 activations: where that gives no finer steps, with the zero point 128, bit for
    bit the canonical int8."""
    take_pixels_as_they_are(model)
    in_finer_steps(model, ranges)
    for node in _quantizers(model):
        found = ranges[name_of(entry(node, 0))]
        if node.outputs[0].dtype != ir.DataType.UINT8:
            quantize_with(model, node, Affine(found.scale, 128))


def in_finer_steps(model: ir.Model, ranges: Ranges) -> None:
    """uint8 where it has finer steps than symmetric int8; OpenVINO's convolutions are faster with it too."""
    for node in _quantizers(model):
        finer = ranges[name_of(entry(node, 0))].finer
        if finer is not None:
            quantize_with(model, node, Affine(*finer))


def in_quantized_operators(model: ir.Model, ranges: Ranges) -> None:
    """Quantized outputs of convolutions and int32 biases: what ONNX Runtime's optimiser makes QLinearConv and QGemm of."""
    for node in products(model):
        if node.op_type == "Conv" and _dequantized_input(node) is not None:
            quantize_output(model, node, ranges)
    for node in products(model):
        quantize_bias(model, node)


WINDOWS: tuple[Rewrite, ...] = (drop_empty_pads, add_bias_once, unpack_heads)
OPENVINO: tuple[Rewrite, ...] = (in_finer_steps, drop_empty_pads, add_bias_once)
# Runtime → name of a variant → its rewrites, in order. The first is taken where nothing is measured; `--tune` tries all.
LOWERINGS: dict[str, dict[str, tuple[Rewrite, ...]]] = {
    "onnxruntime": {
        "own operators": (*WINDOWS, in_uint8, integer_products, in_quantized_operators, fuse_attention),
        "own operators, plain attention": (in_uint8, integer_products, in_quantized_operators),
        "standard operators": (in_uint8, in_quantized_operators),
    },
    "openvino": {
        "float attention": (*OPENVINO, quantize_before_moves, multiply_by_transposed),
        "float attention, quantized late": (*OPENVINO, multiply_by_transposed),
        "int8 scores": (*OPENVINO, quantize_before_moves, quantize_scores),
        "int8 attention": (*OPENVINO, quantize_before_moves, quantize_scores, quantize_mixing),
        "canonical": (),
    },
    "tensorrt": {"where it gains": (release_small,)},
}


def take_pixels_as_they_are(model: ir.Model) -> None:
    """A float pixel minus 128, cut and moved and quantized with scale 1, is the uint8 pixel with zero point 128."""
    (images,) = (value for value in model.graph.inputs if value.name == INPUT)
    *before, last = _chain(images)
    if last.op_type != "QuantizeLinear" or scalar(entry(last, 1)) != 1:
        return
    for node in before:
        if node.op_type in ("Cast", "Sub"):
            skip(model, node)
        else:
            node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    zero_point = initializer(model, "pixel_zero_point", np.array(128, np.uint8))
    for dequantize in list(last.outputs[0].consumers()):
        dequantize.replace_input_with(0, entry(last, 0))
        dequantize.replace_input_with(2, zero_point)
    model.graph.remove(last, safe=True)


def quantize_with(model: ir.Model, quantize: ir.Node, affine: "Affine") -> None:
    """Scale, zero point and type of a quantizer and of all that reads it."""
    constants = affine.constants(model, str(quantize.name))
    for node in (quantize, *quantize.outputs[0].consumers()):
        for index, constant in enumerate(constants, start=1):
            node.replace_input_with(index, constant)
    quantize.outputs[0].type = ir.TensorType(ir.DataType.UINT8)


def quantize_output(model: ir.Model, conv: ir.Node, ranges: Ranges) -> None:
    """Quantize and dequantize after a convolution, or after the ReLU that alone reads it; all read what comes out."""
    found, last = ranges[name_of(conv.outputs[0])], conv
    activation = only_consumer(conv.outputs[0])
    if activation is not None and activation.op_type in ACTIVATIONS:
        found, last = _clipped(activation, found), activation
    value = last.outputs[0]
    readers = [(node, index) for node, index in value.uses() if node.op_type != "QuantizeLinear"]
    quantizers = [node for node in value.consumers() if node.op_type == "QuantizeLinear"]
    if quantizers:
        dequantized = quantizers[0].outputs[0].consumers()[0].outputs[0]
    else:
        dequantized = _inserted(model, last, Affine.of(found), f"{product_name(conv)}/output")
    for node, index in readers:
        node.replace_input_with(index, dequantized)


def quantize_bias(model: ir.Model, product: ir.Node) -> None:
    """A float bias as int32 in steps of input scale × weight scale, which is what the products are summed in."""
    found, scales = bias_of(product), _scales(product)
    if found is None or scales is None:
        return
    reader, index = found
    steps = np.round(array(entry(reader, index)).reshape(-1).astype(np.float64) / scales)
    if np.abs(steps).max(initial=0) > INT32_MAX:
        return
    name = f"{product_name(product)}.bias"
    constants = [
        initializer(model, f"{name}_int32", steps.astype(np.int32)),
        initializer(model, f"{name}_scale", scales.astype(np.float32)),
    ]
    dequantize = ir.node("DequantizeLinear", constants, {"axis": 0}, name=f"{name}/DequantizeLinear")
    dequantize.outputs[0].name = f"{name}_dequantized"
    model.graph.insert_before(reader, dequantize)
    reader.replace_input_with(index, dequantize.outputs[0])


@dataclass(frozen=True)
class Affine:
    """uint8 quantization: real = scale · (stored - zero_point)."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, found: Range) -> "Affine":
        return cls(*found.unsigned)

    def constants(self, model: ir.Model, name: str) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point as a quantize or dequantize node takes them."""
        scale = initializer(model, f"{name}_scale", np.array(self.scale, np.float32))
        return scale, initializer(model, f"{name}_zero_point", np.array(self.zero_point, np.uint8))


def _quantizers(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "QuantizeLinear"]


def _chain(images: ir.Value) -> list[ir.Node]:
    """The nodes that only move, cast and shift the images, each the only reader of the last, and the one after them."""
    chain: list[ir.Node] = []
    node = only_consumer(images)
    while node is not None:
        chain.append(node)
        node = only_consumer(node.outputs[0]) if node.op_type in PIXEL_OPERATORS else None
    return chain


def _inserted(model: ir.Model, after: ir.Node, affine: Affine, name: str) -> ir.Value:
    """What `after` makes, quantized and dequantized."""
    nodes = quantized(after.outputs[0], affine.constants(model, name), name)
    model.graph.insert_after(after, nodes)
    return nodes[1].outputs[0]


def _clipped(activation: ir.Node, found: Range) -> Range:
    """The range of a ReLU's or a Clip's output, from that of its input."""
    lowest, highest = 0.0, np.inf
    if activation.op_type == "Clip":
        given = [*activation.inputs, None, None][1:3]
        lowest, highest = (d if b is None else scalar(b) for b, d in zip(given, (-np.inf, np.inf), strict=True))
    return found.between(lowest, highest)


def _dequantized_input(product: ir.Node) -> ir.Node | None:
    """The DequantizeLinear that feeds a product's activations, or None for a float one."""
    return producer(entry(product, 0), "DequantizeLinear")


def _scales(product: ir.Node) -> np.ndarray | None:
    """Input scale × weight scale for each output channel, float64; None for a float product."""
    activation, weight = _dequantized_input(product), producer(entry(product, 1), "DequantizeLinear")
    if activation is None or weight is None:
        return None
    return scalar(entry(activation, 1)) * array(entry(weight, 1)).astype(np.float64)
