"""`vit-edge probe`: the few-shot table of a backbone's features.

Trained on random images of the train split and tested on the tune split. The gate split is not read: what is chosen by
a probe would be chosen on the images that the gate judges by.
"""

from typing import Any

import numpy as np
from pydantic import Field

from vit_edge.errors import UserError
from vit_edge.models import probe
from vit_edge.recipe import Numbers, Positive
from vit_edge.settings import Settings
from vit_edge.stages.subject import Subject
from vit_edge.store import installed_versions
from vit_edge.training.setup import accelerator_on

TEST_IMAGES = 10_000


class ProbeConfig(Settings):
    shots: Numbers = Field((1, 5, 10, 25), min_length=1, description="training images of each class")
    draws: Positive = Field(5, description="random choices of the training images, seeded by (seed, number)")
    penalty: float = Field(
        1024.0, gt=0, description="λ of ‖XW + b - Y‖² + λ‖W‖², X standardised; the paper's own evaluation has 2¹⁰"
    )
    seed: int = 0


def run(subject: Subject, config: ProbeConfig, device: str | None) -> dict[str, Any]:
    """Top-1 of every draw for each number of shots, as vit-edge/probe/1.

    In one draw fewer shots are a part of more. Raises UserError when a class has too few images, or none is held out.
    """
    material, place = subject.material, accelerator_on(device).device
    data, train, test = material.data.train, material.splits.train, material.splits.tune[:TEST_IMAGES]
    if not len(test):
        raise UserError("no image is held out to test on: the tune split is empty", "give another set with --data")
    labels_N = data.labels_N[train]
    drawn = [probe.draw(labels_N, material.classes, max(config.shots), [config.seed, i]) for i in range(config.draws)]
    needed = np.unique(np.stack(drawn))
    train_ND = probe.features(subject.classifier, data, train[needed], place)
    test_ND = probe.features(subject.classifier, data, test, place)
    rows = []
    for count in sorted(set(config.shots)):
        places = [np.searchsorted(needed, chosen[:count].flatten()) for chosen in drawn]
        top1 = [
            probe.few_shot(
                train_ND[place], labels_N[needed[place]], test_ND, data.labels_N[test], classes=len(material.classes),
                penalty=config.penalty,
            )
            for place in places
        ]  # fmt: skip
        rows.append(probe.Row(count, tuple(top1)))
    return {
        "schema": "vit-edge/probe/1",
        "model": subject.name,
        "data": f"{material.data.spec}: shots of the train split, tested on the tune split",
        "image_size": subject.classifier.image_size,
        "test_images": len(test),
        "features": train_ND.shape[1],
        "draws": config.draws,
        "penalty": config.penalty,
        "seed": config.seed,
        "rows": [
            {"shots": row.shots, "top1_mean": row.mean, "top1_spread": row.spread, "top1": list(row.top1)}
            for row in rows
        ],
        "versions": installed_versions(),
    }
