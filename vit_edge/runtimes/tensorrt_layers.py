"""Which products of a TensorRT engine run in int8, from the engine inspector's JSON."""

import re
from collections.abc import Sequence
from typing import Any

from vit_edge.runtimes.base import UNKNOWN, Coverage, Product

PRODUCT_LAYERS = ("CONVOLUTION", "MATRIX_MULTIPLY", "DECONVOLUTION")
ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
PRECISIONS = {"int8": "int8", "fp16": "fp16", "half": "fp16", "bf16": "bf16", "fp32": "f32", "float": "f32"}


def products(library: Any, network: Any) -> list[str]:
    """Names of the parsed network's convolutions and matrix products, which are those of their ONNX nodes."""
    kinds = {getattr(library.LayerType, name) for name in PRODUCT_LAYERS}
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return [layer.name for layer in layers if layer.type in kinds]


def coverage(information: dict[str, Any], names: Sequence[str]) -> Coverage:
    """Each product with the precision of the first input of the engine layer that holds it.

    information: the inspector's JSON of an engine built with detailed verbosity: {"Layers": [{"Name", "LayerType",
    "Inputs": [{"Format/Datatype"}], "Metadata": "[ONNX Layer: name]…"}]}. A product that no layer names is UNKNOWN.
    """
    layers = [layer for layer in information.get("Layers", []) if isinstance(layer, dict)]
    return Coverage(tuple(_product(name, layers) for name in names))


def _product(name: str, layers: Sequence[dict[str, Any]]) -> Product:
    for layer in layers:
        if name in ONNX_LAYER.findall(layer.get("Metadata", "")) or name == layer.get("Name"):
            return Product((name,), str(layer.get("LayerType", "")), _precision(layer))
    return Product((name,), "", UNKNOWN)


def _precision(layer: dict[str, Any]) -> str:
    formats = [str(given.get("Format/Datatype", given.get("Format", ""))) for given in layer.get("Inputs", [])]
    first = formats[0].lower() if formats else ""
    return next((precision for word, precision in PRECISIONS.items() if word in first), UNKNOWN)
