"""A graph of f32 values in fp16. TensorRT's networks are strongly typed: what is to run in fp16 must stand in the ONNX.

Weights, biases, activations and the scales of quantization become fp16; the input stays uint8 and the logits f32. What
fp16 would not serve (`overflow`) computes in f32 between two casts.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from vit_edge.export.graph import array, entry, initializer, name_of
from vit_edge.export.onnx import tidy
from vit_edge.export.operator_types import F16, F32, of_inputs, of_outputs
from vit_edge.export.overflow import Magnitudes, kept_in_f32
from vit_edge.quantization.ranges import STEPS

QUANTIZING = {"QuantizeLinear", "DequantizeLinear"}
NAMES = {F16: "fp16", F32: "f32"}


def halved(model: ir.Model, magnitudes: Magnitudes) -> ir.Model:
    """A copy in fp16, which computes the same but for rounding; nodes keep their names.

    A product between casts from and to fp16 is an fp16 product with f32 sums to TensorRT, which takes the casts in.
    """
    half = passes.ShapeInferencePass()(model.clone()).model
    wide, opset = kept_in_f32(half, magnitudes), half.graph.opset_imports[""]
    nodes = list(half.graph)
    for node in nodes:
        if node.name not in wide:
            _narrow(node, opset)
    for node in nodes:
        for index, wanted in _float_inputs(node, opset, node.name in wide):
            node.replace_input_with(index, _in_type(half, entry(node, index), wanted, node))
    for index, result in enumerate(half.graph.outputs):
        if result.dtype == F16:
            half.graph.outputs[index] = _restored(half, result)
    tidy(half)
    return half


def half_scales(scales: np.ndarray) -> np.ndarray:
    """Steps of int8 in fp16: the nearest, but none so far below the old one that the largest values would be clipped."""
    nearest = scales.astype(np.float16)
    low = nearest.astype(np.float64) < scales * (1 - 2.0**-10)
    return np.where(low, np.nextafter(nearest, np.float16(np.inf)), nearest)


def _narrow(node: ir.Node, opset: int) -> None:
    """Makes a node's f32 outputs fp16, with what says so in its attributes."""
    for value, types in zip(node.outputs, of_outputs(node, opset), strict=True):
        if value.dtype == F32 and F16 in types:
            value.type = ir.TensorType(F16)  # a new one: clones share theirs
    if node.op_type == "Cast" and node.attributes["to"].as_int() == F32.value:
        node.attributes["to"] = ir.AttrInt64("to", F16.value)
    if node.op_type == "ConstantOfShape" and node.outputs[0].dtype == F16:
        filling = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(filling.astype(np.float16)))
    if node.op_type == "DequantizeLinear" and entry(node, 0).is_initializer():
        _round_again(node)


def _round_again(dequantize: ir.Node) -> None:
    """An int8 weight in fp16 steps; its integers change only where the step is so small that fp16 has none near it."""
    weight, scales = entry(dequantize, 0), array(entry(dequantize, 1)).astype(np.float64)
    stored = array(weight)
    axis = dequantize.attributes["axis"].as_int() if scales.ndim else 0
    shape = [-1 if dimension == axis else 1 for dimension in range(stored.ndim)] if scales.ndim else []
    moved = np.round(stored * (scales / half_scales(scales)).reshape(shape)).clip(-STEPS, STEPS).astype(stored.dtype)
    if (moved != stored).any():
        assert len(weight.uses()) == 1
        weight.const_value = ir.tensor(moved, name=weight.name)


def _float_inputs(node: ir.Node, opset: int, wide: bool) -> Iterator[tuple[int, ir.DataType]]:
    """Index of each float input, and the type to read it in."""
    for index, (value, types) in enumerate(zip(node.inputs, of_inputs(node, opset), strict=True)):
        if value is not None and value.dtype in NAMES and node.op_type != "Cast":
            yield index, F32 if wide or F16 not in types else F16


def _in_type(model: ir.Model, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
    """The value itself, or a constant or a cast of it that all such readers share."""
    if value.dtype == wanted:
        return value
    name = f"{name_of(value)}_{NAMES[wanted]}"
    if value.is_initializer():
        if reader.op_type in QUANTIZING:
            return initializer(model, f"{name}_step", half_scales(array(value).astype(np.float64)))
        return initializer(model, name, array(value).astype(np.float16))
    for other in value.consumers():
        if other.op_type == "Cast" and other.outputs[0].name == name:
            return other.outputs[0]
    return _cast(model, value, wanted, name)


def _restored(model: ir.Model, result: ir.Value) -> ir.Value:
    """The graph's output in f32, under its own name."""
    name = name_of(result)
    result.name = f"{name}_fp16"
    return _cast(model, result, F32, name)


def _cast(model: ir.Model, value: ir.Value, wanted: ir.DataType, name: str) -> ir.Value:
    cast, maker = ir.node("Cast", [value], {"to": wanted.value}, name=f"{name}/Cast"), value.producer()
    assert maker is not None
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(wanted), value.shape
    model.graph.insert_after(maker, cast)
    return cast.outputs[0]
