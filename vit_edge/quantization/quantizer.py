"""PT2E quantization to the canonical graph, which every lowering starts from.

Activations: signed int8, symmetric, per tensor, zero point 0. Weights: int8, symmetric, per output channel. Biases
float. Quantize and dequantize stand on the inputs of linear and conv, nowhere else: LayerNorm, softmax, GELU and the
residual stream stay float.
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

from vit_edge.errors import unknown
from vit_edge.quantization.products import Product, parameter, products
from vit_edge.quantization.ranges import Range

ANNOTATION = "quantization_annotation"
WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
)


@dataclass(frozen=True)
class Layer:
    """What became of a matrix product: `reason` says why it stayed float, and is None when it is int8."""

    name: str
    kind: str
    reason: str | None


class CanonicalQuantizer(Quantizer):
    """Annotates the inputs and weights of every linear and conv that has a range and is not in `float_layers`.

    `ranges` is by node name, as `calibration.calibrate` gives it.
    """

    def __init__(self, ranges: Mapping[str, Range], float_layers: Collection[str] = ()):
        self.ranges = ranges
        self.float_layers = frozenset(float_layers)

    def annotate(self, model: GraphModule) -> GraphModule:
        for product in products(model):
            if why_float(product, self.float_layers) is None:
                product.node.meta[ANNOTATION] = self._annotation(product)
        return model

    def validate(self, model: GraphModule) -> None:
        pass

    def _annotation(self, product: Product) -> QuantizationAnnotation:
        (activation,) = product.inputs
        return QuantizationAnnotation(
            input_qspec_map={activation: _activation(self.ranges[activation.name]), product.weight: WEIGHT},
            _annotated=True,
        )


def layers(graph_module: GraphModule, float_layers: Collection[str]) -> list[Layer]:
    """Every matrix product and what it becomes. Raises UserError for a name in `float_layers` that is none of them."""
    found = products(graph_module)
    names = [product.name for product in found if product.kind in ("linear", "conv")]
    for name in float_layers:
        if name not in names:
            raise unknown("layer in int8.float_layers", name, names)
    return [Layer(product.name, product.kind, why_float(product, float_layers)) for product in found]


def noise(graph_module: GraphModule, product: Product, ranges: Mapping[str, Range]) -> dict[str, float | None]:
    """Signal to noise, in decibels, of int8 on a layer's weight and input; None where unknown or without loss."""
    if product.kind not in ("linear", "conv"):
        return {"weight_sqnr_db": None, "input_sqnr_db": None}
    weight = parameter(graph_module, product.weight)
    assert weight is not None
    rows = weight.detach().flatten(1)
    step = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    lost = (rows - (rows / step).round() * step).square().sum()
    sqnr_db = float(10 * torch.log10(rows.square().sum() / lost)) if lost > 0 else None
    return {
        "weight_sqnr_db": sqnr_db and round(sqnr_db, 2),
        "input_sqnr_db": ranges[product.inputs[0].name].sqnr_db,
    }


def why_float(product: Product, float_layers: Collection[str]) -> str | None:
    """Why the product stays float, or None when it becomes int8."""
    return product.obstacle or ("listed in int8.float_layers" if product.name in float_layers else None)


def quantize(
    graph_module: GraphModule, example: torch.Tensor, ranges: Mapping[str, Range], float_layers: Collection[str] = ()
) -> nn.Module:
    """The graph with int8 weights folded and quantize/dequantize on activations; `graph_module` is used up.

    `example` is any input: one forward pass lets the observers see the weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(graph_module, CanonicalQuantizer(ranges, float_layers))
        with torch.no_grad():
            prepared(example)
        return convert_pt2e(prepared, fold_quantize=True)


def _activation(found: Range) -> FixedQParamsQuantizationSpec:
    return FixedQParamsQuantizationSpec(
        dtype=torch.int8,
        scale=found.scale,
        zero_point=0,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_symmetric,
    )
