"""Distillation losses. B batch, K classes."""

import torch.nn.functional as F
from torch import Tensor

from vit_edge.recipe import DistillationConfig

Output = Tensor | tuple[Tensor, Tensor]
"""Logits (B, K), or those of the class head and the distillation head."""


def soft_kl(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(teacher ‖ student) of distributions softened by T, the mean over the batch (Hinton et al. 2015, §2).

    Summed over the classes: dividing by batch × classes, PyTorch's default, would make it K times too weak.
    """
    student = F.log_softmax(student_BK.float() / temperature, dim=-1)
    teacher = F.log_softmax(teacher_BK.float() / temperature, dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def label_loss(output: Output, target: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy with labels (B,) int64, smoothed, or with mixed probabilities (B, K), which are smoothed already.

    Of a pair of heads, the mean of both.
    """
    if isinstance(output, tuple):
        return (label_loss(output[0], target, label_smoothing) + label_loss(output[1], target, label_smoothing)) / 2
    smoothing = 0.0 if target.is_floating_point() else label_smoothing
    return F.cross_entropy(output.float(), target, label_smoothing=smoothing)


def distillation_loss(
    student: Output, teacher_BK: Tensor, target: Tensor, config: DistillationConfig, label_smoothing: float
) -> Tensor:
    """(1 - weight)·cross-entropy with the labels + weight·T²·KL with the teacher; target as in `label_loss`.

    Of a pair of heads (DeiT), the class head learns the labels and the distillation head the teacher, as in
    Touvron et al. 2021 (eq. 2).
    """
    of_class, of_teacher = student if isinstance(student, tuple) else (student, student)
    hard = label_loss(of_class, target, label_smoothing)
    soft = soft_kl(of_teacher, teacher_BK, config.temperature)
    return (1 - config.weight) * hard + config.weight * soft
