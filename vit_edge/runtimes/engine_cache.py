"""Engines that this machine built itself, kept for the GPU, driver and library that they were built with.

KEY.plan      an engine; deserialising one runs what is in it, so none is taken that KEY.json does not vouch for
KEY.json      what it was built from and for, its SHA-256, and what a session must know of its network
*.timings     the kernels' times for one GPU, driver and library: the next engine builds faster
*.lock        held while one is built; another process waits

The folder is the user's own: one that others can write to is refused.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.runtimes.base import imported
from vit_edge.store import digest_and_size

FOLDER = Path.home() / ".cache" / "vit-edge" / "engines"


@dataclass(frozen=True)
class Wanted:
    """All that an engine depends on. gpu: cuda.describe; batches: fewest, tuned for, most images at once."""

    onnx_sha256: str
    gpu: Mapping[str, str]
    package: str
    version: str
    batches: tuple[int, int, int]
    unfused: bool

    @property
    def key(self) -> str:
        return _digest(asdict(self))

    @property
    def timings_key(self) -> str:
        """Times are the same for every graph."""
        return _digest([dict(self.gpu), self.package, self.version])


@dataclass(frozen=True)
class Engine:
    """Its bytes, and `tensorrt_build.Build.record` of its network."""

    plan: bytes
    record: Mapping[str, Any]


def engine(wanted: Wanted, build: Callable[[Path, Path], Mapping[str, Any]], folder: Path = FOLDER) -> Engine:
    """The engine from the cache, or what `build` makes: it writes a plan, keeps the timings, and returns the record."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(folder)
    plan, timings = folder / f"{wanted.key}.plan", folder / f"{wanted.timings_key}.timings"
    with imported("filelock", "tensorrt").FileLock(plan.with_suffix(".lock")):
        found = _read(plan, wanted)
        if found is not None:
            return found
        new = plan.with_suffix(".new")
        record = build(new, timings)
        content = new.read_bytes()
        told = {"wanted": asdict(wanted), "sha256": hashlib.sha256(content).hexdigest(), "record": dict(record)}
        plan.with_suffix(".json").write_text(json.dumps(told), encoding="utf-8")
        new.replace(plan)
        return Engine(content, record)


def wanted_for(
    onnx_path: Path, gpu: Mapping[str, str], library: Any, batches: tuple[int, int, int], *, unfused: bool
) -> Wanted:
    digest = str(digest_and_size(onnx_path)["sha256"])
    return Wanted(digest, gpu, library.__name__, library.__version__, batches, unfused)


def _read(plan: Path, wanted: Wanted) -> Engine | None:
    """None unless the plan is whole, and was built here from and for the very same."""
    try:
        told, content = json.loads(plan.with_suffix(".json").read_text(encoding="utf-8")), plan.read_bytes()
        same = _digest(told["wanted"]) == wanted.key and told["sha256"] == hashlib.sha256(content).hexdigest()
        return Engine(content, told["record"]) if same else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"the engine cache {folder} belongs to another user or can be written by others; engines are executable",
            f"remove it, or: chown $USER {folder} && chmod 700 {folder}",
        )


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
