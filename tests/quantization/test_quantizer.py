import pytest
import torch
import torch.nn.functional as F

from tests.small_models import built, calibrate, classifier, images, logits_of, vit
from vit_edge import metrics
from vit_edge.errors import UserError
from vit_edge.export.fold import deployable
from vit_edge.quantization import quantizer

aten = torch.ops.aten
QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_int8_stands_before_linear_and_conv_and_nowhere_else(kind: str) -> None:
    graph = built(kind).quantized.graph
    names = {p.node.name for p in built(kind).products if p.kind in ("linear", "conv")}
    readers = set()
    for node in graph.nodes:
        if node.target == QUANTIZE:
            for dequantize in node.users:
                readers |= {reader.name for reader in dequantize.users}
    assert readers == names


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_activations_are_symmetric_int8(kind: str) -> None:
    quantizes = [node for node in built(kind).quantized.graph.nodes if node.target == QUANTIZE]
    assert quantizes
    for node in quantizes:
        _, scale, zero_point, low, high, dtype = node.args
        assert (zero_point, low, high, dtype) == (0, -128, 127, torch.int8)
        assert scale > 0


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_int8_is_close_to_float(kind: str) -> None:
    found = built(kind)
    sample = images(64, seed=5)
    reference, target = logits_of(found.classifier, sample), logits_of(found.quantized, sample)
    assert metrics.sqnr_db(reference - reference.mean(0), target - reference.mean(0)) > 15
    assert metrics.agreement(reference.argmax(1), target.argmax(1)) > 0.9


def test_layers_left_in_float_are_left_and_told() -> None:
    graph = deployable(vit())
    left = ("head", "blocks.0.mlp.fc1")
    told = {layer.name: layer for layer in quantizer.layers(graph, left)}
    assert {name for name, layer in told.items() if layer.kind == "linear" and layer.reason} == set(left)
    ranges = calibrate(graph, images(8), minimum_images=8)
    quantized = quantizer.quantize(graph, torch.from_numpy(images(2)), ranges, left)
    weights = [node for node in quantized.graph.nodes if "dequantize_per_channel" in str(node.target)]
    assert len(weights) == sum(layer.reason is None for layer in told.values())


def test_an_unknown_layer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"blocks.0.mlp.fc11") as caught:
        quantizer.layers(deployable(vit()), ("blocks.0.mlp.fc11",))
    assert "blocks.0.mlp.fc1" in caught.value.fix


def test_what_cannot_be_int8_is_named_with_its_reason() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Parameter(torch.rand(3, 10))
            self.scale = torch.nn.Linear(3, 9)

        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            pooled = images_BCHW.mean(dim=(2, 3))
            made = self.scale(pooled).mean(0).reshape(3, 3)
            return torch.einsum("bc,ck->bk", F.linear(pooled, made), self.mix)

    layers = quantizer.layers(deployable(classifier(Odd())), ())
    assert [(layer.name, layer.reason is None) for layer in layers[:1]] == [("scale", True)]
    reasons = [layer.reason or "" for layer in layers[1:]]
    assert "computed in the graph" in reasons[0]
    assert "einsum" in reasons[1]


def test_no_product_is_float_without_being_told() -> None:
    class Odder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.ConvTranspose2d(3, 4, 2)
            self.pair = torch.nn.Bilinear(4, 4, 10)

        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            pooled_BC = self.up(images_BCHW).mean(dim=(2, 3))
            return self.pair(pooled_BC, pooled_BC)

    told = {
        layer.name.rpartition("/")[0] or layer.name: layer
        for layer in quantizer.layers(deployable(classifier(Odder())), ())
    }
    assert set(told) >= {"up", "pair"}
    assert all(layer.kind == "other" and "has no int8 form here" in (layer.reason or "") for layer in told.values())
