"""Accuracy of a target against the reference, paired on the same images: measured, and held against the limits.

N images, K classes. top1 and agreement are fractions; drops and margins are percentage points, positive when the
target is worse. Every verdict holds with 95 % confidence (one-sided): pass where the limit is kept, fail where it is
broken, undecided where the images do not tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit_edge import metrics
from vit_edge.recipe import Limits
from vit_edge.report.schema import Accuracy, Check, ClassDrop, Flip

WORST_CLASSES = 5
MAX_CLASSES, MAX_FLIPS = 50, 100
SIGNIFICANT = 0.05


def measured(
    labels_N: np.ndarray, reference_NK: np.ndarray, target_NK: np.ndarray, classes: Sequence[str], names: Sequence[str],
    limits: Limits,
) -> Accuracy:  # fmt: skip
    """From both models' logits on the same images, which are called `names`.

    min_relative_top1 r allows a drop of (1 − r)·reference top-1; the tighter of it and max_drop_points is the margin.
    (The reference's top-1 is taken as it was measured: its own uncertainty moves such a margin by 1 − r of itself.)
    """
    reference_N, target_N = metrics.answers(reference_NK), metrics.answers(target_NK)
    drop = metrics.paired_drop(reference_N == labels_N, target_N == labels_N)
    reference_top1 = metrics.top1(reference_N, labels_N)
    lost_classes = _classes(labels_N, reference_N, target_N, classes)
    found = Accuracy(
        n=drop.n,
        reference_top1=reference_top1,
        target_top1=metrics.top1(target_N, labels_N),
        drop_points=drop.points,
        drop_lower95_one_sided=drop.lower95,
        drop_upper95_one_sided=drop.upper95,
        agreement=metrics.agreement(reference_N, target_N),
        images_needed=None,
        mean_kl=metrics.mean_kl(reference_NK, target_NK) if np.isfinite(target_NK).all() else None,
        lost=drop.lost,
        won=drop.won,
        margin_points=margin(limits, reference_top1),
        worst_classes=lost_classes,
        flipped=int(np.sum(reference_N != target_N)),
        flips=_flips(labels_N, reference_N, target_N, classes, names),
    )
    needed = [held.images_needed for held in _held(found, limits) if held.images_needed is not None]
    return found.model_copy(update={"images_needed": max(needed, default=None)})


def check(found: Accuracy, limits: Limits) -> Check:
    """Every limit on accuracy together: fail when one is broken, pass when all are kept."""
    told = (
        f"top-1 {found.target_top1:.2%} against {found.reference_top1:.2%} on {found.n} images: a drop of "
        f"{found.drop_points:.2f} points (95 %: at most {found.drop_upper95_one_sided:.2f})"
    )
    held = _held(found, limits)
    if not held:
        return Check(name="accuracy", verdict="skipped", detail=f"{told}; no limit is set")
    told += "".join(one.told for one in held) + f"; {found.flipped} answer{'' if found.flipped == 1 else 's'} changed"
    if significant := [one.name for one in found.worst_classes if one.significant]:
        told += f"; classes that lost significantly: {', '.join(significant[:3])}{' …' if len(significant) > 3 else ''}"
    worst = next((kind for kind in ("fail", "undecided") if kind in [one.verdict for one in held]), "pass")
    if worst == "undecided":
        told = f"too few images to decide: {told}; {_told_needed(found)}"
    return Check.model_validate({"name": "accuracy", "verdict": worst, "detail": told})


@dataclass(frozen=True)
class _Held:
    """A limit against what was found. images_needed: what would decide, where the images do not."""

    told: str
    verdict: str
    images_needed: int | None = None


def _held(found: Accuracy, limits: Limits) -> list[_Held]:
    held = []
    if found.margin_points is not None:
        held.append(_held_drop(found, found.margin_points, limits))
    if limits.min_agreement is not None:
        held.append(_held_share("agreement", found.n - found.flipped, found.n, limits.min_agreement))
    if limits.min_top1 is not None:
        right = round(found.target_top1 * found.n)
        held.append(_held_share("top-1", right, found.n, limits.min_top1))
    return held


def _held_drop(found: Accuracy, margin: float, limits: Limits) -> _Held:
    set_by = "max_drop_points" if margin == limits.max_drop_points else "min_relative_top1"
    told = f", allowed {margin:.2f} ({set_by})"
    if metrics.within_margin(found.lost, found.won, found.n, margin):
        return _Held(told, "pass")
    if metrics.beyond_margin(found.lost, found.won, found.n, margin):
        return _Held(told, "fail")
    discordance = (found.lost + found.won) / found.n
    needed = metrics.images_needed(discordance, margin, drop_points=found.drop_points)
    return _Held(told, "undecided", needed and max(needed, found.n + 1))


def _held_share(name: str, count: int, n: int, least: float) -> _Held:
    """A share of the images that must not be below `least`."""
    told = f"; {name} {count / n:.2%}, at least {least:.2%} asked"
    if least == 1:
        return _Held(told, "pass" if count == n else "fail")
    if metrics.chance_of_at_least(count, n, least) <= 0.05:
        return _Held(told, "pass")
    if metrics.chance_of_at_least(n - count, n, 1 - least) <= 0.05:
        return _Held(told, "fail")
    needed = metrics.images_for_share(count / n, least)
    return _Held(told, "undecided", needed and max(needed, n + 1))


def _told_needed(found: Accuracy) -> str:
    if found.images_needed is None:
        return "it is about what the limit allows, and no number of images would decide"
    return f"about {found.images_needed} images would decide"


def margin(limits: Limits, reference_top1: float) -> float | None:
    """The drop in percentage points that the limits allow, the tighter of the two; None where neither is set."""
    margins = []
    if limits.max_drop_points is not None:
        margins.append(limits.max_drop_points)
    if limits.min_relative_top1 is not None:
        margins.append(100 * (1 - limits.min_relative_top1) * reference_top1)
    return min(margins, default=None)


def _classes(
    labels_N: np.ndarray, reference_N: np.ndarray, target_N: np.ndarray, classes: Sequence[str]
) -> list[ClassDrop]:
    """The classes whose top-1 fell, worst first: WORST_CLASSES of them, and all that fell significantly.

    Significantly: by the exact one-sided McNemar test, with Holm's correction over all classes that have images.
    """
    right_N, target_right_N = reference_N == labels_N, target_N == labels_N
    n_K, reference_K, target_K, lost_K, won_K = (
        np.bincount(labels_N[chosen_N], minlength=len(classes))
        for chosen_N in (labels_N >= 0, right_N, target_right_N, right_N & ~target_right_N, ~right_N & target_right_N)
    )
    present = np.flatnonzero(n_K)
    adjusted = metrics.holm([metrics.p_of_loss(int(lost_K[k]), int(won_K[k])) for k in present])
    drops = [
        ClassDrop(
            name=classes[int(k)], n=int(n_K[k]), reference_top1=reference_K[k] / n_K[k], target_top1=target_K[k] / n_K[k],
            lost=int(lost_K[k]), won=int(won_K[k]), p_holm=p, significant=p <= SIGNIFICANT,
        )
        for k, p in zip(present, adjusted, strict=True) if lost_K[k] > won_K[k]
    ]  # fmt: skip
    drops.sort(key=lambda one: (not one.significant, one.target_top1 - one.reference_top1))
    significant = sum(one.significant for one in drops)
    return drops[: min(MAX_CLASSES, max(WORST_CLASSES, significant))]


def _flips(
    labels_N: np.ndarray, reference_N: np.ndarray, target_N: np.ndarray, classes: Sequence[str], names: Sequence[str]
) -> list[Flip]:
    """The images whose answer changed: those that were right first, then those that have become so; MAX_FLIPS of them."""
    groups = {
        "lost": (reference_N == labels_N) & (target_N != labels_N),
        "won": (reference_N != labels_N) & (target_N == labels_N),
        "wrong": (reference_N != labels_N) & (target_N != labels_N) & (reference_N != target_N),
    }
    chosen = [(effect, int(index)) for effect, in_N in groups.items() for index in np.flatnonzero(in_N)[:MAX_FLIPS]]
    return [
        Flip.model_validate({
            "name": names[index], "label": classes[labels_N[index]], "effect": effect,
            **{key: _class(answers_N[index], classes) for key, answers_N in (("reference", reference_N), ("target", target_N))},
        })
        for effect, index in chosen[:MAX_FLIPS]
    ]  # fmt: skip


def _class(answer: int, classes: Sequence[str]) -> str | None:
    return classes[answer] if answer >= 0 else None
