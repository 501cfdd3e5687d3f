"""Ranges, rounding and biases that are decided layer by layer."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.small_models import SIDE, cnn, images, logits_of, run_onnx, vit
from vit_edge import metrics
from vit_edge.export import lower, onnx
from vit_edge.export.fold import deployable
from vit_edge.quantization import calibration, integers, layerwise, quantizer, rounding
from vit_edge.quantization.layerwise import Options, Outcome
from vit_edge.quantization.products import parameter, products
from vit_edge.quantization.ranges import METHODS, PIXELS, Statistics
from vit_edge.quantization.simulation import Simulation, logits

EVERYTHING = Options("output", compensate=True, correct_bias=True)


def decided(kind: str, options: Options, **more: object) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule, Outcome]:
    graph = deployable(vit() if kind == "vit" else cnn())
    target = copy.deepcopy(graph)
    observed = calibration.observe(graph, images(64))
    outcome = layerwise.decide(target, torch.from_numpy(images(64)), observed, options, **more)  # type: ignore[arg-type]
    return graph, target, outcome


@pytest.mark.parametrize("options", [Options(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_the_simulation_is_what_the_converted_graph_computes(kind: str, options: Options) -> None:
    _, target, outcome = decided(kind, replace(options, symmetric=True))
    simulated = logits(Simulation(target, outcome).run, images(16, seed=3))
    converted = quantizer.quantize(target, torch.from_numpy(images(2)), outcome.ranges, (), outcome.scales)
    assert np.abs(simulated - logits_of(converted, images(16, seed=3))).max() < 1e-4 * simulated.std()


@pytest.mark.parametrize("options", [Options(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_with_finer_steps_it_is_what_the_lowered_graph_computes(kind: str, options: Options) -> None:
    floats, target, outcome = decided(kind, options)
    sample = images(16, seed=3)
    simulated = logits(Simulation(target, outcome).run, sample)
    converted = quantizer.quantize(target, torch.from_numpy(images(2)), outcome.ranges, (), outcome.scales)
    canonical = onnx.to_onnx(converted, SIDE)
    by_value = onnx.ranges_by_value(canonical, products(floats), outcome.ranges)
    graph = onnx.with_batch(canonical, len(sample))
    lower.in_finer_steps(graph, by_value)
    assert np.abs(simulated - run_onnx(graph, sample, optimised=False)).max() < 1e-4 * simulated.std()


@pytest.mark.parametrize("options", [Options(), EVERYTHING], ids=["plain", "everything"])
def test_every_weight_is_on_its_grid(options: Options) -> None:
    _, target, outcome = decided("vit", options)
    for product in products(target):
        if product.kind == "linear":
            weight = parameter(target, product.weight)
            assert weight is not None
            steps = weight / outcome.scales[product.name][:, None]
            assert float((steps - steps.round()).abs().max()) < 1e-3
            assert float(steps.abs().max()) < 127.5


def test_layers_left_in_float_are_untouched() -> None:
    graph, target, outcome = decided("vit", EVERYTHING, float_layers=("head",))
    left, right = (next(p for p in products(g) if p.name == "head") for g in (graph, target))
    assert torch.equal(parameter(graph, left.weight), parameter(target, right.weight))  # type: ignore[arg-type]
    assert "head" not in outcome.scales
    assert "head" not in outcome.corrected


def test_compensated_rounding_disturbs_the_products_less() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(48, 48, generator=generator)
    inputs_RI = torch.randn(1024, 48, generator=generator) @ mix
    weight_OI = torch.randn(20, 48, generator=generator)
    scales_O = rounding.weight_scales(weight_OI) * 8  # coarse, to show the difference
    lost = [
        float((inputs_RI @ (rounded - weight_OI).T).square().sum())
        for rounded in (
            rounding.nearest(weight_OI, scales_O),
            rounding.compensated(weight_OI, scales_O, inputs_RI),
        )
    ]
    assert lost[1] < 0.5 * lost[0]


def test_inputs_that_are_always_zero_do_not_break_compensation() -> None:
    inputs_RI = torch.zeros(64, 12)
    inputs_RI[:, :6] = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    weight_OI = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    rounded = rounding.compensated(weight_OI, rounding.weight_scales(weight_OI), inputs_RI)
    assert torch.isfinite(rounded).all()


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_corrected_biases_leave_no_mean_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed in float, as in the reference: a value on the border between two steps is rounded one way."""
    monkeypatch.setattr(integers, "run_here", lambda: False)
    sample = images(64)
    reference = logits_of(deployable(vit() if kind == "vit" else cnn()), sample)
    offsets = []
    for correct in (False, True):
        _, target, outcome = decided(kind, Options("mse", correct_bias=correct))
        offsets.append(np.abs((logits(Simulation(target, outcome).run, sample) - reference).mean(0)).max())
    assert offsets[1] < 1e-4 < offsets[0]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_ranges_by_output_are_each_one_of_the_methods(kind: str) -> None:
    graph, target, outcome = decided(kind, Options("output"))
    statistics = {n.name: s for n, s in calibration.observe(graph, images(64)).statistics.items()}
    for name, method in outcome.methods.items():
        expected = PIXELS if method == "exact" else statistics[name].range(method)
        assert outcome.ranges[name] == expected
    assert set(outcome.ranges) == set(statistics)
    sample = images(32, seed=4)
    reference = logits_of(graph, sample)
    assert metrics.agreement(reference.argmax(1), logits(Simulation(target, outcome).run, sample).argmax(1)) > 0.9


def test_each_method_has_a_limit_within_the_extremes() -> None:
    statistics = Statistics()
    statistics.update(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    limits = {name: method(statistics) for name, method in METHODS.items()}
    assert all(1 < limit <= limits["minmax"] for limit in limits.values())
    assert limits["percentile-99.9"] == pytest.approx(3.29, abs=0.1)
    assert limits["percentile-99.99"] == pytest.approx(3.89, abs=0.2)
