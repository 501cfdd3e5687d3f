"""The quick int8 probe of a model in training tells what the real quantizer will."""

import copy

import numpy as np
import pytest
import torch

from tests.small_models import build, cnn, images, logits_of, vit
from vit_edge import metrics
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer
from vit_edge.quantization.watch import OUT_OF_REACH, quantizability

CPU = torch.device("cpu")
FACTOR = 200.0


def with_outliers() -> Classifier:
    """The same function of one residual channel more than it reads: a bias that no layer's answer depends on, through
    which the inputs of the layers after a LayerNorm lose their resolution."""
    model = vit(readout="token")
    backbone = model.backbone
    assert isinstance(backbone, VisionTransformer)
    with torch.no_grad():
        for block in backbone.blocks:
            block.mlp.fc1.weight[0] = 0
            block.mlp.fc1.bias[0] = FACTOR  # GELU leaves it
            block.mlp.fc2.weight[:, 0] = 0
    return model


@pytest.mark.parametrize("make", [vit, cnn])
def test_the_probe_finds_the_noise_that_the_quantizer_makes(make) -> None:
    model = make()
    made = build(model)
    shown = images(64, model.image_size, seed=3)
    float_NK, int8_NK = logits_of(model, shown), logits_of(made.quantized, shown)
    found = quantizability(model, shown, CPU)
    assert found.sqnr_db == pytest.approx(metrics.sqnr_db(float_NK, int8_NK), abs=4)
    assert found.agreement >= OUT_OF_REACH


def test_outliers_are_seen() -> None:
    """Inputs of fc2 that hold a value 200 times as large as the others."""
    model, shown = with_outliers(), images(64)
    naive = quantizability(model, shown, CPU)
    usual = quantizability(vit(), shown, CPU)
    assert naive.sqnr_db < usual.sqnr_db - 10


def test_the_blocks_outliers_by_hand() -> None:
    model, shown = vit(), images(16)
    with torch.no_grad():
        _, record = model(torch.from_numpy(shown).permute(0, 3, 1, 2), intermediates=True)
    block = record["blocks.0"].double().flatten()
    centred = block - block.mean()
    sigma = centred.square().mean().sqrt()
    found = quantizability(model, shown, CPU).blocks["blocks.0"]
    assert found.max_over_sigma == pytest.approx(float(block.abs().max() / sigma), rel=1e-2)
    assert found.kurtosis == pytest.approx(float(centred.pow(4).mean() / sigma**4), rel=1e-2)
    assert list(quantizability(model, shown, CPU).blocks) == ["blocks.0", "blocks.1"]


def test_the_model_is_left_as_it_was() -> None:
    model = cnn().train()
    before = copy.deepcopy(model.state_dict())
    quantizability(model, images(16), CPU)
    assert model.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert np.isfinite(logits_of(model.eval(), images(2))).all()
