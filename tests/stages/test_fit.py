"""`vit-edge fit` in the real runtimes, on small images and small budgets of time."""

import shlex
from itertools import pairwise

import pytest
import yaml

from tests.conftest import require
from vit_edge.cli import build
from vit_edge.cli import fit as cli
from vit_edge.errors import UserError
from vit_edge.fitting import Candidate
from vit_edge.models import zoo
from vit_edge.recipe import Recipe, laid_over, parse_override
from vit_edge.settings import parse
from vit_edge.stages import fit
from vit_edge.target import Target, load

SIDE, CLASSES = 32, 10


def aimed(name: str = "onnxruntime") -> Target:
    return load(name).model_copy(update={"threads": 1})


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_proposes_vits_that_fit(monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    require(runtime, runtime)
    monkeypatch.setattr(fit, "DEPTHS", (1,))
    monkeypatch.setattr(fit, "WIDTHS", (32, 64))
    found = fit.fit(aimed(runtime), 1e4, family="vit", image_size=SIDE, classes=CLASSES, seconds=600)
    assert [trial.candidate.settings["width"] for trial in found.proposals] == [64, 64]
    assert {trial.candidate.settings["patch_size"] for trial in found.proposals} == {4, 8}
    assert found.complete
    assert found.runtime["runtime"] == runtime
    assert all(0 < trial.p50_ms <= trial.p90_ms for trial in found.trials)


def test_nothing_that_fits_says_how_fast_the_fastest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "DEPTHS", (1,))
    monkeypatch.setattr(fit, "WIDTHS", (32,))
    with pytest.raises(
        UserError, match="the fastest, vit_ti16 patch_size 8 width 32 depth 1 heads 1 at 32 px, takes"
    ) as raised:
        fit.fit(aimed(), 1e-3, family="vit", image_size=SIDE, classes=CLASSES, seconds=1)
    assert "--image-size" in raised.value.fix


def test_a_target_that_is_not_here_is_refused() -> None:
    require("openvino", "openvino")
    target = aimed("openvino").model_copy(update={"device": "GPU.7"})
    with pytest.raises(UserError, match=r"no device 'GPU\.7'"):
        fit.fit(target, 1.0, family="vit", image_size=SIDE, classes=CLASSES, seconds=1)
    with pytest.raises(UserError, match="tiles 31 px"):
        fit.fit(aimed(), 1.0, family="vit", image_size=31, classes=CLASSES, seconds=1)


@pytest.mark.parametrize("side", [28, 32, 64, 96, 160, 224])
def test_every_vit_of_a_line_can_be_built_and_grows(side: int) -> None:
    lines = list(fit.vit_lines(side, CLASSES))
    assert len(lines) == 2 * len(fit.DEPTHS)
    for line in lines:
        assert [one.capacity for one in line] == sorted(one.capacity for one in line)
        assert all(side % one.settings["patch_size"] == 0 for one in line)


def test_every_cnn_of_a_line_exists_and_grows() -> None:
    for line in fit.cnn_lines(64, CLASSES):
        assert [one.capacity for one in line] == sorted(one.capacity for one in line)


@pytest.mark.parametrize("candidate", [next(fit.vit_lines(SIDE, CLASSES))[3], next(fit.cnn_lines(SIDE, CLASSES))[0]])
def test_what_is_printed_makes_the_student(candidate: Candidate) -> None:
    """The command's options and the YAML give one and the same model, of the size that was told."""
    _, name, *arguments = shlex.split(cli.command(candidate.settings, SIDE))
    assert name == "distill"
    changes = [value for option, value in pairwise(arguments) if option == "--set"]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert given["--image-size"] == str(SIDE)
    values = build._base(None, None, SIDE, False) | {"student": build._part(given["--student"], None, None, None)}
    by_command = parse(
        Recipe, laid_over(values | {"name": "x"}, dict(map(parse_override, changes))), "test"
    ).student.model
    by_file = parse(
        Recipe, {"name": "x"} | {"student": {"model": yaml.safe_load(cli._yaml(candidate.settings))}}, "test"
    ).student.model
    assert by_command == by_file
    built = zoo.create(by_command, CLASSES, SIDE)
    assert sum(parameter.numel() for parameter in built.parameters()) == candidate.parameters
