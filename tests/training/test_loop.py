"""The training loop: it learns, every setting does something, and it stops at a loss that is none."""

import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.training.small import SGD, TRAINING, alone, metrics_of, same_weights, weights
from vit_edge.errors import UserError
from vit_edge.models import zoo
from vit_edge.models.classifier import Classifier
from vit_edge.pipeline import Pipeline
from vit_edge.preprocess import Preprocessing
from vit_edge.quantization import watch
from vit_edge.recipe import ModelConfig, TrainingConfig
from vit_edge.training import divergence, optimizer


def train(run: Path, **settings: object) -> Pipeline:
    pipeline = Pipeline(alone(**settings), run, "cpu")
    pipeline.run("student")
    return pipeline


def test_training_learns_and_reports(tmp_path: Path) -> None:
    metrics = train(tmp_path / "run", student__training__epochs=25).metrics("student")
    losses = [line["loss"] for line in metrics_of(tmp_path / "run")]
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 0.5
    assert metrics["tune_top1"] > 0.25
    assert 0 <= metrics["share_waiting_for_data"] < 1
    assert not (tmp_path / "run" / "student" / "checkpoint.pt").exists()


def test_a_student_out_of_int8s_reach_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "OUT_OF_REACH", 1.01)
    train(tmp_path, student__training__epochs=2)
    assert re.search(r"int8 would answer .*% of the images otherwise; .* in blocks.\d: \d+ σ", capsys.readouterr().err)
    last = metrics_of(tmp_path)[-1]
    assert 0 <= last["int8_agreement"] <= 1
    assert set(last["outliers"]) == {"blocks.0", "blocks.1"}
    assert set(last["outliers"]["blocks.0"]) == {"max_over_sigma", "kurtosis"}


def test_a_rate_that_is_too_high_stops_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss (became|grew to) .*\n.*learning_rate"):
        train(tmp_path, student__training__learning_rate=1e20, student__training__warmup_epochs=0.0)
    assert not (tmp_path / "student").exists()


def test_a_loss_that_grows_beyond_guessing_is_divergence() -> None:
    seen = divergence.Watch(classes=10, learning_rate=0.1)
    for _ in range(60):
        seen.see(2.3, 0)
    for loss in 10 * [30.0, *19 * [2.3]]:  # a spike passes
        seen.see(loss, 1)
    with pytest.raises(UserError, match=r"grew to .* from 2.3 at the start in epoch 4"):
        _see(seen, 20 * [9.0], epoch=3)


def test_a_training_that_starts_well_may_get_worse_at_first() -> None:
    seen = divergence.Watch(classes=10, learning_rate=0.1)
    for loss in [0.1] * 20 + [1.5] * 40 + [0.1] * 20:
        seen.see(loss, 0)


def test_mixup_and_bf16_train(tmp_path: Path) -> None:
    augment = {"mixup": 0.8, "cutmix": 1.0}
    pipeline = train(tmp_path, augment=augment, student__training__precision="bf16", student__training__epochs=2)
    assert pipeline.metrics("student")["loss"] > 0


def test_parts_of_a_batch_add_up_to_the_batch(tmp_path: Path) -> None:
    """A model without BatchNorm and without chance learns the same whether a batch is computed in one part or four."""
    model = {"name": "vit_ti16", "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
    for name, parts in (("one", 1), ("four", 4)):
        train(tmp_path / name, student__model=model, student__training=TRAINING | SGD | {"accumulate": parts})
    one, four = weights(tmp_path / "one"), weights(tmp_path / "four")
    for name, weight in one.items():
        torch.testing.assert_close(four[name], weight, atol=1e-5, rtol=1e-4)
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("one", "four")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    model = {"name": "vit_ti16", "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
    train(tmp_path / "kept", student__model=model)
    train(tmp_path / "again", student__model=model, student__training__checkpoint_activations=True)
    for name, weight in weights(tmp_path / "kept").items():
        torch.testing.assert_close(weights(tmp_path / "again")[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["lamb", "sgd", "lion"])
def test_timms_optimisers_train(tmp_path: Path, name: str) -> None:
    train(tmp_path, student__training__optimizer=name, student__training__epochs=2)
    assert metrics_of(tmp_path)[-1]["loss"] < 2.5


@pytest.mark.parametrize(
    ("settings", "problem", "fix"),
    [
        ({"student__training__optimizer": "adamv"}, "unknown optimizer 'adamv'", "adam"),
        ({"student__training__accumulate": 3}, "batch_size 64 does not divide into accumulate 3", "63"),
        ({"student__training__batch_size": 2, "student__training__accumulate": 2, "augment": {"mixup": 0.1}}, "is odd", "even"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_training(tmp_path: Path, settings: dict, problem: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        train(tmp_path, **settings)
    assert problem in raised.value.problem
    assert fix in raised.value.fix


def test_few_images_make_small_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, data__train_images=40, student__training__epochs=1)
    assert "40 training images are fewer than a batch of 64: batches of 40" in capsys.readouterr().err


def test_decay_spares_tokens_positions_biases_and_norms() -> None:
    model = _classifier()
    groups = optimizer.parameter_groups(model, TrainingConfig())
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    names = {name for name, p in model.backbone.named_parameters() if id(p) in decayed}
    assert names == {
        name for name, p in model.backbone.named_parameters() if p.ndim > 1 and name not in ("cls_token", "pos_embed")
    }


def test_layer_decay_reaches_the_rates_of_the_steps() -> None:
    model = _classifier()
    made = optimizer.make(model, TrainingConfig(layer_decay=0.5, learning_rate=1e-3, warmup_epochs=0.0))
    optimizer.schedule(made, TrainingConfig(warmup_epochs=0.0, learning_rate=1e-3), 10).step_update(0)
    rate_of = {id(p): group["lr"] for group in made.param_groups for p in group["params"]}
    assert rate_of[id(model.backbone.head.weight)] == pytest.approx(1e-3)
    assert rate_of[id(model.backbone.blocks[0].mlp.fc1.weight)] == pytest.approx(1e-3 / 4)


def test_a_moving_average_is_what_is_kept(tmp_path: Path) -> None:
    train(tmp_path / "plain")
    train(tmp_path / "averaged", student__training__ema_decay=0.9)
    assert not same_weights(tmp_path / "plain", tmp_path / "averaged")


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Pipeline(alone(student__training__epochs=3), tmp_path, "cpu", tensorboard=True).run("student")
    read = EventAccumulator(str(tmp_path / "student" / "tensorboard")).Reload()
    assert [event.value for event in read.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in metrics_of(tmp_path)]
    )


def _see(seen: divergence.Watch, losses: list[float], epoch: int) -> None:
    for loss in losses:
        seen.see(loss, epoch)


def _classifier() -> Classifier:
    Accelerator(cpu=True)
    backbone = zoo.create(ModelConfig(name="vit_ti16", patch_size=4, width=32, depth=2, heads=2), 10, 16)
    return Classifier(backbone, Preprocessing(image_size=16))
