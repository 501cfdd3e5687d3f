"""The pipeline end to end on real digits and real runtimes, and which stages a change redoes."""

import json
import time
from pathlib import Path

import pytest

from vit_edge import ledger
from vit_edge.errors import UserError
from vit_edge.models.card import read_card
from vit_edge.pipeline import Pipeline
from vit_edge.recipe import Recipe
from vit_edge.report import quantization
from vit_edge.settings import parse
from vit_edge.stages import summary

TRAINING = {"epochs": 12, "batch_size": 32, "learning_rate": 4e-3, "warmup_epochs": 1.0}
GEOMETRY = {"name": "vit_ti16", "stem": [16, 32], "patch_size": 2, "width": 32, "depth": 2, "heads": 2}
RECIPE = {
    "name": "tiny",
    "data": {"spec": "digits", "image_size": 32, "calibration_images": 96},
    "teacher": {"model": GEOMETRY | {"width": 48}, "training": TRAINING},
    "student": {"model": GEOMETRY, "training": TRAINING},
    "targets": [{"name": "onnxruntime"}, {"name": "openvino"}, {"name": "tensorrt", "required": False}],
    "gate": {"max_drop_points": 5.0, "min_relative_top1": None},
}


def recipe(**changes: object) -> Recipe:
    return parse(Recipe, json.loads(json.dumps(RECIPE)) | changes, "test")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    pipeline = Pipeline(recipe(), tmp_path_factory.mktemp("runs") / "tiny", "cpu")
    pipeline.run()
    return pipeline


def again(run: Pipeline, changed: Recipe | None = None, **options: object) -> Pipeline:
    return Pipeline(changed or run.recipe, run.folder, "cpu", **options)


def test_every_stage_is_finished_in_order(run: Pipeline) -> None:
    targets = ("onnxruntime", "openvino", "tensorrt")
    expected = ["teacher", "student", "reference", "int8"]
    assert run.ran == expected + [f"export/{name}" for name in targets] + [f"gate/{name}" for name in targets]


def test_the_ledger_has_every_station_on_the_same_images(run: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.write_and_print(run) == 0
    rows = ledger.read(run.folder).rows
    stations = [(row.station, row.runtime) for row in rows]
    for runtime in ("onnxruntime", "openvino"):
        assert ("float", runtime) in stations
        assert ("int8", runtime) in stations
    assert stations[:2] == [("teacher", "torch"), ("student", "torch")]
    assert {row.n for row in rows if row.top1 is not None} == {898}
    assert all(row.top1 is None for row in rows if row.runtime.startswith("tensorrt"))
    for row in rows:
        assert row.parameters is not None
        assert row.multiply_adds is not None
    printed = capsys.readouterr().out
    assert "report.html" in printed
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "images of the tune split" in page
    assert "matrix products:" in page


def test_int8_keeps_the_students_accuracy_on_the_runtimes_that_run_here(run: Pipeline) -> None:
    for name in ("onnxruntime", "openvino"):
        assert run.metrics(f"gate/{name}")["verdict"] == "pass"


def test_tensorrt_is_unmeasured_without_its_gpu(run: Pipeline) -> None:
    found = json.loads((run.done["gate/tensorrt"] / "gate.json").read_text(encoding="utf-8"))
    if found["verdict"] != "unmeasured":
        assert found["accuracy"]["n"] == 898
        return
    assert "GPU" in " ".join(check["detail"] for check in found["checks"])


def test_a_second_run_does_nothing_in_two_seconds(run: Pipeline) -> None:
    started = time.process_time()
    second = again(run)
    second.run()
    assert second.ran == []
    assert time.process_time() - started < 2


def test_each_model_has_its_own_side_and_normalisation_all_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick, imagenet = TRAINING | {"epochs": 1}, {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    changes = {
        "teacher": {"model": GEOMETRY | {"image_size": 48} | imagenet, "training": quick},
        "student": {"model": GEOMETRY, "training": quick},
        "targets": [{"name": "onnxruntime"}],
    }
    pipeline = Pipeline(recipe(**changes), tmp_path / "tiny", "cpu")
    pipeline.run("export")
    said = capsys.readouterr().err
    assert "teacher: vit_ti16, 48 px, bicubic, crop 1, mean 0.485/0.456/0.406" in said
    assert "student: vit_ti16, 32 px, bicubic, crop 1, mean 0.5/0.5/0.5" in said
    for stage, side, mean in (("teacher", 48, 0.485), ("student", 32, 0.5)):
        preprocessing = read_card(pipeline.done[stage]).preprocessing
        assert (preprocessing.image_size, preprocessing.mean[0]) == (side, mean)
    bundle = json.loads((pipeline.done["export/onnxruntime"] / "bundle" / "bundle.json").read_text(encoding="utf-8"))
    assert bundle["preprocessing"]["image_size"] == 32
    assert pipeline.material.seen_at(48).view.image_size == 48
    changes["student"]["model"] = GEOMETRY | {"image_size": 40}
    larger = Pipeline(recipe(**changes), tmp_path / "tiny", "cpu")
    larger.run("student")
    assert larger.ran == ["student"]


def test_a_target_named_twice_is_refused(tmp_path: Path) -> None:
    for names in (("onnxruntime", "onnxruntime"), ("onnx", "onnxruntime")):
        twice = recipe(targets=[{"name": name} for name in names])
        with pytest.raises(UserError, match="two targets are called 'onnxruntime'"):
            Pipeline(twice, tmp_path / "run", "cpu").run()
    assert not (tmp_path / "run").exists()


def test_too_few_calibration_images_are_refused_before_training_when_it_goes_on_to_int8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = recipe(data=RECIPE["data"] | {"calibration_images": 10}, student={"model": GEOMETRY, "training": TRAINING})
    with pytest.raises(UserError) as caught:
        Pipeline(few, tmp_path / "tiny", "cpu").run("int8")
    assert "10 calibration images: quantizing needs 64 at least" in caught.value.problem
    assert not (tmp_path / "tiny" / "teacher").exists()
    only_trained = Pipeline(few, tmp_path / "tiny", "cpu", until="student")
    assert len(only_trained.material.splits.calibration) == 10
    assert "warning: 10 calibration images" in capsys.readouterr().err


def test_a_students_weights_that_do_not_fit_are_refused_before_the_teacher_is_trained(tmp_path: Path) -> None:
    (tmp_path / "web.pth").write_text("<html>", encoding="utf-8")
    student = {"model": GEOMETRY | {"weights": str(tmp_path / "web.pth")}, "training": TRAINING}
    with pytest.raises(UserError, match="is a web page"):
        Pipeline(recipe(student=student), tmp_path / "tiny", "cpu").run("student")
    assert not (tmp_path / "tiny" / "teacher").exists()


def test_a_changed_distillation_keeps_the_teacher(run: Pipeline) -> None:
    distillation = {"distillation": {"temperature": 1.0, "kl": 0.5}}
    changed = again(run, recipe(student=RECIPE["student"] | distillation), only=("onnxruntime",))
    changed.run()
    assert changed.ran == ["student", "reference", "int8", "export/onnxruntime", "gate/onnxruntime"]
    back = again(run, only=("onnxruntime",))
    back.run()
    assert back.ran == []


def test_a_changed_limit_redoes_no_training_but_what_was_held_against_it(run: Pipeline) -> None:
    changed = again(run, recipe(gate={"max_drop_points": 6.0, "min_relative_top1": None}), only=("openvino",))
    changed.run()
    assert changed.ran == ["int8", "export/openvino", "gate/openvino"]
    back = again(run)
    back.run()
    assert back.ran == []


def test_without_a_search_a_changed_limit_leaves_the_int8_model_as_it_is(run: Pipeline) -> None:
    plans = []
    for most in (5.0, 6.0):
        unsearched = again(run, recipe(gate={"max_drop_points": most}, int8={"search": None}))
        unsearched.run("student")
        plans.append(unsearched._int8().plan)
    assert plans[0] == plans[1]


def test_the_int8_model_is_held_against_the_limit_on_the_tune_split(run: Pipeline) -> None:
    found = quantization.search(run.done["int8"])
    assert found
    assert found.n == len(run.material.splits.tune)
    assert found.margin_points == 5.0


def test_from_redoes_what_follows(run: Pipeline) -> None:
    redone = again(run, only=("onnxruntime",))
    redone.run("export", start="int8")
    assert redone.ran == ["int8", "export/onnxruntime"]


def test_a_damaged_stage_is_named_before_it_is_read(run: Pipeline) -> None:
    weights = run.folder / "student" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(UserError, match="SHA-256 differs"):
            again(run).run("int8", start="int8")
    finally:
        weights.write_bytes(whole)


def test_an_unknown_stage_gets_the_nearest_name(run: Pipeline) -> None:
    with pytest.raises(UserError, match="unknown stage 'studnet'\ndid you mean 'student'"):
        again(run).run(start="studnet")


@pytest.mark.parametrize(("margin", "warned"), [(2.0, False), (0.5, True)])
def test_a_margin_that_the_images_cannot_decide_is_a_warning(
    run: Pipeline, capsys: pytest.CaptureFixture[str], margin: float, warned: bool
) -> None:
    assert len(again(run, recipe(gate={"max_drop_points": margin})).material.splits.gate) == 898
    said = capsys.readouterr().err
    assert ("898 gate images cannot decide a drop of 0.5 points: about 2" in said) == warned


@pytest.mark.parametrize(
    ("native", "models", "size"),
    [("digits", ("vit_b16", "vit_ti16"), 64), ("fashion-mnist", ("vit_b16", "vit_ti16"), 64)],
)
def test_images_are_enlarged_to_what_the_patches_divide(native: str, models: tuple[str, str], size: int) -> None:
    values = {
        "data": {"spec": native},
        "teacher": {"model": {"name": models[0]}},
        "student": {"model": {"name": models[1]}},
    }
    pipeline = Pipeline(parse(Recipe, {"name": "x"} | values, "test"), Path("unused"))
    assert pipeline.inputs.image_size == size


def test_a_profile_of_the_users_own_is_exported_and_gated_by_its_path(run: Pipeline, tmp_path: Path) -> None:
    profile = tmp_path / "my-camera.yaml"
    profile.write_text("runtime: onnxruntime\nthreads: 1\n", encoding="utf-8")
    own = again(run, recipe(targets=[{"name": str(profile)}]))
    own.run()
    assert own.ran == ["export/my-camera", "gate/my-camera"]
    assert own.metrics("gate/my-camera")["verdict"] == "pass"
