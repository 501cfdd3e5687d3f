"""What can be refused before anything is trained: a model that does not fit, weights that are not its own."""

import torch

from vit_edge.models import origin, zoo
from vit_edge.progress import say
from vit_edge.recipe import StudentConfig, TeacherConfig


def check(role: str, part: TeacherConfig | StudentConfig, classes: list[str], image_size: int) -> None:
    """Builds the model without memory, says what it is and how its images are prepared, and places its weights once.

    role: "teacher" or "student", which its settings stand under. image_size: side of its input in pixels.
    Raises UserError as `zoo.create`, `origin.preprocessing` and `checkpoints.load_weights` do.
    """
    model = part.model
    with torch.device("meta"):
        zoo.create(model, len(classes), image_size)
    found = origin.preprocessing(model, image_size, f"{role}.model.")
    mean, std = ("/".join(f"{value:g}" for value in values) for values in (found.mean, found.std))
    look = f"{found.interpolation}, crop {found.crop:g}, mean {mean}, std {std}"
    say(f"{role}: {model.name}, {image_size} px, {look}, weights {model.weights}")
    if model.weights != "none":
        _place_weights(role, part, classes, image_size)


def _place_weights(role: str, part: TeacherConfig | StudentConfig, classes: list[str], image_size: int) -> None:
    """Loads the weights and lets them go: the stage says what it makes of them."""
    from vit_edge.models import checkpoints, hub

    model = part.model
    if model.weights == "pretrained":
        hub.fetch(model.name, say)
    backbone = zoo.create_for_weights(model, len(classes), image_size)
    use: checkpoints.Role = "finetune" if part.training is not None else "teacher" if role == "teacher" else "student"
    checkpoints.load_weights(
        backbone, model.weights, config=model, classes=classes, role=use, say=lambda line: None
    )  # fmt: skip
