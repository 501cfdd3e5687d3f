"""An exported graph as a clean ONNX file: the same bytes every time, and nodes named after the student's modules.

Input "images": uint8 (B, H, W, 3); output "logits": float32 (B, K). Opset 20 keeps GELU as one operator.
"""

import ast
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from torch import nn

from vit_edge.export.fold import MAX_BATCH, not_exportable
from vit_edge.export.graph import PRODUCTS, array, entry, initializer, name_of, producer, product_name, products
from vit_edge.quantization.products import PREFIX, Product, name_in
from vit_edge.quantization.ranges import Range

OPSET = 20
INPUT, OUTPUT, BATCH = "images", "logits", "batch"
SCOPES = "pkg.torch.onnx.name_scopes"


def program(graph_module: nn.Module, image_size: int) -> torch.onnx.ONNXProgram:
    """The graph, float or converted to int8, as the exporter gives it: an ONNX model and the graph that it is made of."""
    example = torch.zeros(2, image_size, image_size, 3, dtype=torch.uint8)
    batch = torch.export.Dim(BATCH, min=1, max=MAX_BATCH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.onnx.export(
                graph_module, (example,), dynamo=True, opset_version=OPSET, input_names=[INPUT], output_names=[OUTPUT],
                dynamic_shapes=({0: batch},), verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as err:
            raise not_exportable(err) from err
    assert exported is not None
    return exported


def to_onnx(graph_module: nn.Module, image_size: int) -> ir.Model:
    """The graph with a free batch size, cleaned."""
    return clean(program(graph_module, image_size).model)


def clean(model: ir.Model) -> ir.Model:
    """Names the nodes, transposes int8 weights ahead of time, and removes what says nothing; in place."""
    name_nodes(model)
    for node in list(model.graph):
        transpose_weight(model, node)
    for node in products(model):
        own_parameters(model, node)
    tidy(model)
    forget_shapes(model, BATCH)
    return model


def with_batch(model: ir.Model, batch: int | None) -> ir.Model:
    """A copy for exactly `batch` images: shapes are constants, and what hangs on them alone is computed now.

    None: for any number, in a dimension named BATCH; nothing but pixels hangs on the input.
    """
    if batch is None:
        return with_open_batch(model)
    fixed = model.clone()
    forget_shapes(fixed, batch)
    optimizer.optimize(fixed, num_iterations=4)
    for node in products(fixed):
        own_parameters(fixed, node)
    tidy(fixed)
    return passes.ShapeInferencePass()(fixed).model


def with_open_batch(model: ir.Model) -> ir.Model:
    """A copy in which the number of images, where a node asks for it, comes from the tokens that it is wanted for.

    Runtimes and lowerings then find the pixels' own reader alone behind the input.
    """
    free = model.clone()
    (images,) = free.graph.inputs
    for shape in [node for node in images.consumers() if node.op_type == "Shape"]:
        shape.replace_input_with(0, _companion(shape))
    free.graph.sort()
    forget_shapes(free, BATCH)
    return passes.ShapeInferencePass()(free).model


def save(model: ir.Model, path: Path) -> None:
    """Writes one self-contained file."""
    ir.save(model, path)


def load(path: Path) -> ir.Model:
    """What `save` wrote, all of it in memory."""
    return ir.from_proto(onnx.load(path))


def ranges_by_value(model: ir.Model, found: Sequence[Product], ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Ranges by the canonical graph's value names, from those by the exported graph's node names.

    `found` are the exported graph's products; the ONNX nodes bear their names.
    """
    nodes = {product_name(node): node for node in products(model)}
    by_value = {}
    for product in found:
        if product.kind == "other":
            continue
        node = nodes[product.name]
        for index, source in enumerate(product.inputs):
            by_value[name_of(_before_quantization(entry(node, index)))] = ranges[source.name]
        if product.kind == "conv":
            by_value[name_of(node.outputs[0])] = ranges[product.node.name]
    return by_value


def name_nodes(model: ir.Model) -> None:
    """MODULE/OPERATOR for every node; matrix products bear the names of `quantization.products` before the slash.

    Runtimes append to names as they rewrite nodes, so what is before the slash is what they are found by.
    """
    seen: Counter[str] = Counter()
    for node in model.graph:
        path = _module_path(node)
        if node.op_type in PRODUCTS:
            node.name = f"{name_in(path, _is_weight(entry(node, 1)), seen)}/{node.op_type}"
        else:
            node.name = name_in(f"{path}/{node.op_type}", True, seen)


def transpose_weight(model: ir.Model, node: ir.Node) -> None:
    """Transpose(DequantizeLinear(W)) as DequantizeLinear(Wᵀ): runtimes look for the pair next to the product."""
    dequantize = producer(entry(node, 0), "DequantizeLinear") if node.op_type == "Transpose" else None
    if dequantize is None or not entry(dequantize, 0).is_initializer():
        return
    weight, order = entry(dequantize, 0), list(node.attributes["perm"].as_ints())
    assert len(weight.uses()) == len(dequantize.outputs[0].uses()) == 1
    transposed = array(weight).transpose(order).copy()
    dequantize.replace_input_with(0, initializer(model, f"{weight.name}_transposed", transposed))
    axis = order.index(dequantize.attributes["axis"].as_int())
    dequantize.attributes["axis"] = ir.AttrInt64("axis", axis)
    node.outputs[0].replace_all_uses_with(dequantize.outputs[0])
    model.graph.remove(node, safe=True)


def own_parameters(model: ir.Model, product: ir.Node) -> None:
    """Gives an int8 weight its own scale and zero point, named after its layer.

    OpenVINO's converter leaves a product in float when another weight has the very same constant.
    """
    dequantize = producer(entry(product, 1), "DequantizeLinear")
    if dequantize is None:
        return
    for index, suffix in enumerate(("weight", "weight_scale", "weight_zero_point")):
        constant = initializer(model, f"{product_name(product)}.{suffix}", array(entry(dequantize, index)))
        dequantize.replace_input_with(index, constant)


def tidy(model: ir.Model) -> None:
    """Removes unused nodes and constants, and the exporter's notes, which hold this machine's paths."""
    passes.RemoveUnusedNodesPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def forget_shapes(model: ir.Model, batch: int | str) -> None:
    """Sets the batch size of input and output, and drops the shapes in between, which held the old one."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([batch, *list(value.shape)[1:]])


def _companion(node: ir.Node) -> ir.Value:
    """The first value, no constant, that joins what comes of a node further on."""
    made = node.outputs[0]
    while True:
        (reader,) = made.consumers()
        others = [value for value in reader.inputs if value is not None and value is not made]
        found = next((value for value in others if not value.is_initializer()), None)
        if found is not None:
            return found
        made = reader.outputs[0]


def _module_path(node: ir.Node) -> str:
    """The module that made the node; the scopes are its ancestors' paths, its own, and the operator's name."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    return scopes[-2].removeprefix(PREFIX) if len(scopes) > 1 else ""


def _is_weight(value: ir.Value) -> bool:
    """Whether the value is a constant, perhaps dequantized and transposed."""
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return node.op_type in ("Transpose", "DequantizeLinear") and _is_weight(entry(node, 0))


def _before_quantization(value: ir.Value) -> ir.Value:
    for operator in ("DequantizeLinear", "QuantizeLinear"):
        node = producer(value, operator)
        value = value if node is None else entry(node, 0)
    return value
