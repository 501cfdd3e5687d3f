"""The model that `inspect` and `probe` look at, with the images that they look at it on."""

from dataclasses import dataclass
from pathlib import Path

from vit_edge import recipe as recipes
from vit_edge.data import material
from vit_edge.data.material import Material
from vit_edge.errors import UserError
from vit_edge.models import classifier as models
from vit_edge.models import zoo
from vit_edge.models.card import saved_in
from vit_edge.models.classifier import Classifier
from vit_edge.recipe import DataConfig, ModelConfig
from vit_edge.settings import parse
from vit_edge.training.train import build

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Subject:
    name: str
    classifier: Classifier
    material: Material


def load(
    model: str, *, weights: str | None, data: str | None, image_size: int | None, data_dir: Path | None
) -> Subject:
    """A run (its student, or else its teacher), a model's folder, or a name with weights.

    The images are those of `data`, else of the run's own recipe, else the default set. Their tune split was held out
    of the run's training; the gate split is never read here: it belongs to the reference and the gate.
    Raises UserError for what is none of these, and for an option without effect.
    """
    path = Path(model)
    folder = saved_in(path)
    config = _data(path, data)
    if folder is None and path.is_dir():
        raise UserError(f"{path} holds no model.json", "give a run, a model's folder, or a name with --weights")
    if folder is None:
        return _named(model, weights, config, image_size, data_dir)
    for option, value in (("--weights", weights), ("--image-size", image_size)):
        if value is not None:
            raise UserError(f"{option} has no effect on the saved model {folder}", "leave it out")
    loaded = models.load(folder)
    images = material.load(config, loaded.preprocessing.image_size, data_dir)
    return Subject(f"{loaded.config.name} in {folder}", loaded.classifier, images)


def _named(name: str, weights: str | None, data: DataConfig, image_size: int | None, data_dir: Path | None) -> Subject:
    zoo.check_name(name)
    if weights is None:
        raise UserError(
            f"{name} is a name, and no weights are given",
            "add --weights pretrained, --weights FILE, or --weights none to see it before any training",
        )
    config = parse(ModelConfig, {"name": name, "weights": weights}, "command line")
    side = image_size or zoo.native_image_size(config)
    images = material.load(data, side, data_dir)
    return Subject(name, build(config, images, seed=0, role="finetune").eval(), images)


def _data(model: Path, spec: str | None) -> DataConfig:
    """The run's own data with its splits; another set has the default splits."""
    recipe = next((folder / RECIPE for folder in (model, model.parent) if (folder / RECIPE).is_file()), None)
    own = recipes.load(recipe).data if recipe is not None and saved_in(model) is not None else DataConfig()
    return own if spec in (None, own.spec) else DataConfig(spec=spec)
