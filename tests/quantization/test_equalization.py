"""Scales move without a change of the float function, and make tensors easier on int8."""

import pytest
import torch
from torch import nn

from tests.small_models import classifier, cnn, images, logits_of, vit, worst
from vit_edge.export.fold import deployable
from vit_edge.models.classifier import Classifier
from vit_edge.quantization import calibration, equalization
from vit_edge.quantization.equalization import Group, groups
from vit_edge.quantization.products import parameter, products, tidy

EXACT = 1e-5


class Residuals(nn.Module):
    """A linear residual stream with two branches, a squeeze-and-excitation gate, and a head on its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.first, self.second = (nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU6(), nn.Conv2d(8, 16, 1)) for _ in "ab")
        self.squeeze, self.depthwise = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        features = self.stem(images_BCHW)
        features = features + self.first(features)
        features = (features + self.second(features)).relu()
        features = features * self.squeeze(features.mean((2, 3), keepdim=True)).sigmoid()
        return self.head(self.depthwise(features).relu().mean((2, 3)))


def residuals() -> Classifier:
    torch.manual_seed(0)
    return classifier(Residuals())


def moved(model: Classifier, seed: int) -> tuple[torch.fx.GraphModule, list[Group]]:
    """Its graph with a random scale from 0.1 to 10 on every channel of every group."""
    graph, generator = deployable(model), torch.Generator().manual_seed(seed)
    found = groups(graph)
    for group in found:
        reader = group.readers[0]
        weight = parameter(graph, reader.weight)
        assert weight is not None
        channels = weight.shape[0 if equalization.is_depthwise(graph, reader) else 1]
        equalization.apply(graph, group, 10 ** (2 * torch.rand(channels, generator=generator) - 1))
    tidy(graph)
    return graph, found


@pytest.mark.parametrize("make", [vit, cnn, residuals])
def test_any_scale_leaves_the_float_function(make) -> None:
    model = make()
    graph, found = moved(model, seed=1)
    assert found
    assert worst(logits_of(graph, images(4)), logits_of(deployable(model), images(4))) < EXACT


@pytest.mark.parametrize(
    "variant", [{"distillation_token": True}, {"readout": "mean"}, {"registers": 2, "position_prefix": False},
                {"pre_logits": True}, {"stem": True, "patch_size": 2}],
)  # fmt: skip
def test_every_variant_of_the_vit_keeps_its_function(variant: dict[str, object]) -> None:
    model = vit(**variant)
    graph, found = moved(model, seed=2)
    assert {"blocks.0.attn.proj", "blocks.1.mlp.fc1"} <= {group.name for group in found}
    assert worst(logits_of(graph, images(3)), logits_of(deployable(model), images(3))) < EXACT


def test_what_is_joined_in_a_vit() -> None:
    names = [group.name for group in groups(deployable(vit()))]
    attention = "blocks.{0}.attn.q+blocks.{0}.attn.k+blocks.{0}.attn.v"
    block = [attention, "blocks.{0}.attn.proj", "blocks.{0}.mlp.fc1"]
    assert names == [*(name.format(i) for i in (0, 1) for name in block), "head"]


def test_a_residual_stream_has_one_scale_and_a_clipped_activation_none() -> None:
    found = {group.name: len(group.writers) for group in groups(deployable(residuals()))}
    assert found == {"first.0+second.0+squeeze+depthwise": 3, "head": 1}


def test_a_group_that_only_float_layers_read_is_left() -> None:
    names = [group.name for group in groups(deployable(residuals()), ["head"])]
    assert names == ["first.0+second.0+squeeze+depthwise"]


def test_full_strength_makes_the_channels_of_an_input_alike() -> None:
    graph = deployable(vit())
    with torch.no_grad():  # one channel of v 50 times as large
        graph.get_parameter("backbone.blocks.0.attn.v.weight")[3] *= 50
    before = logits_of(graph, images(8))
    largest = equalization.largest_inputs(graph, groups(graph), images(8))
    equalization.equalize(graph, largest, 1.0)
    proj = next(p for p in products(graph) if p.name == "blocks.0.attn.proj")
    after = equalization.largest_inputs(graph, groups(graph), images(8))[proj.inputs[0].name]
    assert float(largest[proj.inputs[0].name].max() / largest[proj.inputs[0].name].median()) > 20
    assert float(after.max() / after.min()) < 1.01
    assert worst(logits_of(graph, images(8)), before) < EXACT


def test_an_outlier_costs_less_once_it_is_spread() -> None:
    graph = deployable(vit())
    with torch.no_grad():
        graph.get_parameter("backbone.blocks.0.attn.v.weight")[3] *= 50
    largest = equalization.largest_inputs(graph, groups(graph), images(16))
    proj = next(p for p in products(graph) if p.name == "blocks.0.attn.proj").inputs[0].name
    before = {n.name: s for n, s in calibration.observe(graph, images(16)).statistics.items()}[proj].range("minmax")
    equalization.equalize(graph, largest, 0.5)
    after = {n.name: s for n, s in calibration.observe(graph, images(16)).statistics.items()}[proj].range("minmax")
    assert after.limit < before.limit / 4
