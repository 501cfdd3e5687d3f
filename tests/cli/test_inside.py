"""inspect, probe and convert as a user types them, and files that are not the weights they seem to be."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.cli.test_build import Cli, refused, vit_edge  # noqa: F401
from tests.models.test_weight_files import RunsCode
from vit_edge.models import classifier as models
from vit_edge.models import origin, zoo
from vit_edge.recipe import ModelConfig

CONFIG = ModelConfig(name="vit_ti16", width=48, depth=2, heads=3, patch_size=8)
NAMED = ["--data", "digits", "--image-size", "32", "--device", "cpu"]
TOLD = ["--set", "mean=[0.5,0.5,0.5]", "--set", "std=[0.5,0.5,0.5]"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved model with random weights."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    folder.mkdir()
    backbone = zoo.create(CONFIG, 10, 32)
    models.save(
        folder, models.Classifier(backbone, origin.preprocessing(CONFIG, 32)), CONFIG, [str(k) for k in range(10)]
    )
    return folder


def test_inspect_writes_figures_and_their_numbers(vit_edge: Cli, saved: Path, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = vit_edge("inspect", str(saved), "--data", "digits", "--out", "seen", "--device", "cpu")
    assert code == 0, err
    assert [Path(line).name for line in out.split()] == [
        "filters.png",
        "positions.png",
        "attention.png",
        "numbers.json",
    ]
    numbers = json.loads((tmp_path / "seen" / "numbers.json").read_text())
    assert (numbers["schema"], numbers["images"], numbers["missing"]) == ("vit-edge/inspect/1", 64, {})
    assert np.shape(numbers["attention_distance_px"]) == (2, 3)
    assert np.shape(numbers["position_similarity"]) == (4, 4, 4, 4)
    assert np.shape(numbers["filters"]["components"]) == (28, 8, 8, 3)


def test_probe_prints_its_table(vit_edge: Cli, saved: Path) -> None:  # noqa: F811
    code, out, err = vit_edge("probe", str(saved), "--shots", "1,5", "--draws", "3", "--device", "cpu", "--json")
    assert code == 0, err
    table = json.loads(out)
    assert [(row["shots"], len(row["top1"])) for row in table["rows"]] == [(1, 3), (5, 3)]
    assert (table["test_images"], table["features"]) == (90, 48)
    assert "tune split" in table["data"]
    code, out, err = vit_edge("probe", "vit_ti16", "--weights", "none", "--shots", "2", "--draws", "2", *NAMED)
    assert code == 0, err
    assert "spread" in out
    assert "2 draws, ridge 1024, 192 features, 90 test images" in out


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (["probe", "vit_ti16", *NAMED], "no weights are given", "--weights pretrained"),
        (["probe", "vit_t16", "--weights", "none", *NAMED], "unknown model 'vit_t16'", "vit_ti16"),
        (["inspect", ".", *NAMED], "holds no model.json", "a model's folder"),
        (["probe", "MODEL", "--shots", "a,5"], "--shots 'a,5'", "1,5,10,25"),
        (["probe", "MODEL", "--shots", "900"], "900 shots need as many", "--shots"),
        (["probe", "MODEL", "--ridge", "0"], "penalty = 0.0", "penalty"),
        (["probe", "MODEL", "--weights", "none"], "--weights has no effect", "leave it out"),
        (["inspect", "MODEL", "--image-size", "64"], "--image-size has no effect", "leave it out"),
        (["inspect", "MODEL", "--set", "crop=0.9"], "--set has no effect", "leave it out"),
        (["inspect", "MODEL/model.safetensors"], "is a file, and the model in it has no name", "--weights FILE"),
        (["probe", "vit_ti16", "--weights", "none", "--set", "colour=1", *NAMED], "unknown key 'colour'", "known keys"),
        (["convert", "none.pth", "w.safetensors"], "there is no weight file none.pth", "existing file"),
        (["convert", "MODEL", "w.pth"], "does not end with .safetensors", "w.safetensors"),
        (["convert", "MODEL", "MODEL/model.safetensors"], "exists already", "another name"),
        (["convert", "MODEL", "nowhere/w.safetensors"], "cannot write", "folder"),
    ],
)
def test_mistakes_are_two_lines(vit_edge: Cli, saved: Path, arguments: list[str], problem: str, fix: str) -> None:  # noqa: F811
    refused(vit_edge(*(argument.replace("MODEL", str(saved)) for argument in arguments)), problem, fix)


@pytest.mark.parametrize("name", ["w.pth", "w.old.pth", "w.npz", "w.checkpoint.pth"])
def test_convert_keeps_every_tensor(vit_edge: Cli, saved: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    state = load_file(saved / "model.safetensors") | {"tied": load_file(saved / "model.safetensors")["head.weight"]}
    state["half"] = torch.arange(6.0).half().reshape(2, 3).T
    state["again"] = state["half"]
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **{key: tensor.numpy() for key, tensor in state.items()})
    else:
        wrapped = {"model": state, "epoch": 3} if "checkpoint" in name else state
        torch.save(wrapped, tmp_path / name, _use_new_zipfile_serialization="old" not in name)
    code, out, err = vit_edge("convert", name, "w.safetensors")
    assert code == 0, err
    assert f"w.safetensors: {len(state)} tensors" in out
    assert "timm's layout" in err
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) and found[key].dtype == state[key].dtype for key in state)
    assert not list(tmp_path.glob("*.partial"))


def test_converted_weights_load(vit_edge: Cli, saved: Path, tmp_path: Path) -> None:  # noqa: F811
    torch.save(zoo.create(ModelConfig(name="vit_ti16"), 10, 32).state_dict(), tmp_path / "w.pth")
    assert vit_edge("convert", "w.pth", "w.safetensors")[0] == 0
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    refused(vit_edge("inspect", "vit_ti16", "--weights", "w.safetensors", *NAMED), "is not known", "--set mean=[0.5,")
    code, _, err = vit_edge("inspect", "vit_ti16", "--weights", "w.safetensors", *NAMED, *TOLD)
    assert code == 0, err
    assert "in timm's layout from w.safetensors" in err


def broken(kind: str, path: Path, saved: Path) -> None:
    """Writes a file of a kind that people mistake for weights."""
    if kind == "truncated":
        path.write_bytes((saved / "model.safetensors").read_bytes()[:-3000])
    elif kind == "code":
        path.write_bytes(pickle.dumps({"model": {"a": torch.ones(2)}, "extra": RunsCode(path.parent / "trace")}))
    elif kind == "other":
        torch.save(zoo.create(ModelConfig(name="vit_s16", depth=12), 10, 32).state_dict(), path)
    elif kind == "resnet":
        torch.save(timm.create_model("resnet18", num_classes=10).state_dict(), path)
    elif kind == "part":
        state = zoo.create(ModelConfig(name="vit_ti16"), 10, 32).state_dict()
        torch.save({key: tensor for key, tensor in state.items() if "qkv.bias" not in key}, path)
    elif kind == "nan":
        state = zoo.create(ModelConfig(name="vit_ti16"), 10, 32).state_dict()
        state["norm.bias"][0] = torch.nan
        torch.save(state, path)
    else:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        path.write_bytes({"empty": b"", "html": b"<!DOCTYPE html><html>404</html>", "lfs": pointer}[kind])


@pytest.mark.parametrize(
    ("kind", "problem", "fix"),
    [
        ("truncated", "truncated", "download the file again"),
        ("empty", "is empty (0 bytes)", "download the file again"),
        ("html", "is a web page", "the file itself"),
        ("lfs", "Git LFS pointer", "git lfs pull"),
        ("code", "bad.pth wants to run code when it is loaded: posix.system", "save_file(model.state_dict()"),
        ("other", "does not fit vit_ti16", "the file holds a vit_s16"),
        ("resnet", "does not fit vit_ti16", "it looks like a ResNet"),
        ("part", "nothing for 12 of 150: blocks.0.attn.qkv.bias", "save the whole model.state_dict()"),
        ("nan", "NaN or infinite weights: norm.bias", "an earlier checkpoint"),
    ],
)
def test_what_is_no_weights_is_two_lines(
    vit_edge: Cli, saved: Path, tmp_path: Path, kind: str, problem: str, fix: str  # noqa: F811
) -> None:  # fmt: skip
    broken(kind, tmp_path / "bad.pth", saved)
    for command in ("inspect", "probe"):
        refused(vit_edge(command, "vit_ti16", "--weights", "bad.pth", *NAMED, *TOLD), problem, fix)
    if kind not in ("other", "resnet", "part"):
        refused(vit_edge("convert", "bad.pth", "w.safetensors"), problem, fix)
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "w.safetensors").exists()
