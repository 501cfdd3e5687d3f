"""Files that are no weights, or not whole, or would run code: two lines each, and nothing runs."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vit_edge.errors import UserError
from vit_edge.models.weight_files import assign, read


class RunsCode:
    """A pickle of this would create the file `path` when loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refusal(path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        read(path, lambda _: None)
    assert "\n" not in caught.value.problem + caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("content", "problem", "fix"),
    [
        (b"", "is empty", "download"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>404</html>", "is a web page", "the file itself"),
        (b"hello world", "no weight file", "download"),
        (b"PK\x03\x04" + bytes(400), "no weight file", "download"),
        (b"\x80\x02" + bytes(400), "no weight file", "download"),
        (b"\xff" * 4 + bytes(4) + b"{" + bytes(400), "no safetensors file", "download"),
    ],
)
def test_impostors(tmp_path, content, problem, fix):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    error = refusal(path)
    assert problem in error.problem
    assert fix in error.fix


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.old.pth", "w.npz"])
def test_truncated_files(tmp_path, name):
    path, state = tmp_path / name, {"a": torch.ones(5000)}
    if name.endswith(".safetensors"):
        save_file(state, path)
    elif name.endswith(".npz"):
        np.savez(path, a=np.ones(5000))
    else:
        torch.save(state, path, _use_new_zipfile_serialization="old" not in name)
    path.write_bytes(path.read_bytes()[:-3000])
    assert "truncated" in refusal(path).problem


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors"])
@pytest.mark.parametrize("kind", ["zip", "zip 4", "old", "raw 0", "raw 2", "raw 4", "raw 5"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run_it(tmp_path, recwarn, kind, name):
    path, trace = tmp_path / name, tmp_path / "trace"
    content, (how, _, protocol) = {"model": {"a": torch.ones(2)}, "extra": RunsCode(trace)}, kind.partition(" ")
    if how == "raw":
        path.write_bytes(pickle.dumps(content, protocol=int(protocol)))
    else:
        torch.save(
            content, path, pickle_protocol=int(protocol or 2), _use_new_zipfile_serialization=how == "zip"
        )  # fmt: skip
    error = refusal(path)
    assert f"{path} wants to run code when it is loaded: posix.system" in error.problem
    assert "save_file(model.state_dict()" in error.fix
    assert not trace.exists()
    assert not recwarn.list


def test_a_whole_pickled_model_is_refused_with_the_way_to_convert_it(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pth")
    error = refusal(tmp_path / "model.pth")
    assert "wants to run code when it is loaded: torch.nn.modules.linear.Linear" in error.problem
    assert "state_dict()" in error.fix


def test_tensors_in_a_pickle_that_torch_cannot_read_safely_are_refused_as_such(tmp_path):
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"a": torch.ones(2)}))
    error = refusal(tmp_path / "w.pth")
    assert "wants to run code when it is loaded: torch" in error.problem
    assert "state_dict()" in error.fix


def test_an_archive_with_objects_is_refused(tmp_path):
    np.savez(tmp_path / "w.npz", a=np.array([{}], dtype=object))
    assert "arrays of Python objects: to load them, code in the file would run" in refusal(tmp_path / "w.npz").problem


def test_a_checkpoint_without_a_state_dict_says_what_it_holds(tmp_path):
    torch.save({"epoch": 3, "optimizer": {"lr": 1.0}}, tmp_path / "w.pth")
    assert "holds no state dict, only: epoch, optimizer" in refusal(tmp_path / "w.pth").problem
    torch.save([1, 2], tmp_path / "w.pth")
    assert "holds a list" in refusal(tmp_path / "w.pth").problem


def test_missing_files_and_folders(tmp_path):
    assert "there is no weight file" in refusal(tmp_path / "none.pth").problem
    assert "holds no model.safetensors or pytorch_model.bin" in refusal(tmp_path).problem


def test_the_averaged_weights_are_preferred_and_said(tmp_path):
    torch.save({"model": {"a": torch.zeros(1)}, "model_ema": {"a": torch.ones(1)}}, tmp_path / "w.pth")
    said = []
    assert read(tmp_path / "w.pth", said.append)["a"] == 1
    assert "took the weights under 'model_ema'" in said[0]
    assert "it also holds model" in said[0]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_assigned_weights_keep_the_modules_type_and_training_never_writes_to_the_file(tmp_path, name):
    path, module = tmp_path / name, torch.nn.Linear(3, 2).double()
    state = {"weight": torch.ones(2, 3), "bias": torch.ones(2, dtype=torch.float64)}
    save_file(state, path) if name.endswith(".safetensors") else torch.save(state, path)
    content = path.read_bytes()
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 2)
    for target, expected in ((module, torch.float64), (empty, torch.float32)):
        assign(target, read(path, lambda _: None))
        target(torch.ones(3, dtype=expected)).sum().backward()
        torch.optim.SGD(target.parameters(), lr=1.0).step()
        assert target.weight.dtype == target.bias.dtype == expected
        assert (target.weight == 0).all()
    assert path.read_bytes() == content
