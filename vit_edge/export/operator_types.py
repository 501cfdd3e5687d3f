"""Which float types the ONNX standard lets a node read and make, f32 and fp16 alone considered."""

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
NAMES = {"tensor(float)": F32, "tensor(float16)": F16}


def of_inputs(node: ir.Node, opset: int) -> list[set[ir.DataType]]:
    """What each input may be."""
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    return list(_types(schema, schema.inputs, len(node.inputs)))


def of_outputs(node: ir.Node, opset: int) -> list[set[ir.DataType]]:
    """What each output may be."""
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    return list(_types(schema, schema.outputs, len(node.outputs)))


def has_fp16_form(node: ir.Node, opset: int) -> bool:
    """Whether fp16 may stand wherever the node has f32; a parameter that is f32 in every form, scales say, counts not."""
    read = zip(node.inputs, of_inputs(node, opset), strict=True)
    made = zip(node.outputs, of_outputs(node, opset), strict=True)
    reads = all(F16 in types for value, types in read if value is not None and value.dtype == F32 and types != {F32})
    return reads and all(F16 in types for value, types in made if value.dtype == F32)


def _types(
    schema: onnx.defs.OpSchema, formals: Sequence[onnx.defs.OpSchema.FormalParameter], count: int
) -> Iterator[set[ir.DataType]]:
    """Of each of `count` parameters; the last formal one may repeat."""
    constraints = {one.type_param_str: set(one.allowed_type_strs) for one in schema.type_constraints}
    for index in range(count):
        formal = formals[min(index, len(formals) - 1)].type_str
        yield {NAMES[name] for name in constraints.get(formal, {formal}) if name in NAMES}
