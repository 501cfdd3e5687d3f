"""Losses held to numbers computed by hand."""

import math

import numpy as np
import pytest
import torch

from vit_edge.recipe import DistillationConfig
from vit_edge.training.distillation import (
    Answer,
    Output,
    dist,
    distillation_loss,
    feature_distance,
    label_loss,
    soft_kl,
    standardised,
)

TEACHER = torch.tensor([[math.log(4.0), 0.0], [0.0, 0.0]])  # softmax: (4/5, 1/5), (1/2, 1/2)
STUDENT = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])  # softmax: (1/2, 1/2), (1/4, 3/4)
FIRST = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
SECOND = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)

LABELS = torch.tensor([0, 1])


def loss(student: Output, teacher: torch.Tensor = TEACHER, **weights: float) -> float:
    config = DistillationConfig(**({"labels": 0.0, "kl": 0.0, "dist": 0.0} | weights))
    return float(distillation_loss(student, Answer(teacher), LABELS[: len(teacher)], config, label_smoothing=0.0))


def only(name: str) -> DistillationConfig:
    return DistillationConfig(**({"labels": 0.0, "kl": 0.0, "dist": 0.0} | {name: 1.0}))


def test_kl_is_summed_over_classes_and_averaged_over_images() -> None:
    assert soft_kl(STUDENT, TEACHER, 1.0).item() == pytest.approx((FIRST + SECOND) / 2, rel=1e-5)


def test_temperature_softens_both_and_its_square_keeps_the_gradient() -> None:
    softened = soft_kl(2 * STUDENT, 2 * TEACHER, 2.0).item()
    assert softened == pytest.approx(4 * (FIRST + SECOND) / 2, rel=1e-5)


def test_the_kl_of_equal_logits_is_zero_and_of_shifted_ones_too() -> None:
    assert soft_kl(TEACHER + 5, TEACHER, 3.0).item() == pytest.approx(0, abs=1e-6)


def test_the_weights_mix_labels_and_teacher() -> None:
    hard = -(math.log(0.5) + math.log(0.75)) / 2
    found = loss(STUDENT, labels=0.25, kl=0.75, temperature=1.0)
    assert found == pytest.approx(0.25 * hard + 0.75 * (FIRST + SECOND) / 2, rel=1e-5)


def test_of_two_heads_the_first_learns_labels_and_the_second_the_teacher() -> None:
    hard = -(math.log(0.5) + math.log(0.75)) / 2
    assert loss((STUDENT, TEACHER), labels=0.5, kl=0.5) == pytest.approx(0.5 * hard, rel=1e-5)
    tokens = (TEACHER, STUDENT)
    answers = -(math.log(0.5) + math.log(0.25)) / 2  # the teacher's first answers: class 0 for both
    assert loss(tokens, labels=0.0, kl=0.0, hard=2.0) == pytest.approx(2 * answers, rel=1e-5)


def test_standardised_logits_have_no_size() -> None:
    logits = torch.tensor([[1.0, 2.0, 6.0]])
    assert standardised(logits).tolist()[0] == pytest.approx(
        [-2 / 14**0.5 * 3**0.5, -1 / 14**0.5 * 3**0.5, 3 / 14**0.5 * 3**0.5], rel=1e-5
    )
    bigger = loss(5 * logits + 3, logits, labels=0.0, kl=0.0, standardised=1.0)
    assert bigger == pytest.approx(0, abs=1e-6)
    assert loss(5 * logits, logits, labels=0.0, kl=1.0) > 0.1


def test_the_same_answer_for_every_class_has_a_finite_gradient() -> None:
    student = torch.zeros(2, 3, requires_grad=True)
    for name in ("standardised", "dist"):
        distillation_loss(student, Answer(torch.tensor([[0.0, 1.0, 4.0]] * 2)), LABELS, only(name), 0.0).backward()
        assert torch.isfinite(student.grad).all()


def test_dist_by_hand() -> None:
    """Teacher (4/5, 1/5) and (1/2, 1/2), student (1/2, 1/2) and (1/4, 3/4). Between classes: an image without deviation
    correlates with nothing. Within a class: both rise or fall from the first image to the second."""
    assert loss(STUDENT, labels=0.0, kl=0.0, dist=1.0, temperature=1.0) == pytest.approx(1.0, abs=1e-4)
    opposite = STUDENT.flip(0)  # (1/4, 3/4) and (1/2, 1/2): -1 with the first image, -1 within each class
    assert loss(opposite, labels=0.0, kl=0.0, dist=1.0, temperature=1.0) == pytest.approx((2 + 1) / 2 + 2, abs=1e-4)


def test_dist_has_both_relations_and_the_square_of_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)
    p, q = ((logits / 2).softmax(1).numpy() for logits in (student, teacher))
    rows = np.mean([1 - np.corrcoef(a, b)[0, 1] for a, b in zip(p, q, strict=True)])
    columns = np.mean([1 - np.corrcoef(a, b)[0, 1] for a, b in zip(p.T, q.T, strict=True)])
    assert float(dist(student, teacher, 2.0)) == pytest.approx(4 * (rows + columns), rel=1e-5)


def test_features_are_compared_with_the_whitened_teacher() -> None:
    teacher = torch.tensor([[[1.0, 3.0]]])  # mean 2, deviation 1: (-1, 1)
    student = torch.tensor([[[0.0, 5.0]]])
    # Smooth L1 of β = 2: 1²/(2·2) below it, 4 - 2/2 above it.
    assert float(feature_distance(student, teacher)) == pytest.approx((0.25 + 3.0) / 2, rel=1e-4)


def test_labels_are_not_looked_at_where_they_weigh_nothing() -> None:
    missing = torch.tensor([-1, -1])
    config = DistillationConfig(labels=0.0, kl=1.0)
    assert torch.isfinite(distillation_loss(STUDENT, Answer(TEACHER), missing, config, 0.0))


def test_mixed_labels_are_not_smoothed_twice() -> None:
    mixed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    smoothed = label_loss(STUDENT, torch.tensor([0, 1]), 0.2)
    assert torch.equal(label_loss(STUDENT, mixed, 0.2), label_loss(STUDENT, mixed, 0.0))
    assert not torch.equal(label_loss(STUDENT, mixed, 0.2), smoothed)
