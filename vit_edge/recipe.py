"""A recipe: what is built and what must hold. Every default of the product stands here, once."""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, field_validator, model_validator

from vit_edge.errors import UserError
from vit_edge.settings import Settings, parse

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0, lt=10**9)]
Pixels = Annotated[int, Field(gt=0, le=4096)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Weight = Annotated[float, Field(ge=0)]
Names = Annotated[tuple[str, ...], Strict(False)]
Numbers = Annotated[tuple[Positive, ...], Strict(False)]
Strengths = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Strict(False)]
Level = Annotated[float, Field(ge=0, le=1)]
Levels = Annotated[tuple[Level, Level, Level], Strict(False)]
Spread = Annotated[float, Field(gt=0, le=1)]
Spreads = Annotated[tuple[Spread, Spread, Spread], Strict(False)]


class DataConfig(Settings):
    """Which images, and how they are split. The splits come from one seeded permutation."""

    spec: str = Field(
        "digits", description="digits, fashion-mnist, cifar10, cifar100, folder:PATH, hf:NAME, wds:SHARDS"
    )
    unlabelled: str | None = Field(
        None,
        description="folder of images without labels: what the student learns from the teacher on, in place of the train split",
    )
    image_size: Pixels | None = Field(
        None, description="side of the models' square input in pixels; default: the data set's own"
    )
    tune_fraction: Fraction = Field(0.1, description="share of the training images held out to choose settings on")
    calibration_images: Positive = Field(512, description="training images that the int8 ranges are taken from")
    train_images: Positive | None = Field(None, description="use only so many training images")
    split_seed: Seed = 0
    skip_bad_images: bool = Field(False, description="leave out images that cannot be read, and count them")


class AugmentConfig(Settings):
    """Random changes of a training image. The view is a function of (seed, epoch, image) and nothing else."""

    shift: Fraction = Field(0.1, description="largest shift as a share of the side")
    rotate_degrees: float = Field(0.0, ge=0, le=180)
    scale: Fraction = Field(0.1, description="largest relative change of size")
    flip: bool = Field(False, description="mirror half of the images left to right")
    crop: Fraction = Field(0.0, description="random resized crop down to (1 - crop) of the area")
    rand_augment: float = Field(0.0, ge=0, le=10, description="RandAugment magnitude, two operations an image")
    erase: Fraction = Field(0.0, description="probability of random erasing")
    mixup: float = Field(0.0, ge=0, description="Mixup's alpha")
    cutmix: float = Field(0.0, ge=0, description="CutMix's alpha")


class ModelConfig(Settings):
    """A model by name, with the geometry that differs from the name's own. Sizes are in pixels or counts.

    What its images are prepared by (mean to crop) belongs to its weights: null takes what they tell.
    """

    name: str = Field(description="vit_ti16, deit_s16, r50_vit_b16, … or any timm architecture")
    patch_size: Positive | None = None
    width: Positive | None = None
    depth: Positive | None = None
    heads: Positive | None = None
    stem: Numbers | None = Field(
        None, description="hybrid: channels of stride-2 convolutions that make the feature map"
    )
    readout: Literal["token", "mean"] | None = None
    drop_path: Fraction = Field(0.0, description="stochastic depth rate of the last block")
    norm_epsilon: float | None = Field(
        None, gt=0, lt=1e-2, description="what LayerNorm adds to the variance; default: the weights' own, or 1e-6"
    )
    weights: str = Field("none", description="none (random), pretrained, or a file")
    image_size: Pixels | None = Field(None, description="side of this model's own input; default: data.image_size")
    mean: Levels | None = Field(None, description="of red, green and blue, of pixels in [0, 1]")
    std: Spreads | None = Field(None, description="of red, green and blue, of pixels in [0, 1]")
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None
    crop: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="share that the centre crop keeps")

    @model_validator(mode="after")
    def _normalises_whole(self) -> "ModelConfig":
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both, or neither")
        return self

    @field_validator("weights")
    @classmethod
    def _weights_exist(cls, weights: str) -> str:
        if weights not in ("none", "pretrained") and not Path(weights).exists():
            raise ValueError("expected none, pretrained or an existing file")
        return weights


class TrainingConfig(Settings):
    """Linear warm-up and cosine decay (vit-spec §2)."""

    epochs: Positive = 15
    batch_size: Positive = Field(64, description="images to a step of the optimiser, over all processes")
    accumulate: Positive = Field(1, description="parts that each batch is computed in, one after the other")
    optimizer: str = Field("adamw", description="any of timm's")
    learning_rate: float = Field(5e-4, gt=0, description="peak rate, at this batch size")
    layer_decay: float = Field(1.0, gt=0, le=1, description="each layer's rate as a share of the next one's")
    warmup_epochs: float = Field(2.0, ge=0)
    weight_decay: float = Field(0.05, ge=0)
    label_smoothing: Fraction = 0.1
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: Fraction = Field(0.0, description="exponential moving average of the weights; 0: none")
    checkpoint_activations: bool = Field(False, description="recompute activations in the backward pass: less memory")
    precision: Literal["auto", "f32", "bf16"] = Field(
        "auto", description="autocast precision of the forward pass; auto: bf16 where a step measures faster in it"
    )
    checkpoint_seconds: float = Field(
        20.0, gt=0, description="least time between two checkpoints; large models write them less often"
    )


class DistillationConfig(Settings):
    """loss = Σ weight · term, over the terms with a weight above 0 (training/distillation.py).

    With a DeiT token the class head learns the labels and the distillation head what comes from the teacher.
    """

    labels: Weight = Field(0.1, description="cross-entropy with the labels")
    kl: Weight = Field(1.0, description="T²·KL(teacher ‖ student), both softened by T (Hinton et al. 2015)")
    standardised: Weight = Field(
        0.0, description="the same on logits of mean 0 and deviation 1 for each image (Sun et al. 2024)"
    )
    dist: Weight = Field(1.0, description="correlation between classes and within them (DIST, Huang et al. 2022)")
    hard: Weight = Field(0.0, description="cross-entropy with the teacher's answers (Touvron et al. 2021)")
    features: Weight = Field(0.0, description="distance of the last features, projected, from the teacher's")
    temperature: float = Field(1.0, gt=0, description="T of kl, standardised and dist")
    feature_kind: Literal["tokens", "pooled"] = Field("tokens", description="compare place by place, or their mean")
    cache: bool | None = Field(
        None, description="keep the teacher's logits of every view for later students; null: where they are enough"
    )

    @model_validator(mode="after")
    def _learns_from_the_teacher(self) -> "DistillationConfig":
        if not any((self.kl, self.standardised, self.dist, self.hard, self.features)):
            raise ValueError("every weight of the teacher's is 0: set distillation to null to train without it")
        if self.features and self.cache:
            raise ValueError(
                "features are not in the teacher's cache, which keeps logits: set distillation.cache to false"
            )
        return self

    @property
    def needs_every_logit(self) -> str | None:
        """The name of a term that needs the logits of all classes, not of the largest alone."""
        return next((name for name in ("standardised", "dist") if getattr(self, name)), None)


class TeacherConfig(Settings):
    model: ModelConfig = ModelConfig(name="vit_b16")
    training: TrainingConfig | None = Field(TrainingConfig(), description="null: take the weights as they are")

    @model_validator(mode="after")
    def _has_weights(self) -> "TeacherConfig":
        if self.training is None and self.model.weights == "none":
            raise ValueError("a teacher that is not trained needs weights: give model.weights")
        return self


class StudentConfig(Settings):
    model: ModelConfig = ModelConfig(name="vit_ti16")
    training: TrainingConfig | None = Field(TrainingConfig(), description="null: take the weights as they are")
    distillation: DistillationConfig | None = Field(DistillationConfig(), description="null: train on the labels alone")

    @model_validator(mode="after")
    def _has_weights(self) -> "StudentConfig":
        if self.training is None and self.model.weights == "none":
            raise ValueError("a student that is not trained needs weights: give model.weights")
        return self


class SearchConfig(Settings):
    """Products given back to float until int8 keeps the limit on the tune split; begun only where it does not."""

    seconds: float = Field(900.0, gt=0, description="time for the whole search")
    trials: Positive = Field(24, description="int8 models to try, the plain one included")
    max_drop_points: float | None = Field(
        None, ge=0, description="largest drop of top-1 against float, in percentage points; null: the gate's limits"
    )
    tune_images: Positive = Field(2000, description="judge on so many images of the tune split, a random sample")
    timing_seconds: float = Field(1.0, gt=0, description="time each model on each target of this machine for so long")


class QatConfig(TrainingConfig):
    """Quantization-aware distillation, on from the best post-training model: Σ weight · KL(teacher ‖ int8 model).

    It trains in f32: bf16 would round the steps of int8 away.
    """

    epochs: Positive = 2
    learning_rate: float = Field(1e-4, gt=0, description="peak rate, at this batch size")
    warmup_epochs: float = Field(0.1, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    label_smoothing: Fraction = 0.0
    precision: Literal["f32"] = "f32"
    student: Weight = Field(1.0, description="KL from the float student")
    teacher: Weight = Field(1.0, description="KL from the student's own teacher, where the recipe has one")
    labels: Weight = Field(0.0, description="cross-entropy with the labels")
    temperature: float = Field(1.0, gt=0, description="T of both KL")

    @model_validator(mode="after")
    def _learns_from_somebody(self) -> "QatConfig":
        if not any((self.student, self.teacher, self.labels)):
            raise ValueError("student, teacher and labels all weigh 0: nothing would be learned")
        return self


class Int8Config(Settings):
    """Post-training static quantization to the canonical graph.

    auto: what brings the answers on held-out calibration images closer to float.
    """

    minimum_images: Positive = Field(64, description="fewer calibration images than this are refused")
    float_layers: Names = Field((), description="names of Linear and Conv modules to leave in float")
    equalization: Strengths = Field(
        (0.3, 0.5, 0.7), description="strengths α of equalization that are tried beside none (SmoothQuant's)"
    )
    ranges: Literal["auto", "output", "minmax", "percentile-99.9", "percentile-99.99", "mse", "entropy"] = Field(
        "auto",
        description="how activations are clipped; output: tensor by tensor, as disturbs the layers' outputs least",
    )
    rounding: Literal["auto", "nearest", "compensated"] = Field(
        "auto", description="of weights; compensated: each column takes up the error of those before it (GPTQ)"
    )
    bias_correction: Literal["auto", "always", "never"] = "auto"
    ends: Literal["auto", "int8"] = Field(
        "auto", description="patch projection or stem, and head; auto: float where that spares much and costs little"
    )
    search: SearchConfig | None = Field(SearchConfig(), description="null: never look at the tune split")
    qat: QatConfig | None = Field(None, description="train the int8 model on, from the student's images; null: do not")


class Limits(Settings):
    """What must hold on a target. `null` leaves a limit out."""

    max_drop_points: float | None = Field(
        1.0, ge=0, description="largest top-1 drop against the reference, in percentage points"
    )
    min_relative_top1: float | None = Field(0.99, gt=0, le=1, description="least share of the reference's top-1")
    min_agreement: float | None = Field(
        None, gt=0, le=1, description="least share of images answered as the reference does"
    )
    min_top1: float | None = Field(None, gt=0, le=1)
    undecided: Literal["fail", "pass"] | None = Field(
        None, description="what an undecided check counts as; null: exit 3"
    )
    min_speedup: float | None = Field(None, gt=0, description="least ratio of float latency to int8 latency")
    max_p90_ms: float | None = Field(None, gt=0)
    max_vs_reference: float | None = Field(None, gt=0, description="largest ratio of p50 to the reference's p50")
    max_slowdown: float | None = Field(
        None, gt=0, description="largest ratio of p50 to the baseline gate's, if one is given"
    )


class LatencyLimits(Settings):
    """Latency limits of one target; they override the recipe's."""

    min_speedup: float | None = Field(None, gt=0)
    max_p90_ms: float | None = Field(None, gt=0)
    max_vs_reference: float | None = Field(None, gt=0)


class TargetRequest(Settings):
    """A target that the recipe exports to: a runtime's name, or the name or path of a device profile."""

    name: str
    required: bool = Field(True, description="whether its verdict counts in the exit code of `run`")
    tune: bool = Field(False, description="measure the runtime's lowerings on this device and keep the fastest")
    dynamic_batch: bool | None = Field(None, description="leave the files' batch open; null: as the profile says")
    limits: LatencyLimits = LatencyLimits()


class Recipe(Settings):
    name: str = Field(pattern=r"^[\w.+-]*\w[\w.+-]*$", description="also the run folder's, so no slash")
    description: str = ""
    seed: Seed = 0
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    teacher: TeacherConfig | None = TeacherConfig()
    student: StudentConfig = StudentConfig()
    int8: Int8Config = Int8Config()
    targets: Annotated[tuple[TargetRequest, ...], Strict(False)] = (
        TargetRequest(name="onnxruntime"),
        TargetRequest(name="openvino"),
        TargetRequest(name="tensorrt", required=False),
    )
    gate: Limits = Limits()

    @model_validator(mode="after")
    def _teacher_is_used(self) -> "Recipe":
        distils = self.student.training is not None and self.student.distillation is not None
        if distils and self.teacher is None:
            raise ValueError("student.distillation needs a teacher: add one, or set student.distillation to null")
        if self.data.unlabelled is not None and not distils:
            raise ValueError("data.unlabelled has no labels to learn from without a teacher: give student.distillation")
        if self.data.unlabelled is not None and distils and self.student.distillation.labels:  # type: ignore[union-attr]
            raise ValueError("data.unlabelled has no labels to learn from: set student.distillation.labels to 0")
        if self.data.unlabelled is not None and self.int8.qat is not None and self.int8.qat.labels:
            raise ValueError("data.unlabelled has no labels to learn from: set int8.qat.labels to 0")
        qat = self.int8.qat
        if self.teacher is None and qat is not None and not (qat.student or qat.labels):
            raise ValueError(
                "int8.qat learns from the teacher alone, and there is none: give int8.qat.student a weight"
            )
        if self.teacher is not None and not distils:
            raise ValueError("the teacher would have no effect: give student.distillation, or set teacher to null")
        return self


def reduction(model: ModelConfig) -> int:
    """Pixels of the image's side to one token: what the side must be a multiple of. 16 for timm's architectures."""
    if model.stem is not None:
        return int(2 ** len(model.stem)) * (model.patch_size or 1)
    named = re.fullmatch(r"(?:vit|deit)_[a-z]+(\d+)", model.name)
    return model.patch_size or (int(named.group(1)) if named else 16)


def load(path: Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """The recipe in a YAML file, with `overrides` (dotted key → value) laid over it.

    Raises UserError for a file, a key or a value that is wrong.
    """
    from vit_edge import yaml_text

    values = yaml_text.read(path)
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: expected a mapping of settings, found {type(values).__name__}", "see `vit-edge pipelines`"
        )
    values.setdefault("name", path.stem)
    return parse(Recipe, laid_over(values, overrides or {}), str(path))


def laid_over(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with each of `overrides` (dotted key → value) put into its place; a group that is null is made anew."""
    values = deepcopy(values)
    for key, value in overrides.items():
        _put(values, key.split("."), value, key)
    return values


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=3` as ("a.b", 3); the value is read as YAML."""
    import yaml

    from vit_edge import yaml_text

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r}: expected KEY=VALUE", "for example --set student.training.epochs=5")
    try:
        return key, yaml_text.value(value)
    except yaml.YAMLError as err:
        raise UserError(f"--set {text!r}: the value is not valid YAML", "quote it") from err


def _put(values: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        if values.get(part) is None:
            values[part] = {}
        inner = values[part]
        if not isinstance(inner, dict):
            raise UserError(
                f"--set {key}: {part!r} is not a group of settings, it is {inner!r}", "give the key of a single setting"
            )
        values = inner
    values[path[-1]] = value
