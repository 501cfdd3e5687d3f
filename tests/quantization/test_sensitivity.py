"""What int8 costs product by product, of trained models and of the same with outliers planted."""

import pytest

from tests import small_models, trained
from vit_edge.export.fold import deployable
from vit_edge.models.classifier import Classifier, multiply_adds
from vit_edge.quantization import sensitivity, work
from vit_edge.quantization.choice import Chosen, choose, with_float
from vit_edge.quantization.products import parameter, products
from vit_edge.recipe import Int8Config

PLAIN = {"equalization": (), "ranges": "mse", "rounding": "nearest", "bias_correction": "never"}


def quantized(model: Classifier, **settings: object) -> Chosen:
    images_NHWC, _ = trained.images()
    config = Int8Config(**(PLAIN | settings))  # type: ignore[arg-type]
    return choose(deployable(model), images_NHWC[: trained.CALIBRATION], config, lambda line: None)


@pytest.mark.parametrize(
    ("kind", "planted"), [("vit", {"blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}), ("cnn", {"mix"})]
)  # fmt: skip
def test_the_planted_layers_are_what_costs(kind: str, planted: set[str]) -> None:
    chosen = quantized(trained.spoilt(kind))
    costs = {name: cost.kl for name, cost in sensitivity.costs(chosen).items()}
    assert set(costs) == set(chosen.outcome.scales)
    assert sum(costs[name] for name in planted) > 0.99 * sum(costs.values())
    spared = with_float(chosen, planted).kl
    assert spared < 0.01 * chosen.kl


@pytest.mark.parametrize(
    "settings", [{}, {"rounding": "compensated", "bias_correction": "always"}], ids=["plain", "all"]
)
@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_costs_alone_add_up_to_about_that_of_all_together(kind: str, settings: dict[str, object]) -> None:
    chosen = quantized(trained.trained(kind), **settings)
    together = sum(cost.kl for cost in sensitivity.costs(chosen).values())
    assert 0.3 < together / chosen.kl < 3


def test_what_is_in_float_costs_nothing_and_is_as_it_was() -> None:
    chosen = quantized(trained.trained("cnn"), float_layers=("widen",))
    assert "widen" not in sensitivity.costs(chosen)
    everything = [p.name for p in products(chosen.floats)]
    floats = with_float(chosen, everything)
    assert floats.kl == 0
    for product, stored in zip(products(floats.floats), products(floats.on_grid), strict=True):
        weights = parameter(floats.floats, product.weight), parameter(floats.on_grid, stored.weight)
        assert (weights[0] == weights[1]).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_multiply_adds_are_those_of_the_layers_with_weights(kind: str) -> None:
    model = small_models.vit(readout="mean") if kind == "vit" else small_models.cnn()
    found = work.multiply_adds(deployable(model), small_models.images(1))
    attention = 2 * 2 * 17 * 17 * 48 if kind == "vit" else 0  # two blocks, two products of 17 tokens
    assert sum(found.values()) + attention == multiply_adds(model, small_models.SIDE)


def test_a_head_that_spoils_the_answers_is_left_in_float_by_measurement() -> None:
    """Its input has one channel with a hundred times the range of the others, which its weights take back."""
    backbone = trained.Cnn()
    model = trained.trained("cnn")
    backbone.load_state_dict(model.backbone.state_dict())
    spoilt = Classifier(backbone, model.preprocessing).eval()
    backbone.head.weight.data[:, :1] /= 1000
    backbone.head.bias.data -= backbone.head.weight.data[:, 0] * 3000
    backbone.widen.weight.data[:1] *= 1000
    backbone.widen.bias.data[:1] = backbone.widen.bias.data[:1] * 1000 + 3000
    reasons = sensitivity.ends_for_float(quantized(spoilt))
    assert set(reasons) == {"head"}
    assert reasons["head"].startswith("by measurement: KL from float")
    assert sensitivity.ends_for_float(quantized(spoilt, float_layers=("head",))) == {}
