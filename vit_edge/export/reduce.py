"""Weights of seven bits, for x86 processors without VNNI.

There int8 products go through vpmaddubsw, which adds two products of an unsigned and a signed byte in 16 bits and
saturates: 2 · 255 · 127 does not fit, 2 · 255 · 64 does.
"""

import numpy as np
import onnx_ir as ir

from vit_edge.export.graph import array, entry, initializer, name_of, producer, products


def with_seven_bits(model: ir.Model) -> ir.Model:
    """A copy of the canonical graph whose weights keep to ±64, in steps twice as large.

    Rounding a second time adds at most half a step of the new grid to what int8 lost; ties go to the even step, so
    that nothing is shifted on average.
    """
    reduced = model.clone()
    for product in products(reduced):
        dequantize = producer(entry(product, 1), "DequantizeLinear")
        if dequantize is None or not entry(dequantize, 0).is_initializer():
            continue
        weight, scale = entry(dequantize, 0), entry(dequantize, 1)
        halved = np.rint(array(weight).astype(np.float32) / 2).astype(np.int8)
        dequantize.replace_input_with(0, initializer(reduced, f"{name_of(weight)}_halved", halved))
        dequantize.replace_input_with(1, initializer(reduced, f"{name_of(scale)}_doubled", array(scale) * 2))
    return reduced
