"""Recipes: what they refuse, in which words, and that every shipped one loads."""

from pathlib import Path

import pytest

from vit_edge import recipe
from vit_edge.errors import UserError
from vit_edge.recipe import DataConfig, ModelConfig, Recipe, StudentConfig, reduction
from vit_edge.settings import parse
from vit_edge.shipped import shipped


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", shipped("pipelines").values(), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_describes_itself(path: Path) -> None:
    assert recipe.load(path).description


def test_the_name_is_the_files_own(tmp_path: Path) -> None:
    assert recipe.load(written(tmp_path, "seed: 3")).name == "mine"


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("studnet: {}", "unknown key 'studnet'", "did you mean 'student'?"),
        ("student: {training: {epoch: 3}}", "unknown key 'student.training.epoch'", "did you mean 'epochs'?"),
        ("targets: [{name: openvino, limits: {max_p90: 3}}]", "unknown key 'targets.0.limits.max_p90'", "max_p90_ms"),
        ("student: {training: {epochs: many}}", "student.training.epochs = 'many'", "correct"),
        ("student: {training: {epochs: 0}}", "student.training.epochs = 0", "correct"),
        ("teacher: null", "student.distillation needs a teacher", "correct"),
        ("student: {distillation: null}", "the teacher would have no effect", "correct"),
        ("student: {model: {name: vit_ti16, weights: nowhere.pt}}", "an existing file", "correct"),
        ("student: {training: null, distillation: null}\nteacher: null", "needs weights", "correct"),
        ("int8: {qat: {precision: bf16}}", "int8.qat.precision = 'bf16'", "correct"),
        ("int8: {qat: {student: 0, teacher: 0}}", "nothing would be learned", "correct"),
        ("a: [1", "not valid YAML at line", "mend"),
        ("seed: 1\nseed: 2", "not valid YAML at line 2: the key 'seed' is given twice", "mend"),
        ("data: {spec: digits, spec: cifar10}", "the key 'spec' is given twice", "mend"),
        ("student: {model: {name: vit_ti16, mean: [0.5, 0.5, 0.5]}}", "mean and std belong together", "correct"),
        ("student: {model: {name: vit_ti16, mean: [124, 117, 104], std: [58, 57, 57]}}", "mean.0 = 124", "correct"),
        ("student: {model: {name: vit_ti16, mean: [0, 0, 0], std: [0, 1, 1]}}", "std.0 = 0", "correct"),
        ("student: {model: {name: vit_ti16, image_size: 0}}", "image_size = 0", "correct"),
        ("- 1", "expected a mapping", "pipelines"),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path: Path, text: str, problem: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load(written(tmp_path, text))
    assert problem in caught.value.problem
    assert fix in caught.value.fix


def test_a_missing_file_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        recipe.load(tmp_path / "none.yaml")


def test_overrides_reach_into_the_recipe(tmp_path: Path) -> None:
    overrides = dict(
        [recipe.parse_override("student.training.epochs=5"), recipe.parse_override("gate.max_drop_points=0.3")]
    )
    loaded = recipe.load(written(tmp_path, "seed: 1"), overrides)
    assert loaded.student.training is not None
    assert loaded.student.training.epochs == 5
    assert loaded.gate.max_drop_points == 0.3


def test_an_override_makes_a_group_that_was_null(tmp_path: Path) -> None:
    path = written(tmp_path, "teacher: {training: null, model: {name: vit_b16, weights: pretrained}}")
    loaded = recipe.load(path, dict([recipe.parse_override("teacher.training.learning_rate=1e-3")]))
    assert loaded.teacher is not None
    assert loaded.teacher.training is not None
    assert loaded.teacher.training.learning_rate == 1e-3


@pytest.mark.parametrize("text", ["epochs", "=3", "a=[1", "a={b: 1, b: 2}"])
def test_an_override_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        recipe.parse_override(text)


def test_an_override_into_a_single_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a group"):
        recipe.load(written(tmp_path, "seed: 1"), {"seed.inner": 2})


def test_a_recipe_survives_being_written_and_read() -> None:
    made = Recipe(
        name="x",
        data=DataConfig(spec="fashion-mnist"),
        student=StudentConfig(model=ModelConfig(name="vit_ti16", stem=(32, 64))),
    )
    assert parse(Recipe, made.model_dump(mode="json"), "here") == made


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        (ModelConfig(name="vit_b16"), 16),
        (ModelConfig(name="deit_ti16", patch_size=4), 4),
        (ModelConfig(name="vit_h14"), 14),
        (ModelConfig(name="vit_ti16", stem=(32, 64), patch_size=1), 4),
        (ModelConfig(name="mobilenetv3_small_050"), 16),
    ],
)
def test_pixels_to_a_token(model: ModelConfig, pixels: int) -> None:
    assert reduction(model) == pixels
