"""Weight files of any origin as tensors: safetensors, torch's pickles, NumPy archives. No code in a file is ever run."""

import argparse
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vit_edge.errors import UserError
from vit_edge.models import pickles
from vit_edge.models.card import WEIGHTS

# Where training programs put the state dict in what they save; the averaged weights, which they evaluate, come first.
WRAPPERS = (
    "model_ema", "state_dict_ema", "ema_state_dict", "teacher", "target_encoder",
    "model", "state_dict", "model_state_dict", "module", "net", "network", "student", "encoder",
)  # fmt: skip
IN_FOLDERS = (WEIGHTS, "pytorch_model.bin")
TORN = (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, AttributeError, TypeError, AssertionError)
"""What torch raises for a file that is not whole."""
DOWNLOAD_AGAIN = "download the file again and compare its size with the source's"
TENSORS_ALONE = (
    "where the model was made, save its tensors alone: `from safetensors.torch import save_file; "
    "save_file(model.state_dict(), 'model.safetensors')`, or torch.save(model.state_dict(), 'model.pth')"
)


def read(path: Path, say: Callable[[str], None]) -> dict[str, Tensor]:
    """The named tensors of a weight file, on the CPU and memory-mapped where the format allows it.

    path: a file, or the folder of a saved model. A state dict inside a training checkpoint is found, and said.
    Raises UserError when the file is missing, empty, truncated, no weights at all, or would need code to be run.
    """
    path = _inside(path)
    _refuse_impostors(path)
    if _is_numpy_archive(path):
        return _read_numpy(path)
    if _is_safetensors(path):
        return _read_safetensors(path)
    return _tensors_in(_read_torch(path), path, say)


def assign(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Makes the tensors the module's own parameters and buffers, without a copy where their types agree.

    They may lie in a mapped file, which writing to them never changes. Raises RuntimeError for names or shapes that differ.
    """
    own = module.state_dict()
    fitting = {key: tensor.to(own.get(key, tensor).dtype).contiguous() for key, tensor in tensors.items()}
    module.load_state_dict(fitting, assign=True)


def _inside(path: Path) -> Path:
    if path.is_dir():
        found = [path / name for name in IN_FOLDERS if (path / name).is_file()]
        if not found:
            raise UserError(f"the folder {path} holds no {' or '.join(IN_FOLDERS)}", "give the path of a weight file")
        return found[0]
    if not path.is_file():
        raise UserError(f"there is no weight file {path}", "give the path of an existing file")
    return path


def _refuse_impostors(path: Path) -> None:
    """What downloads leave in the place of weights."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise UserError(f"{path} is empty (0 bytes)", DOWNLOAD_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path} is a Git LFS pointer of {path.stat().st_size} bytes, not the weights",
            "run `git lfs pull` in its repository",
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UserError(
            f"{path} is a web page, not weights", "download the file itself: the link led to a page about it"
        )


def _is_numpy_archive(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return bool(names) and all(name.endswith(".npy") for name in names)


def _is_safetensors(path: Path) -> bool:
    """By its first bytes: the header's length (8 bytes, little endian), then JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    return path.suffix == ".safetensors" or head[8:9] == b"{"


def _read_numpy(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    except ValueError as err:
        if "allow_pickle" not in str(err):
            raise UserError(f"{path} is no archive of plain NumPy arrays: {_one_line(err)}", DOWNLOAD_AGAIN) from err
        raise UserError(
            f"{path} holds arrays of Python objects: to load them, code in the file would run",
            "where it was made, save plain arrays of numbers: numpy.savez('model.npz', **arrays)",
        ) from err
    except (OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as err:
        raise UserError(f"{path} is no archive of plain NumPy arrays: {_one_line(err)}", DOWNLOAD_AGAIN) from err


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as err:
        if called := pickles.calls(path):
            raise _wants_to_run(path, called) from err
        raise UserError(f"{path} is truncated or no safetensors file: {_one_line(err)}", DOWNLOAD_AGAIN) from err


def _read_torch(path: Path) -> Any:
    """What torch.save wrote. Beside tensors and plain containers only argparse.Namespace, which holds plain values
    and runs nothing, may occur: many training programs keep their arguments there."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as err:
        if called := pickles.calls(path):
            raise _wants_to_run(path, called) from err
        raise UserError(f"{path} is truncated or no weight file: {_one_line(err)}", DOWNLOAD_AGAIN) from err
    except TORN as err:
        raise UserError(f"{path} is truncated or no weight file: {_one_line(err)}", DOWNLOAD_AGAIN) from err


def _wants_to_run(path: Path, called: list[str]) -> UserError:
    more = f" (and {len(called) - 1} more)" if len(called) > 1 else ""
    return UserError(f"{path} wants to run code when it is loaded: {called[0]}{more}", TENSORS_ALONE)


def _tensors_in(found: Any, path: Path, say: Callable[[str], None]) -> dict[str, Tensor]:
    """The state dict in a checkpoint, peeled out of its wrappers."""
    if isinstance(found, nn.Module) or not isinstance(found, Mapping):
        raise UserError(f"{path} holds a {type(found).__name__}, expected a state dict", "save model.state_dict()")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if tensors and len(tensors) * 2 > len(found):
        return tensors
    wrapper = next((key for key in WRAPPERS if isinstance(found.get(key), Mapping) and found[key]), None)
    if wrapper is None:
        keys = ", ".join(sorted(map(str, found))[:8]) or "nothing"
        raise UserError(f"{path} holds no state dict, only: {keys}", "save model.state_dict() of the model")
    others = [key for key in WRAPPERS if key != wrapper and isinstance(found.get(key), Mapping)]
    besides = f" (it also holds {', '.join(others)})" if others else ""
    say(f"took the weights under {wrapper!r} in {path}{besides}")
    return _tensors_in(found[wrapper], path, say)


def _one_line(err: Exception) -> str:
    return " ".join(str(err).split()).partition(". ")[0][:200] or type(err).__name__
