"""Tensors clipped where the answers like it best, which need not be where squared error does."""

import copy

import numpy as np
import torch

from tests import trained
from vit_edge import metrics
from vit_edge.export.fold import deployable
from vit_edge.quantization import calibration, clipping, layerwise
from vit_edge.quantization.choice import FAR, choose
from vit_edge.quantization.layerwise import Options
from vit_edge.quantization.products import products
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.recipe import Int8Config


def test_a_large_channel_that_the_answers_do_not_need_is_clipped() -> None:
    images_NHWC, _ = trained.images()
    fit_NHWC, held_NHWC = images_NHWC[:64], images_NHWC[64:192]
    graph = deployable(trained.loud())
    observed = calibration.observe(graph, fit_NHWC)
    read = next(p for p in products(graph) if p.name == "mix").inputs[0].name

    def quantized(options: Options) -> tuple[torch.fx.GraphModule, layerwise.Outcome, float]:
        target = copy.deepcopy(graph)
        outcome = layerwise.decide(target, torch.from_numpy(fit_NHWC.copy()), observed, options)
        int8_NK = logits(Simulation(target, outcome).run, held_NHWC)
        return target, outcome, metrics.mean_kl(logits(graph, held_NHWC), int8_NK)

    target, plain, before = quantized(Options("mse"))
    limits = clipping.input_limits(graph, target, plain, observed.statistics, fit_NHWC)
    _, clipped, after = quantized(Options("mse", limits=limits))
    assert limits[read] < 0.5 * plain.ranges[read].limit
    assert clipped.ranges[read].limit == limits[read]
    assert clipped.methods[read] == "logits"
    assert after < 0.2 * before


def test_a_model_far_from_float_is_clipped_and_one_near_it_is_not() -> None:
    """Held out, with the ranges of all images."""
    images_NHWC, _ = trained.images()
    config = Int8Config(equalization=(), bias_correction="never", rounding="nearest")
    for model, far in ((trained.loud(), True), (trained.trained("cnn"), False)):
        told: list[str] = []
        chosen = choose(deployable(model), images_NHWC[: trained.CALIBRATION], config, told.append)
        assert any("clipped by the answers" in line for line in told) is far, told
        if far:
            assert chosen.options.limits
            assert np.isfinite(chosen.kl)
        else:
            assert chosen.kl <= FAR
