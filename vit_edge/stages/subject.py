"""The model that `inspect` and `probe` look at, with the images that they look at it on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_edge import recipe as recipes
from vit_edge import yaml_text
from vit_edge.data import material
from vit_edge.data.material import Material
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.models import origin, zoo
from vit_edge.models.card import saved_in
from vit_edge.models.classifier import Classifier
from vit_edge.recipe import DataConfig, ModelConfig
from vit_edge.settings import parse
from vit_edge.store import RECIPE
from vit_edge.training.setup import build


@dataclass(frozen=True)
class Subject:
    name: str
    classifier: Classifier
    material: Material


def load(
    model: str, *, weights: str | None, data: str | None, image_size: int | None, data_dir: Path | None,
    settings: Mapping[str, Any],
) -> Subject:  # fmt: skip
    """A run (its student, or else its teacher), a model's folder, or a name with weights.

    The images are those of `data`, else of the run's own recipe, else the default set. Their tune split was held out
    of the run's training; the gate split is never read here: it belongs to the reference and the gate.
    settings: of a model by name, such as mean and std.
    Raises UserError for what is none of these, and for an option without effect.
    """
    path = Path(model)
    folder = saved_in(path)
    config = _data(path, data)
    if folder is None and path.exists():
        what = "holds no model.json" if path.is_dir() else "is a file, and the model in it has no name"
        raise UserError(f"{path} {what}", "give a run, a model's folder, or a name with --weights FILE")
    if folder is None:
        return _named(model, weights, config, image_size, data_dir, settings)
    for option, value in (("--weights", weights), ("--image-size", image_size), ("--set", settings or None)):
        if value is not None:
            raise UserError(f"{option} has no effect on the saved model {folder}", "leave it out")
    loaded = models.load(folder)
    images = material.load(config, loaded.preprocessing.image_size, data_dir)
    return Subject(f"{loaded.config.name} in {folder}", loaded.classifier, images)


def _named(
    name: str, weights: str | None, data: DataConfig, image_size: int | None, data_dir: Path | None,
    settings: Mapping[str, Any],
) -> Subject:  # fmt: skip
    zoo.check_name(name)
    if weights is None:
        raise UserError(
            f"{name} is a name, and no weights are given",
            "add --weights pretrained, --weights FILE, or --weights none to see it before any training",
        )
    given = {"name": name, "weights": weights} | ({} if image_size is None else {"image_size": image_size})
    config = parse(ModelConfig, recipes.laid_over(given, settings), "command line")
    side = zoo.native_image_size(config)
    origin.preprocessing(config, side)
    images = material.load(data, side, data_dir)
    return Subject(name, build(config, images, seed=0, role="finetune").eval(), images)


def _data(model: Path, spec: str | None) -> DataConfig:
    """The run's own data with its splits; another set has the default splits."""
    recipe = next((folder / RECIPE for folder in (model, model.parent) if (folder / RECIPE).is_file()), None)
    own = DataConfig()
    if recipe is not None and saved_in(model) is not None:
        values = yaml_text.read(recipe)
        own = parse(DataConfig, values.get("data", {}) if isinstance(values, dict) else values, str(recipe))
    return own if spec in (None, own.spec) else DataConfig(spec=spec)
