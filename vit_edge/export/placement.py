"""Which products TensorRT is given in int8: those whose int8 kernels gain something, as NVIDIA's own quantizer places them.

The rules are those that Model Optimizer states for ONNX models: a product of one row uses no tensor cores, and int8
kernels want 16 values along each side.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import onnx_ir as ir

from vit_edge.export.graph import array, entry, initializer, producer, product_name, products
from vit_edge.quantization.ranges import Range

LEAST_SIDE, CHANNEL_STEP, LEAST_KERNEL = 16, 8, 3


def release_small(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Gives back to float what gains nothing in int8. Weights keep their values on int8's grid."""
    for product in products(model):
        if _quantized(product) and not _gains(product):
            _release(model, product)


def int8_products(model: ir.Model) -> set[str]:
    """Names of the products that read a quantized activation and a quantized weight."""
    return {product_name(product) for product in products(model) if _quantized(product)}


def _quantized(product: ir.Node) -> bool:
    return all(producer(entry(product, index), "DequantizeLinear") is not None for index in (0, 1))


def _gains(product: ir.Node) -> bool:
    weight = entry(product, 1).shape
    assert weight is not None
    sizes = [int(size) for size in weight]  # type: ignore[arg-type]
    if product.op_type == "Conv":
        return _rows(product, 2) != 1 and _conv_gains(product, *sizes)
    return _rows(product, 1) != 1 and min(sizes) >= LEAST_SIDE


def _rows(product: ir.Node, channels_at: int) -> int | None:
    """Positions that share the weights, over the batch; None where the batch is open."""
    shape = product.outputs[0].shape
    assert shape is not None
    sizes = [*shape[:-1]] if channels_at == 1 else [shape[0], *shape[2:]]
    known = [size for size in sizes if isinstance(size, int)]
    return prod(known) if len(known) == len(sizes) else None


def _conv_gains(conv: ir.Node, outputs: int, inputs: int, *kernel: int) -> bool:
    """inputs: of one group."""
    if min(outputs, inputs) >= LEAST_SIDE:
        return True
    if "group" in conv.attributes and conv.attributes["group"].as_int() > 1:
        return outputs % CHANNEL_STEP == 0 and min(kernel) >= LEAST_KERNEL
    aligned = outputs % CHANNEL_STEP == 0 or inputs % CHANNEL_STEP == 0
    return aligned and max(outputs, inputs) >= LEAST_SIDE and len(set(kernel)) == 1


def _release(model: ir.Model, product: ir.Node) -> None:
    activation, weight = (producer(entry(product, index), "DequantizeLinear") for index in (0, 1))
    assert activation is not None
    assert weight is not None
    quantize = producer(entry(activation, 0), "QuantizeLinear")
    assert quantize is not None
    product.replace_input_with(0, entry(quantize, 0))
    product.replace_input_with(1, initializer(model, f"{product_name(product)}.weight_float", _dequantized(weight)))


def _dequantized(dequantize: ir.Node) -> np.ndarray:
    stored, scales = array(entry(dequantize, 0)).astype(np.float32), array(entry(dequantize, 1))
    axis = dequantize.attributes["axis"].as_int()
    return stored * scales.reshape([-1 if dimension == axis else 1 for dimension in range(stored.ndim)])
