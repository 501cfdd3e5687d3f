"""`vit-edge inspect`: the numbers of insight.py on real images, and their figures.

numbers.json     vit-edge/inspect/1
filters.png      principal components of the filters that read the pixels
positions.png    similarity of the position embeddings
attention.png    mean attention distance of each layer and head
"""

from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.models import figures, insight
from vit_edge.progress import say
from vit_edge.stages.subject import Subject
from vit_edge.store import installed_versions, write_json
from vit_edge.training.setup import accelerator_on

IMAGES = 64


def run(folder: Path, subject: Subject, device: str | None) -> dict[str, Any]:
    """Writes the figures and numbers.json into `folder`; returns the numbers. What cannot be had is said in a line.

    The attention distances are means over IMAGES images of the tune split.
    """
    classifier, material = subject.classifier, subject.material
    images_NHWC, _ = material.tune(classifier.preprocessing, IMAGES)
    if not len(images_NHWC):
        raise UserError("no image is held out to look at: the tune split is empty", "give another set with --data")
    found = insight.look(classifier, images_NHWC, accelerator_on(device).device)
    for part, why in found.missing.items():
        say(f"no {part}: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(found, folder, title=subject.name, image_size=classifier.image_size)
    numbers = {
        "schema": "vit-edge/inspect/1",
        "model": subject.name,
        "data": f"{material.data.spec}, tune split",
        "images": len(images_NHWC),
        **insight.as_json(found, classifier.image_size),
        "figures": [path.name for path in drawn],
        "versions": installed_versions(),
    }
    write_json(folder / "numbers.json", numbers)
    return numbers
