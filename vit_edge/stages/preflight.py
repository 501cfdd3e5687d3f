"""What can be refused before anything is trained: models that do not fit, runtimes that are not installed."""

from collections.abc import Iterable

import torch

from vit_edge.models import zoo
from vit_edge.progress import say
from vit_edge.recipe import ModelConfig


def check_models(models: Iterable[ModelConfig], classes: int, image_size: int) -> None:
    """Builds each model without memory for its weights. Raises UserError as `zoo.create` does."""
    for model in models:
        with torch.device("meta"):
            zoo.create(model, classes, image_size)
        preprocessing = zoo.preprocessing(model, image_size)
        mean, std = ("/".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std))
        look = f"{preprocessing.interpolation}, crop {preprocessing.crop:g}, mean {mean}, std {std}"
        say(f"{model.name}: {image_size} px, {look}, weights {model.weights}")
