"""Distillation losses, each the mean over a batch. B batch, K classes, N places of a feature map, D' its width."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_edge.recipe import DistillationConfig

EPSILON = 1e-7

Output = Tensor | tuple[Tensor, Tensor]
"""Logits (B, K), or those of the class head and the distillation head."""


@dataclass(frozen=True)
class Answer:
    """What the teacher says of a batch: logits (B, K), and its features (B, N, D') where the loss compares them."""

    logits_BK: Tensor
    features_BND: Tensor | None = None


def distillation_loss(
    student: Output, teacher: Answer, target: Tensor, config: DistillationConfig, label_smoothing: float,
    features_BND: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of `config`'s terms by their weights; target as in `label_loss`, not looked at where labels weigh 0.

    features_BND: the student's, projected to the teacher's width. Of a pair of heads (DeiT), the class head learns the
    labels and the distillation head the teacher, as in Touvron et al. 2021 (eqs. 2 and 3).
    """
    of_class, of_teacher = student if isinstance(student, tuple) else (student, student)
    teacher_BK, temperature = teacher.logits_BK, config.temperature
    terms = (
        (config.labels, lambda: label_loss(of_class, target, label_smoothing)),
        (config.kl, lambda: soft_kl(of_teacher, teacher_BK, temperature)),
        (config.standardised, lambda: soft_kl(standardised(of_teacher), standardised(teacher_BK), temperature)),
        (config.dist, lambda: dist(of_teacher, teacher_BK, temperature)),
        (config.hard, lambda: F.cross_entropy(of_teacher.float(), teacher_BK.argmax(dim=1))),
        (config.features, lambda: feature_distance(features_BND, teacher.features_BND)),
    )
    return torch.stack([weight * term() for weight, term in terms if weight]).sum()


def label_loss(output: Output, target: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy with labels (B,) int64, smoothed, or with mixed probabilities (B, K), which are smoothed already.

    Of a pair of heads, the mean of both.
    """
    if isinstance(output, tuple):
        return (label_loss(output[0], target, label_smoothing) + label_loss(output[1], target, label_smoothing)) / 2
    smoothing = 0.0 if target.is_floating_point() else label_smoothing
    return F.cross_entropy(output.float(), target, label_smoothing=smoothing)


def soft_kl(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(teacher ‖ student) of distributions softened by T (Hinton et al. 2015, §2).

    Summed over the classes: dividing by batch × classes, PyTorch's default, would make it K times too weak.
    """
    student = F.log_softmax(student_BK.float() / temperature, dim=-1)
    teacher = F.log_softmax(teacher_BK.float() / temperature, dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def standardised(logits_BK: Tensor) -> Tensor:
    """Each image's logits with mean 0 and deviation 1, so that the student need not match their size (Sun et al. 2024,
    "Logit Standardization in Knowledge Distillation", eq. 8)."""
    logits_BK = logits_BK.float()
    centred_BK = logits_BK - logits_BK.mean(dim=-1, keepdim=True)
    return centred_BK * (centred_BK.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt()


def dist(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·(1 - Pearson's correlation of the softened probabilities), over the classes of each image plus over the images
    of each class (Huang et al. 2022, "Knowledge Distillation from A Stronger Teacher", eqs. 7 to 10, β = γ = 1)."""
    student_BK = F.softmax(student_BK.float() / temperature, dim=-1)
    teacher_BK = F.softmax(teacher_BK.float() / temperature, dim=-1)
    between_classes = 1 - _correlation(student_BK, teacher_BK).mean()
    within_classes = 1 - _correlation(student_BK.T, teacher_BK.T).mean()
    return temperature**2 * (between_classes + within_classes)


def feature_distance(student_BND: Tensor | None, teacher_BND: Tensor | None) -> Tensor:
    """Smooth L1 from the teacher's features, each place brought to mean 0 and deviation 1 (Wei et al. 2022, "Contrastive
    Learning Rivals Masked Image Modeling in Fine-tuning via Feature Distillation", eq. 1)."""
    assert student_BND is not None and teacher_BND is not None, "the loss compares features"  # noqa: PT018
    whitened_BND = F.layer_norm(teacher_BND.float(), teacher_BND.shape[-1:])
    return F.smooth_l1_loss(student_BND.float(), whitened_BND, beta=2.0)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's, of each row; 0 for a row without deviation."""
    a, b = (rows - rows.mean(dim=1, keepdim=True) for rows in (a, b))
    return (a * b).sum(dim=1) * (a.square().sum(dim=1) * b.square().sum(dim=1) + EPSILON**2).rsqrt()
