"""The wheel holds what the product needs at run time, and the README says only what is so."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from tests.conftest import missing
from vit_edge.cli.main import app
from vit_edge.recipe import parse_override
from vit_edge.settings import parse
from vit_edge.shipped import shipped
from vit_edge.target import Target

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_ships_recipes_profiles_and_templates(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    for kind in ("pipelines", "targets"):
        for name in shipped(kind):
            assert f"vit_edge/_shipped/{kind}/{name}.yaml" in names
    assert "vit_edge/report/page.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


# Bytes of what vit-edge brings beside the runtime named and what that needs itself, by package.
MEASURE = """
import json, os, re, sys
from importlib.metadata import PackageNotFoundError, distribution

def needed(name):
    try:
        found = distribution(name)
    except PackageNotFoundError:  # for another system or Python
        return set()
    plain = [re.match(r"[\\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
    return {found.name}.union(*map(needed, plain))

def size_bytes(name):
    return sum(os.path.getsize(path.locate()) for path in distribution(name).files if path.locate().exists())

ours = needed("vit-edge") - needed(sys.argv[1])
print(json.dumps({name: size_bytes(name) for name in ours}))
"""


@pytest.mark.parametrize(("runtime", "made"), [("onnxruntime", "ort_bundle"), ("openvino", "openvino_bundle")])
def test_a_device_installs_one_runtime_and_gates_a_bundle(
    wheel: Path, request: pytest.FixtureRequest, tmp_path: Path, runtime: str, made: str
) -> None:
    """In an empty environment: no torch, at most 30 MB beyond the runtime, and `gate` works."""
    bundle = request.getfixturevalue(made)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", f"{wheel}[{runtime}]"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        missing(runtime, f"pip cannot install here: {installed.stderr[-200:]}")
    measured = subprocess.run([python, "-c", MEASURE, runtime], check=True, capture_output=True, text=True)
    sizes = json.loads(measured.stdout)
    assert sum(sizes.values()) <= 30e6, sizes
    assert not {"torch", "numpy", "pillow", "pyyaml"} & {name.lower() for name in sizes}
    arguments = ("--max-drop", "5", "--min-relative-top1", "0.9", "--html", tmp_path / "gate.html")
    gate = [python, "-m", "vit_edge", "gate", bundle, *arguments]
    done = subprocess.run(gate, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in ("doctor", "targets", "train", "predict"):
        arguments = [bundle, "x.png"] if command == "predict" else []
        done = subprocess.run(
            [python, "-m", "vit_edge", command, *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0 or (done.returncode == 2 and "fix: pip install" in done.stderr), done.stderr


def test_a_gate_starts_without_what_it_does_not_need_yet(tmp_path: Path) -> None:
    """Half a second is what it has (README): these would take a third of that."""
    program = (
        "import sys\nfrom vit_edge.cli.main import main\nsys.argv = ['vit-edge', 'gate', 'nowhere']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sys.modules)\n"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path)
    late = {
        "psutil",
        "PIL",
        "yaml",
        "jinja2",
        "rich.console",
        "rich.progress",
        "onnxruntime",
        "openvino",
        "filelock",
        "torch",
    }
    assert not late & set(loaded.stdout.split())


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

    (example,) = re.findall(r"```yaml\n(# my-camera.*?)```", README, flags=re.DOTALL)
    assert parse(Target, {"name": "my-camera"} | yaml.safe_load(example), "README").threads == 4


@pytest.mark.parametrize("word", re.findall(r"`(vit_edge/[\w/.]+|[\w]+\.py|(?:pipelines|targets)/[\w.]+)`", README))
def test_every_file_that_the_readme_names_exists(word: str) -> None:
    assert list(ROOT.glob(f"**/{word.rstrip('/')}"))
