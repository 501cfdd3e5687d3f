"""Tuning on the small ViT: what is tried, what is taken, and what is said. No test looks at a latency."""

import numpy as np
import pytest

from tests.conftest import QUICK, require
from tests.small_models import built, images
from vit_edge.export import onnx
from vit_edge.export.lower import LOWERINGS
from vit_edge.stages import tuning
from vit_edge.target import Target, load


def target(runtime: str) -> Target:
    found = load(runtime)
    return found.model_copy(update={"threads": 1, "protocol": found.protocol.model_copy(update=QUICK)})


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_every_lowering_is_tried_and_one_is_taken(runtime: str, capsys: pytest.CaptureFixture[str]) -> None:
    require(runtime, runtime)
    found = built("vit")
    graphs = [onnx.with_batch(model, 1) for model in (found.canonical, found.floats)]
    chosen, tried = tuning.fastest(*graphs, found.by_value, target(runtime), images(8))
    assert [one["lowering"] for one in tried] == list(LOWERINGS[runtime])
    assert [one["lowering"] for one in tried if "left" not in one] == [chosen]
    assert all(one["p50_ms"] > 0 and np.isfinite(one["kl_from_float"]) for one in tried)
    said = capsys.readouterr().err.splitlines()
    assert sum("tune: " in line for line in said) == len(tried)


def test_a_graph_that_two_lowerings_make_alike_is_measured_once() -> None:
    require("openvino", "openvino")
    found = built("cnn")
    graphs = [onnx.with_batch(model, 1) for model in (found.canonical, found.floats)]
    _, tried = tuning.fastest(*graphs, found.by_value, target("openvino"), images(8))
    measured = [one["lowering"] for one in tried if "p50_ms" in one]
    assert measured == ["float attention", "float attention, quantized late", "canonical"]
    assert all("the same graph as" in one["left"] for one in tried if "p50_ms" not in one)


def test_where_there_is_one_way_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = built("vit")
    graphs = [onnx.with_batch(model, 1) for model in (found.canonical, found.floats)]
    assert tuning.fastest(*graphs, found.by_value, target("tensorrt"), images(8)) == ("where it gains", [])
    assert "tensorrt is lowered as a rule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({"p50_ms": 0.9, "kl_from_float": 0.0011}, "other"),
        ({"p50_ms": 0.99, "kl_from_float": 0.001}, "first"),
        ({"p50_ms": 0.5, "kl_from_float": 0.0013}, "first"),
    ],
)
def test_the_fastest_is_taken_that_is_worth_it_and_stays_as_close_to_float(
    others: dict[str, float], chosen: str
) -> None:
    tried = {"first": {"p50_ms": 1.0, "kl_from_float": 0.001}, "other": others}
    assert tuning._choose(["first", "other"], tried) == chosen
    assert "left" in tried["first" if chosen == "other" else "other"]
