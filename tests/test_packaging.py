"""The wheel holds what the product needs at run time, and the README says only what is so."""

import re
import shlex
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from vit_edge.cli.main import app
from vit_edge.recipe import parse_override
from vit_edge.settings import parse
from vit_edge.shipped import shipped
from vit_edge.target import Target

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_ships_recipes_profiles_and_templates(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for kind in ("pipelines", "targets"):
        for name in shipped(kind):
            assert f"vit_edge/_shipped/{kind}/{name}.yaml" in names
    assert "vit_edge/report/page.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    lines = [
        line[2:].partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.startswith("$ ")
    ]
    return [line for line in lines if line.startswith("vit-edge ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_readme_has_the_options_that_it_shows(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options
    for before, value in pairwise(arguments):
        if before == "--set":
            parse_override(value)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"pipelines/(\w+)\.yaml", README))))
def test_every_recipe_of_the_readme_is_shipped(name: str) -> None:
    assert name in shipped("pipelines")


def test_the_readmes_profile_loads() -> None:
    import yaml

    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert parse(Target, {"name": "my-camera"} | yaml.safe_load(example), "README").threads == 4


@pytest.mark.parametrize("word", re.findall(r"`(vit_edge/[\w/.]+|[\w]+\.py|(?:pipelines|targets)/[\w.]+)`", README))
def test_every_file_that_the_readme_names_exists(word: str) -> None:
    assert list(ROOT.glob(f"**/{word.rstrip('/')}"))
