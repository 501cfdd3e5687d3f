"""Losses held to numbers computed by hand."""

import math

import pytest
import torch

from vit_edge.recipe import DistillationConfig
from vit_edge.training.distillation import distillation_loss, label_loss, soft_kl

TEACHER = torch.tensor([[math.log(4.0), 0.0], [0.0, 0.0]])  # softmax: (4/5, 1/5), (1/2, 1/2)
STUDENT = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])  # softmax: (1/2, 1/2), (1/4, 3/4)
FIRST = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
SECOND = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)


def test_kl_is_summed_over_classes_and_averaged_over_images() -> None:
    assert soft_kl(STUDENT, TEACHER, 1.0).item() == pytest.approx((FIRST + SECOND) / 2, rel=1e-5)


def test_temperature_softens_both_and_its_square_keeps_the_gradient() -> None:
    softened = soft_kl(2 * STUDENT, 2 * TEACHER, 2.0).item()
    assert softened == pytest.approx(4 * (FIRST + SECOND) / 2, rel=1e-5)


def test_the_kl_of_equal_logits_is_zero_and_of_shifted_ones_too() -> None:
    assert soft_kl(TEACHER + 5, TEACHER, 3.0).item() == pytest.approx(0, abs=1e-6)


def test_the_weight_mixes_labels_and_teacher() -> None:
    labels = torch.tensor([0, 1])
    hard = -(math.log(0.5) + math.log(0.75)) / 2
    config = DistillationConfig(temperature=1.0, weight=0.75)
    found = distillation_loss(STUDENT, TEACHER, labels, config, label_smoothing=0.0).item()
    assert found == pytest.approx(0.25 * hard + 0.75 * (FIRST + SECOND) / 2, rel=1e-5)


def test_of_two_heads_the_first_learns_labels_and_the_second_the_teacher() -> None:
    labels = torch.tensor([0, 1])
    config = DistillationConfig(temperature=1.0, weight=0.5)
    found = distillation_loss((STUDENT, TEACHER), TEACHER, labels, config, label_smoothing=0.0).item()
    assert found == pytest.approx(0.5 * -(math.log(0.5) + math.log(0.75)) / 2, rel=1e-5)


def test_mixed_labels_are_not_smoothed_twice() -> None:
    mixed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    smoothed = label_loss(STUDENT, torch.tensor([0, 1]), 0.2)
    assert torch.equal(label_loss(STUDENT, mixed, 0.2), label_loss(STUDENT, mixed, 0.0))
    assert not torch.equal(label_loss(STUDENT, mixed, 0.2), smoothed)
