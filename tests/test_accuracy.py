import numpy as np
import pytest

from vit_edge import accuracy
from vit_edge.recipe import Limits
from vit_edge.report.schema import Accuracy, Check

CLASSES = ["cat", "dog"]


def measured(
    labels_N: np.ndarray, reference_NK: np.ndarray, target_NK: np.ndarray, limits: Limits = Limits()
) -> Accuracy:
    names = [f"{number}.png" for number in range(len(labels_N))]
    return accuracy.measured(labels_N, reference_NK, target_NK, CLASSES, names, limits)


def answers(right: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and logits that are right on the first `right` of n images."""
    labels_N = np.arange(n) % 2
    answers_N = np.where(np.arange(n) < right, labels_N, 1 - labels_N)
    return labels_N, np.eye(2, dtype=np.float32)[answers_N]


def accuracy_check(n: int, reference_right: int, target_right: int, limits: Limits) -> Check:
    labels_N, reference_NK = answers(reference_right, n)
    _, target_NK = answers(target_right, n)
    return accuracy.check(measured(labels_N, reference_NK, target_NK, limits), limits)


@pytest.mark.parametrize(
    ("n", "target_right", "verdict"),
    [
        (10_000, 8_990, "pass"),  # a drop of 0.1
        (10_000, 8_700, "fail"),  # a drop of 3
        (10_000, 8_910, "undecided"),  # a drop of 0.9, margin 0.9
        (200, 180, "undecided"),  # no drop, too few images
    ],
)
def test_accuracy_is_decided_by_the_bounds_of_the_drop(n: int, target_right: int, verdict: str) -> None:
    assert accuracy_check(n, n * 9 // 10, target_right, Limits()).verdict == verdict


def test_undecided_accuracy_says_how_many_images_would_decide() -> None:
    labels_N, reference_NK = answers(180, 200)
    _, target_NK = answers(179, 200)
    found = measured(labels_N, reference_NK, target_NK)
    assert found.images_needed is not None
    assert found.images_needed > 200
    assert f"about {found.images_needed} images" in accuracy.check(found, Limits()).detail


def test_the_tighter_of_drop_and_relative_top1_is_the_margin() -> None:
    labels_N, logits_NK = answers(600, 1000)
    relative = measured(labels_N, logits_NK, logits_NK, Limits(min_relative_top1=0.99))
    absolute = measured(labels_N, logits_NK, logits_NK, Limits(max_drop_points=0.5))
    assert (relative.margin_points, absolute.margin_points) == (pytest.approx(0.6), 0.5)


def test_without_limits_accuracy_is_told_and_not_judged() -> None:
    assert accuracy_check(200, 180, 0, Limits(max_drop_points=None, min_relative_top1=None)).verdict == "skipped"


def test_an_image_without_finite_logits_counts_as_wrong() -> None:
    labels_N, reference_NK = answers(100, 100)
    found = measured(labels_N, reference_NK, np.full_like(reference_NK, np.nan))
    assert (found.target_top1, found.agreement, found.mean_kl) == (0, 0, None)
    assert accuracy.check(found, Limits()).verdict == "fail"


def test_the_classes_that_lost_most_are_named() -> None:
    labels_N = np.array([0, 0, 1, 1])
    reference_NK = np.eye(2)[labels_N]
    target_NK = np.eye(2)[[0, 0, 1, 0]]
    [worst] = measured(labels_N, reference_NK, target_NK).worst_classes
    assert (worst.name, worst.reference_top1, worst.target_top1) == ("dog", 1.0, 0.5)


NO_DROP = {"max_drop_points": None, "min_relative_top1": None}


@pytest.mark.parametrize(
    ("n", "right", "least", "verdict"),
    [
        (1000, 930, 0.9, "pass"),
        (1000, 905, 0.9, "undecided"),
        (1000, 880, 0.9, "fail"),
        (100, 100, 0.99, "undecided"),
        (1000, 1000, 0.99, "pass"),
        (1000, 1000, 1.0, "pass"),
        (1000, 999, 1.0, "fail"),
    ],
)
def test_top1_and_agreement_are_decided_with_confidence_too(n: int, right: int, least: float, verdict: str) -> None:
    labels_N, reference_NK = answers(n, n)
    _, target_NK = answers(right, n)
    for name in ("min_top1", "min_agreement"):
        limits = Limits.model_validate({**NO_DROP, name: least})
        found = measured(labels_N, reference_NK, target_NK, limits)
        decided = accuracy.check(found, limits)
        assert decided.verdict == verdict
        assert (found.images_needed is not None) == (verdict == "undecided")
        assert f"at least {least:.2%} asked" in decided.detail


def test_the_worst_of_several_limits_is_the_verdict() -> None:
    labels_N, reference_NK = answers(9000, 10_000)
    limits = Limits(min_top1=0.95, min_agreement=0.5)
    assert accuracy.check(measured(labels_N, reference_NK, reference_NK, limits), limits).verdict == "fail"


def test_classes_that_lost_by_chance_are_not_called_significant() -> None:
    labels_N = np.arange(1000) % 2
    target_N = labels_N.copy()
    target_N[0:24:2] = 1  # twelve of the cats, of 500
    target_N[1:4:2] = 0  # two of the dogs
    found = measured(labels_N, np.eye(2)[labels_N], np.eye(2)[target_N])
    cat, dog = found.worst_classes
    assert (cat.name, cat.lost, cat.won, cat.significant) == ("cat", 12, 0, True)
    assert cat.p_holm == pytest.approx(2 * 0.5**12)
    assert (dog.name, dog.lost, dog.significant) == ("dog", 2, False)
    assert "classes that lost significantly: cat" in accuracy.check(found, Limits()).detail


def test_every_class_that_lost_significantly_is_listed_beside_the_five_worst() -> None:
    classes = [str(number) for number in range(20)]
    labels_N = np.repeat(np.arange(20), 100)
    target_N = np.where((np.arange(2000) % 100 < 30) & (labels_N < 8), (labels_N + 1) % 20, labels_N)
    names = [""] * 2000
    found = accuracy.measured(labels_N, np.eye(20)[labels_N], np.eye(20)[target_N], classes, names, Limits())
    assert sorted(one.name for one in found.worst_classes) == classes[:8]
    assert all(one.significant for one in found.worst_classes)


def test_the_images_whose_answer_flipped_are_named_those_that_were_right_first() -> None:
    labels_N = np.array([0, 0, 1, 1])
    reference_NK, target_NK = np.eye(2)[[1, 0, 1, 1]], np.eye(2)[[0, 0, 0, 1]]
    found = measured(labels_N, reference_NK, target_NK)
    assert [(one.name, one.label, one.reference, one.target, one.effect) for one in found.flips] == [
        ("2.png", "dog", "dog", "cat", "lost"),
        ("0.png", "cat", "dog", "cat", "won"),
    ]
    assert found.flipped == 2


def test_no_more_flipped_images_are_listed_than_a_report_can_show() -> None:
    labels_N, reference_NK = answers(1000, 1000)
    _, target_NK = answers(0, 1000)
    found = measured(labels_N, reference_NK, target_NK)
    assert (len(found.flips), found.flipped) == (accuracy.MAX_FLIPS, 1000)
