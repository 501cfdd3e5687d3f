"""PT2E quantization to the canonical graph, which every lowering starts from.

Activations: signed int8, symmetric, per tensor, zero point 0. Weights: int8, symmetric, per output channel. Biases
float. Quantize and dequantize stand on the inputs of linear and conv, nowhere else: LayerNorm, softmax, GELU and the
residual stream stay float.
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    Quantizer,
)

from vit_edge.errors import unknown
from vit_edge.quantization.products import Product, products, why_float
from vit_edge.quantization.ranges import STEPS, Range

ANNOTATION = "quantization_annotation"


@dataclass(frozen=True)
class Layer:
    """What became of a matrix product: `reason` says why it stayed float, and is None when it is int8."""

    name: str
    kind: str
    reason: str | None


class FixedPerChannelObserver(PerChannelMinMaxObserver):
    """Gives the scales that it was made with, whatever it sees."""

    def __init__(self, scales_O: Tensor, **kwargs: Any):
        super().__init__(**kwargs)
        self.scales_O = scales_O

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scales_O, torch.zeros_like(self.scales_O, dtype=torch.int32)


class CanonicalQuantizer(Quantizer):
    """Annotates the inputs and weights of every linear and conv that is not in `float_layers`.

    ranges: by node name, as calibration gives them. scales: of weights (O,) by product name; the largest magnitude
    of each output channel where there is none.
    """

    def __init__(
        self,
        ranges: Mapping[str, Range],
        float_layers: Collection[str] = (),
        scales: Mapping[str, Tensor] | None = None,
    ):
        self.ranges = ranges
        self.float_layers = frozenset(float_layers)
        self.scales = scales or {}

    def annotate(self, model: GraphModule) -> GraphModule:
        for product in products(model):
            if why_float(product, self.float_layers) is None:
                product.node.meta[ANNOTATION] = self._annotation(product)
        return model

    def validate(self, model: GraphModule) -> None:
        pass

    def activation_spec(self, product: Product) -> QuantizationSpecBase:
        """How the product's input is quantized."""
        return _activation(self.ranges[product.inputs[0].name])

    def weight_spec(self, product: Product) -> QuantizationSpecBase:
        """How its weight is."""
        scales_O = self.scales.get(product.name)
        if scales_O is None:
            return per_channel(PerChannelMinMaxObserver)
        return per_channel(FixedPerChannelObserver.with_args(scales_O=scales_O))

    def output_spec(self, _: Product) -> QuantizationSpecBase | None:
        """How its output is: not at all in the canonical graph."""
        return None

    def _annotation(self, product: Product) -> QuantizationAnnotation:
        (activation,) = product.inputs
        specs = {activation: self.activation_spec(product), product.weight: self.weight_spec(product)}
        output = self.output_spec(product)
        return QuantizationAnnotation(input_qspec_map=specs, output_qspec=output, _annotated=True)


def layers(graph_module: GraphModule, float_layers: Collection[str]) -> list[Layer]:
    """Every matrix product and what it becomes. Raises UserError for a name in `float_layers` that is none of them."""
    found = products(graph_module)
    names = [product.name for product in found if product.kind in ("linear", "conv")]
    for name in float_layers:
        if name not in names:
            raise unknown("layer in int8.float_layers", name, names)
    return [Layer(product.name, product.kind, why_float(product, float_layers)) for product in found]


def weight_sqnr_db(weight: Tensor, stored: Tensor) -> float | None:
    """Signal to noise in decibels of the stored weight; None without loss."""
    weight, stored = weight.detach().double(), stored.detach().double()
    signal, lost = weight.square().sum(), (weight - stored).square().sum()
    return round(float(10 * torch.log10(signal / lost)), 2) if lost > 0 else None


def quantize(
    graph_module: GraphModule, example: Tensor, ranges: Mapping[str, Range], float_layers: Collection[str] = (),
    scales: Mapping[str, Tensor] | None = None,
) -> nn.Module:  # fmt: skip
    """The graph with int8 weights folded and quantize/dequantize on activations; `graph_module` is used up.

    `example` is any input: one forward pass lets the observers see the weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(graph_module, CanonicalQuantizer(ranges, float_layers, scales))
        with torch.no_grad():
            prepared(example)
        return convert_pt2e(prepared, fold_quantize=True)


def per_channel(observer: Any) -> QuantizationSpec:
    """Of a weight: int8 in steps of each output channel, which the observer or fake quantization finds."""
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-STEPS,
        quant_max=STEPS,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=observer,
    )


def _activation(found: Range) -> FixedQParamsQuantizationSpec:
    return FixedQParamsQuantizationSpec(
        dtype=torch.int8,
        scale=found.scale,
        zero_point=0,
        quant_min=-STEPS - 1,
        quant_max=STEPS,
        qscheme=torch.per_tensor_symmetric,
    )
