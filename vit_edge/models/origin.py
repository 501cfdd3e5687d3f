"""How a model's images are prepared: it belongs to its weights, and is asked for where nothing tells it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.models import layouts, weight_files, zoo
from vit_edge.models.card import CARD, WEIGHTS, read_card
from vit_edge.pixels import RESAMPLING
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig
from vit_edge.settings import parse

GIVEN = ("mean", "std", "interpolation", "crop")
TRANSFORMERS, TIMM = "preprocessor_config.json", "config.json"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

Known = dict[str, Any]


def preprocessing(config: ModelConfig, image_size: int, prefix: str = "") -> Preprocessing:
    """How the images of the model are prepared, at `image_size`, the side of its input in pixels.

    What `config` gives comes first. Else what its weights tell: model.json of a folder that vit-edge wrote; the file
    that transformers or timm put beside weights; the layout of the file, where one system with one normalisation
    writes it; timm's configuration, where all the weights that it publishes of this very geometry agree.
    From scratch: 0.5 and 0.5 for ours, timm's for its names, and the whole image.
    prefix: of the settings' names in the error, such as "teacher.model.".
    Raises UserError for weights from a file when none of these tells the mean and the deviation.
    """
    zoo.check_name(config.name)
    given = {name: getattr(config, name) for name in GIVEN if getattr(config, name) is not None}
    known = _known(config) | given
    if "mean" not in known:
        raise _asked_for(config, prefix)
    return Preprocessing(image_size=image_size, **known)


def _known(config: ModelConfig) -> Known:
    if config.weights == "none":
        ours = config.name in zoo.OURS
        return dict(HALF) if ours else _of_timm(zoo.published_config(config.name)) | {"crop": 1.0}
    if config.weights == "pretrained":
        return _of_timm(zoo.published_config(zoo.published_name(config.name)))
    path = Path(config.weights)
    return _beside(path) or _published(config) | _of_layout(config, path)


def _beside(path: Path) -> Known:
    """What lies beside weights: in their folder, or next to a file with the name that goes with it."""
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name == WEIGHTS) and (folder / CARD).is_file():
        return read_card(folder).preprocessing.model_dump(exclude={"image_size"})
    if path.is_dir() or path.name in weight_files.IN_FOLDERS:
        return _of_transformers(folder / TRANSFORMERS) or _of_timm_file(folder / TIMM)
    return {}


def _of_transformers(path: Path) -> Known:
    """preprocessor_config.json: `resample` is Pillow's number; the crop is of the shortest edge, where one is cut."""
    values = _json(path)
    if "image_mean" not in values or "image_std" not in values:
        return {}
    found = {"mean": values["image_mean"], "std": values["image_std"]}
    names = {int(filter): name for name, filter in RESAMPLING.items()}
    if values.get("resample") in names:
        found["interpolation"] = names[values["resample"]]
    shortest, cut = _side(values.get("size"), "shortest_edge"), _side(values.get("crop_size"), "height")
    if values.get("do_center_crop") and shortest and cut and cut <= shortest:
        found["crop"] = cut / shortest
    return _checked(found, path)


def _of_timm_file(path: Path) -> Known:
    cfg = _json(path).get("pretrained_cfg")
    if not isinstance(cfg, Mapping) or "mean" not in cfg or "std" not in cfg:
        return {}
    found = {"mean": cfg["mean"], "std": cfg["std"]}
    if cfg.get("interpolation") in RESAMPLING:
        found["interpolation"] = cfg["interpolation"]
    return _checked(found | ({"crop": cfg["crop_pct"]} if cfg.get("crop_pct") else {}), path)


def _checked(found: Known, path: Path) -> Known:
    """Raises UserError that names the file when a value in it cannot be."""
    parse(ModelConfig, {"name": "any"} | found, str(path))
    return found


def _of_timm(cfg: Any) -> Known:
    """timm's PretrainedCfg."""
    interpolation = cfg.interpolation if cfg.interpolation in RESAMPLING else "bicubic"
    return {"mean": cfg.mean, "std": cfg.std, "crop": cfg.crop_pct, "interpolation": interpolation}


def _published(config: ModelConfig) -> Known:
    """timm's configuration of the published weights of this geometry; without mean and deviation where they disagree."""
    configs = zoo.published_configs(config)
    if not configs:
        return {}
    known = _of_timm(configs[0])
    if len({(tuple(cfg.mean), tuple(cfg.std)) for cfg in configs}) > 1:
        del known["mean"], known["std"]
    return known


def _of_layout(config: ModelConfig, path: Path) -> Known:
    """Mean and deviation of the system whose layout the file is in, where that system has but one.

    Of timm's own names only another system's layout tells: timm's hold what others train under its names.
    """
    layout = layouts.canonical(weight_files.read(path, lambda _: None))
    if layout.imagenet_normalisation is None or (config.name not in zoo.OURS and layout.name not in layouts.FOREIGN):
        return {}
    return dict(IMAGENET if layout.imagenet_normalisation else HALF)


def _asked_for(config: ModelConfig, prefix: str) -> UserError:
    configs = zoo.published_configs(config)
    means = sorted({f"{cfg.mean[0]:g}" for cfg in configs})
    published = (
        f"the published weights of {config.name} differ (mean {' or '.join(means)})"
        if configs
        else f"no weights of this {config.name} are published"
    )
    pairs = [
        " ".join(f"--set {prefix}{name}=[{','.join(f'{value:g}' for value in pair[name])}]" for name in ("mean", "std"))
        for pair in (HALF, IMAGENET)
    ]
    return UserError(
        f"the normalisation that {config.weights} was trained with is not known: neither its tensors' names nor a "
        f"{CARD}, {TRANSFORMERS} or {TIMM} beside it tell, and {published}",
        f"say it with {pairs[0]} (JAX, AugReg) or {pairs[1]} (ImageNet's: DeiT, DINO, MAE, torchvision)",
    )


def _side(size: Any, name: str) -> int | None:
    """A side in pixels, which transformers writes as a number or as a mapping."""
    value = size.get(name) if isinstance(size, Mapping) else size
    return value if isinstance(value, int) and value > 0 else None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, Mapping) else {}
