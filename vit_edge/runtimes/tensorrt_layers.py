"""Which products of a TensorRT engine run in int8, from the engine inspector's JSON."""

import re
from collections.abc import Sequence
from typing import Any

from vit_edge.runtimes.base import UNKNOWN, Coverage, Product

PRODUCT_LAYERS = ("CONVOLUTION", "MATRIX_MULTIPLY", "DECONVOLUTION")
ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
PRECISIONS = {"int8": "int8", "fp16": "fp16", "half": "fp16", "bf16": "bf16", "fp32": "f32", "float": "f32"}
# What names a tensor's type: a field of its own from TensorRT 11 on, a part of its format before.
TYPE_FIELDS = ("DataType", "Datatype", "Format/Datatype", "Format")


def layers_of(network: Any) -> list[Any]:
    return [network.get_layer(index) for index in range(network.num_layers)]


def products(library: Any, network: Any) -> list[str]:
    """Names of the parsed network's convolutions and matrix products, which are those of their ONNX nodes."""
    kinds = {getattr(library.LayerType, name) for name in PRODUCT_LAYERS}
    return [layer.name for layer in layers_of(network) if layer.type in kinds]


def float_precision(library: Any, layers: Sequence[Any]) -> str:
    """Of a network's floats: fp16 or bf16 when any layer makes it, else f32."""
    made = {layer.get_output(index).dtype for layer in layers for index in range(layer.num_outputs)}
    reduced = {"fp16": library.DataType.HALF, "bf16": library.DataType.BF16}
    return next((name for name, dtype in reduced.items() if dtype in made), "f32")


def coverage(information: dict[str, Any], names: Sequence[str]) -> Coverage:
    """Each product with the precision that the engine layer which holds it reads.

    information: the inspector's JSON of an engine built with detailed verbosity: {"Layers": [{"Name", "LayerType",
    "Inputs": [{"Format/Datatype"}], "Metadata": "[ONNX Layer: name]…"}]}. A product that no layer names is UNKNOWN.
    """
    layers = [layer for layer in information.get("Layers", []) if isinstance(layer, dict)]
    return Coverage(tuple(_product(name, layers) for name in names))


def _product(name: str, layers: Sequence[dict[str, Any]]) -> Product:
    """Of several layers that name it, one prepares its weights, say, the one that reads int8."""
    holding = [layer for layer in layers if name in _names(layer)]
    found = [(str(layer.get("LayerType", "")), _precision(layer)) for layer in holding]
    kind, precision = min(found, key=lambda one: (one[1] != "int8", one[1] == UNKNOWN), default=("", UNKNOWN))
    return Product((name,), kind, precision)


def _names(layer: dict[str, Any]) -> list[str]:
    return [*ONNX_LAYER.findall(str(layer.get("Metadata", ""))), str(layer.get("Name"))]


def _precision(layer: dict[str, Any]) -> str:
    """int8 when any input is, else the first input's."""
    read = [_type(given) for given in layer.get("Inputs", []) if isinstance(given, dict)]
    return "int8" if "int8" in read else next(iter(read), UNKNOWN)


def _type(tensor: dict[str, Any]) -> str:
    told = next((str(tensor[field]).lower() for field in TYPE_FIELDS if field in tensor), "")
    return next((precision for word, precision in PRECISIONS.items() if word in told), UNKNOWN)
