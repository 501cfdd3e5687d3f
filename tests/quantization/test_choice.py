"""What is chosen is what answers most like float on images that nothing was fitted to."""

import pytest

from tests.small_models import cnn, images, logits_of, vit, worst
from vit_edge.export.fold import deployable
from vit_edge.quantization.choice import Chosen, _downhill, choose
from vit_edge.recipe import Int8Config


def chosen(kind: str, **settings: object) -> tuple[Chosen, list[str]]:
    told: list[str] = []
    graph = deployable(vit() if kind == "vit" else cnn())
    return choose(graph, images(64), Int8Config(**settings), told.append), told  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_says_in_a_line_each_what_it_chose(kind: str) -> None:
    found, told = chosen(kind)
    words = ("bias correction", "equalization", "range", "error-compensated rounding")
    assert len(told) == len(words)
    assert all(word in line and "KL" in line for word, line in zip(words, told, strict=True))
    model = vit() if kind == "vit" else cnn()
    assert worst(logits_of(found.floats, images(4)), logits_of(deployable(model), images(4))) < 1e-5


def test_everything_off_is_the_plain_quantizer() -> None:
    settings = {"equalization": (), "ranges": "minmax", "rounding": "nearest", "bias_correction": "never"}
    found, told = chosen("vit", **settings)
    assert told == []
    assert set(found.outcome.methods.values()) == {"minmax", "exact"}
    assert not (found.outcome.corrected | found.outcome.compensated | set(found.alphas))


def test_what_is_asked_for_is_done_whether_it_helps_or_not() -> None:
    found, _ = chosen("vit", equalization=(), ranges="mse", rounding="compensated", bias_correction="always")
    names = {"blocks.0.mlp.fc1", "blocks.1.mlp.fc2", "head"}
    assert names <= found.outcome.corrected
    assert names <= found.outcome.compensated


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_images_are_enough_to_choose_on_where_the_recipe_allows_so_few(count: int) -> None:
    chosen = choose(deployable(cnn()), images(count), Int8Config(minimum_images=1), lambda line: None)
    assert chosen.outcome.scales


@pytest.mark.parametrize(
    ("costs", "tried"),
    [([3, 2, 1, 2, 3], [2, 1, 3]), ([1, 2, 3, 4, 5], [2, 1, 0]), ([5, 4, 3, 2, 1], [2, 1, 3, 4]), ([7], [0]), ([2, 1], [1, 0])],
)  # fmt: skip
def test_strengths_are_tried_for_as_long_as_they_get_better(costs: list[int], tried: list[int]) -> None:
    seen: list[int] = []

    def made(value: float) -> int:
        seen.append(int(value))
        return int(value)

    assert costs[_downhill(range(len(costs)), made, lambda index: costs[index])] == min(costs)
    assert seen == tried
