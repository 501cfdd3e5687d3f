"""Reading and editing an ONNX graph, with what is certain in our graphs asserted in one place."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

OPSET = 20
PRODUCTS = ("MatMul", "Gemm", "Conv")


def products(model: ir.Model) -> list[ir.Node]:
    """The matrix products, in the graph's order."""
    return [node for node in model.graph if node.op_type in PRODUCTS]


def product_name(node: ir.Node) -> str:
    """The name that a matrix product has in `quantization.products`; its node is NAME/OPERATOR."""
    assert node.op_type in PRODUCTS
    return str(node.name).rpartition("/")[0]


def entry(node: ir.Node, index: int) -> ir.Value:
    """An input that the operator cannot do without."""
    value = node.inputs[index]
    assert value is not None
    return value


def name_of(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def array(value: ir.Value) -> np.ndarray:
    """The numbers of a constant."""
    assert value.const_value is not None
    return value.const_value.numpy()


def constant_of(value: ir.Value) -> np.ndarray | None:
    """The numbers that a value always has, computed where it hangs on constants alone; None for any other."""
    if value.is_initializer():
        return array(value)
    node = value.producer()
    if node is None or not node.inputs:
        return None
    given = {one: constant_of(one) for one in node.inputs if one is not None}
    if any(numbers is None for numbers in given.values()):
        return None
    return _evaluated(node, {name_of(one): numbers for one, numbers in given.items() if numbers is not None})


def _evaluated(node: ir.Node, given: dict[str, np.ndarray]) -> np.ndarray:
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(numbers.dtype), numbers.shape)
        for name, numbers in given.items()
    ]
    made = helper.make_empty_tensor_value_info(name_of(node.outputs[0]))
    graph = helper.make_graph([ir.to_proto(node)], "constant", types, [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    (found,) = ReferenceEvaluator(model).run(None, given)  # type: ignore[arg-type,misc]
    return np.asarray(found)


def scalar(value: ir.Value) -> float:
    return float(array(value).reshape(()))


def producer(value: ir.Value, operator: str) -> ir.Node | None:
    """The node that makes the value, when it is of this operator."""
    node = value.producer()
    return node if node is not None and node.op_type == operator else None


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The node that alone reads the value; None when several do, or the graph's output is it."""
    consumers = value.consumers()
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def bias_of(product: ir.Node) -> tuple[ir.Node, int] | None:
    """Where a product's constant bias comes in: a node and the index of its input."""
    if product.op_type in ("Conv", "Gemm"):
        return (product, 2) if len(product.inputs) > 2 and product.inputs[2] is not None else None
    add = only_consumer(product.outputs[0])
    if add is None or add.op_type != "Add":
        return None
    index = 1 if add.inputs[0] is product.outputs[0] else 0
    bias = entry(add, index)
    return (add, index) if bias.is_initializer() and array(bias).ndim == 1 else None


def initializer(model: ir.Model, name: str, numbers: np.ndarray) -> ir.Value:
    """The constant of that name, made when there is none."""
    if name not in model.graph.initializers:
        tensor = ir.tensor(numbers, name=name)
        dtype = ir.TensorType(ir.DataType.from_numpy(numbers.dtype))
        shape = ir.Shape(numbers.shape)
        model.graph.register_initializer(ir.Value(name=name, const_value=tensor, shape=shape, type=dtype))
    return model.graph.initializers[name]


def quantized(value: ir.Value, constants: Sequence[ir.Value], name: str) -> tuple[ir.Node, ir.Node]:
    """A QuantizeLinear of the value and the DequantizeLinear after it, both with these constants: scale and zero point."""
    quantize = ir.node("QuantizeLinear", [value, *constants], name=f"{name}/QuantizeLinear")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], *constants], name=f"{name}/DequantizeLinear")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{name}_quantized", f"{name}_dequantized"
    return quantize, dequantize


def skip(model: ir.Model, node: ir.Node) -> None:
    """Takes a node out: who read its output reads its first input."""
    node.outputs[0].replace_all_uses_with(entry(node, 0))
    model.graph.remove(node, safe=True)
