"""Quantizing before values are moved instead of after: exact, and what is moved is a quarter of the size."""

from collections.abc import Mapping

import onnx_ir as ir

from vit_edge.export.graph import array, entry
from vit_edge.quantization.ranges import Range

MOVES = {"Reshape", "Transpose", "Slice", "Concat", "Squeeze", "Unsqueeze", "Flatten"}


def quantize_before_moves(model: ir.Model, _: Mapping[str, Range]) -> None:
    """Each QuantizeLinear goes up to the one value that all it reads was cut, turned and joined from.

    A convolution's stays: OpenVINO computes it in float when a move stands between.
    """
    for quantize in [node for node in model.graph if node.op_type == "QuantizeLinear" and not _of_convolution(node)]:
        moves = _moves(quantize)
        sources = {value for node in moves for value in _moved(node) if value.producer() not in moves}
        if not moves or len(sources) != 1:
            continue
        _swap(model, quantize, moves, sources.pop())


def _of_convolution(quantize: ir.Node) -> bool:
    dequantized = (value for node in quantize.outputs[0].consumers() for value in node.outputs)
    return any(reader.op_type == "Conv" for value in dequantized for reader in value.consumers())


def _moves(quantize: ir.Node) -> list[ir.Node]:
    """The moves that nothing else than this quantizing reads, nearest first."""
    found: list[ir.Node] = []
    waiting = [entry(quantize, 0)]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None or node.op_type not in MOVES or value.is_graph_output() or node in found:
            continue
        if all(reader is quantize or reader in found for reader in value.consumers()):
            found.append(node)
            waiting += _moved(node)
    return found


def _moved(node: ir.Node) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None]
    return values if node.op_type == "Concat" else values[:1]


def _swap(model: ir.Model, quantize: ir.Node, moves: list[ir.Node], source: ir.Value) -> None:
    moved, stored = entry(quantize, 0), ir.TensorType(ir.DataType.from_numpy(array(entry(quantize, 2)).dtype))
    quantize.outputs[0].replace_all_uses_with(moved)
    early = ir.node("QuantizeLinear", [source, *quantize.inputs[1:]], name=str(quantize.name))
    early.outputs[0].name = f"{source.name}_quantized_{quantize.name}"
    early.outputs[0].type, early.outputs[0].shape = stored, source.shape
    model.graph.remove(quantize, safe=True)
    first = min(moves, key=list(model.graph).index)
    model.graph.insert_before(first, early)
    for node in moves:
        node.outputs[0].type = stored
        for index, value in enumerate(node.inputs):
            if value is source:
                node.replace_input_with(index, early.outputs[0])
