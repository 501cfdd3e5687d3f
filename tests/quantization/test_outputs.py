"""Outputs of convolutions in uint8: the same as in ONNX Runtime's graph, clipped where the answers like it best."""

import copy

import numpy as np
import pytest
import torch

from tests import trained
from tests.small_models import built
from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.export.lower import lowered
from vit_edge.quantization import calibration, clipping, layerwise, outputs
from vit_edge.quantization.layerwise import Options
from vit_edge.quantization.products import products
from vit_edge.quantization.ranges import Range
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.quantization.steps import to_uint8


@pytest.mark.parametrize("kind", ["vit", "cnn", "hybrid"])
def test_the_same_outputs_are_uint8_as_in_onnxruntimes_graph(kind: str) -> None:
    found = built(kind)
    graph = deployable(found.classifier)
    names = {p.node: p.name for p in products(graph)}
    model = lowered(onnx.with_batch(found.canonical.clone(), 1), found.by_value, "onnxruntime")
    ending = "/output/QuantizeLinear"
    expected = {str(node.name).removesuffix(ending) for node in model.graph if str(node.name).endswith(ending)}
    assert {names[node] for node in outputs.written(graph)} == expected
    assert bool(expected) is (kind != "vit")


def test_a_relu_takes_what_is_negative_and_nothing_else() -> None:
    values = torch.tensor([-3.0, -0.1, 0.0, 0.7, 2.0])
    found = Range(-3.0, 2.0, 3.0)
    plain = to_uint8(values, found, (-float("inf"), float("inf")))
    after_relu = to_uint8(values, found, (0.0, float("inf")))
    assert float((plain - values).abs().max()) <= 5 / 255
    assert torch.equal(after_relu[:3], torch.zeros(3))
    assert float((after_relu - values).abs()[2:].max()) <= 2 / 255


def test_a_loud_output_that_the_answers_do_not_need_is_clipped() -> None:
    images_NHWC, _ = trained.images()
    fit_NHWC, held_NHWC = images_NHWC[:64], images_NHWC[64:192]
    graph = deployable(trained.loud())
    observed = calibration.observe(graph, fit_NHWC)

    def quantized(limits: dict[str, float]) -> tuple[layerwise.Outcome, float]:
        target = copy.deepcopy(graph)
        outcome = layerwise.decide(target, torch.from_numpy(fit_NHWC.copy()), observed, Options("mse", limits=limits))
        run = Simulation(target, outcome, (), with_outputs=True).run
        return outcome, metrics.mean_kl(logits(graph, held_NHWC), logits(run, held_NHWC))

    target = copy.deepcopy(graph)
    plain = layerwise.decide(target, torch.from_numpy(fit_NHWC.copy()), observed, Options("mse"))
    mended = clipping.input_limits(graph, target, plain, observed.statistics, fit_NHWC)
    outcome, before = quantized(mended)
    found = clipping.output_limits(graph, outcome, observed.statistics, fit_NHWC, ())
    _, after = quantized({**mended, **found})
    assert found
    assert np.isfinite(after)
    assert after < 0.5 * before
