"""Finished stages on disk: fingerprinted, written whole or not at all, found again instead of redone.

runs/NAME/STAGE/            a finished stage: its files and stage.json; never changed again
runs/NAME/STAGE.partial/    a stage being written; a killed one goes on from here
runs/NAME/superseded/       stages, finished or not, whose settings have since changed; found again when they change back
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.progress import say

RECIPE = "recipe.yaml"
ELSEWHERE = "give another folder with --out, or delete this one"
RECORD = "stage.json"
PLAN = "plan.json"
RECORDED_PACKAGES = (
    "vit-edge", "torch", "torchvision", "timm", "torchao", "accelerate", "onnx", "onnxscript", "onnxruntime", "openvino",
    "tensorrt", "tensorrt-rtx-cu13-bindings", "numpy", "pillow",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """All that decides a stage's result.

    stage: "student", or "export/openvino" for one of a target's. version: counts changes of the stage's own code
    that change its result. config: its settings as plain JSON data. inputs: name → fingerprint of each stage that it
    reads. data: the data's fingerprint where it reads any. versions: packages or devices that decide the result.
    """

    stage: str
    version: int
    config: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)
    data: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the plan's canonical JSON."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()


class RunFolder:
    """One run: finds, begins and finishes its stages."""

    def __init__(self, folder: Path):
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run for this process; UserError that names the holder when another process has it."""
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        holder = self.folder / ".lock-holder"
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as err:
            who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
            raise UserError(
                f"the run folder {self.folder} is in use by {who}",
                "wait until it ends, or give another folder with --out",
            ) from err
        try:
            since = time.strftime("%H:%M:%S")
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}", encoding="utf-8")
            yield
        finally:
            holder.unlink(missing_ok=True)
            lock.release()

    def find(self, plan: Plan) -> Path | None:
        """The finished stage with this plan's fingerprint, back from the superseded ones if need be; or None."""
        current = self.folder / plan.stage
        if self._is_whole(current, plan):
            return current
        kept = self._superseded(plan.stage, plan.fingerprint)
        if not self._is_whole(kept, plan):
            return None
        self._supersede(current)
        current.parent.mkdir(parents=True, exist_ok=True)
        kept.rename(current)
        return current

    def claim(self, name: str) -> None:
        """Refuses a folder that holds the work of a recipe with another name, or that is no run and not empty."""
        if not self.folder.is_dir():
            return
        recipe = self.folder / RECIPE
        found = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith(".lock"))
        if found and not recipe.is_file():
            raise UserError(f"{self.folder} is not empty and no run: it holds {', '.join(found[:3])}", ELSEWHERE)
        if not found or not self._holds_work():
            return
        from vit_edge import yaml_text

        values = yaml_text.read(recipe)
        other = values.get("name") if isinstance(values, dict) else None
        if other != name:
            raise UserError(f"{self.folder} holds the run {other!r}, not {name!r}", ELSEWHERE)

    def begin(self, plan: Plan) -> Path:
        """The folder to write the stage into: empty, or with what a killed attempt of the very same plan left.

        What an attempt of another plan left is kept until its settings come back, and said.
        """
        partial = self._partial(plan)
        if _read_json(partial / PLAN).get("fingerprint") == plan.fingerprint:
            return partial
        self._put_aside(plan.stage, partial)
        kept = self._superseded(plan.stage, f"{plan.fingerprint}.partial")
        if (kept / PLAN).is_file():
            partial.parent.mkdir(parents=True, exist_ok=True)
            kept.rename(partial)
            say(f"{plan.stage}: its settings are back, so it goes on from where it was stopped with them")
        else:
            partial.mkdir(parents=True)
            write_json(partial / PLAN, {"fingerprint": plan.fingerprint})
        return partial

    def finish(self, plan: Plan, metrics: dict[str, Any], seconds: float) -> Path:
        """Records the stage and moves it into place with one rename; returns its folder."""
        partial = self._partial(plan)
        (partial / PLAN).unlink()
        files = {
            p.relative_to(partial).as_posix(): digest_and_size(p) for p in sorted(partial.rglob("*")) if p.is_file()
        }
        record = {
            "schema": "vit-edge/stage/1",
            "fingerprint": plan.fingerprint,
            **asdict(plan),
            "files": files,
            "recorded_versions": installed_versions(),
            "machine": {
                "platform": platform.platform(),
                "processor": processor_name(),
                "python": platform.python_version(),
            },
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds, 2),
            "metrics": metrics,
            "command": " ".join(sys.argv),
        }
        write_json(partial / RECORD, record)
        current = self.folder / plan.stage
        self._supersede(current)
        partial.rename(current)
        return current

    def record(self, stage: str) -> dict[str, Any]:
        """What stage.json says of a finished stage; empty when there is none."""
        return _read_json(self.folder / stage / RECORD)

    def _partial(self, plan: Plan) -> Path:
        return self.folder / f"{plan.stage}.partial"

    def _superseded(self, stage: str, fingerprint: str) -> Path:
        return self.folder / "superseded" / f"{stage.replace('/', '-')}-{fingerprint}"

    def _holds_work(self) -> bool:
        """Whether a stage is finished, or has got further than its beginning."""
        written = (path for partial in self.folder.rglob("*.partial") for path in partial.rglob("*"))
        return any(self.folder.rglob(RECORD)) or any(path.name != PLAN for path in written)

    def _put_aside(self, stage: str, partial: Path) -> None:
        """Keeps an unfinished stage under the fingerprint of its own plan; one that has only begun is deleted."""
        own = _read_json(partial / PLAN).get("fingerprint")
        if own is None or all(path.name == PLAN for path in partial.iterdir()):
            shutil.rmtree(partial, ignore_errors=True)
            return
        kept = self._superseded(stage, f"{own}.partial")
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(kept)
        say(
            f"{stage}: begun with other settings, and starts anew; what was done is kept and goes on if they change back"
        )

    def _supersede(self, current: Path) -> None:
        if not current.exists():
            return
        stage = current.relative_to(self.folder).as_posix()
        kept = self._superseded(stage, _read_json(current / RECORD).get("fingerprint", "unreadable"))
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        current.rename(kept)

    @staticmethod
    def _is_whole(folder: Path, plan: Plan) -> bool:
        """Whether the folder holds the finished stage with every file at its recorded size."""
        record = _read_json(folder / RECORD)
        if record.get("fingerprint") != plan.fingerprint:
            return False
        return all(_size(folder / name) == entry["size_bytes"] for name, entry in record["files"].items())


def verify(stage_folder: Path) -> None:
    """Checks every file of a finished stage against its recorded SHA-256; UserError names the first that differs."""
    for name, entry in _read_json(stage_folder / RECORD).get("files", {}).items():
        path = stage_folder / name
        if not path.exists() or digest_and_size(path) != entry:
            raise UserError(
                f"{path} is not the file that the stage wrote: missing, or its SHA-256 differs",
                f"delete {stage_folder} and run again",
            )


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def write_json(path: Path, value: Any) -> None:
    """Writes `value` readable, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def digest_and_size(path: Path) -> dict[str, Any]:
    """{"sha256": 64 hex digits, "size_bytes": int} of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"sha256": digest.hexdigest(), "size_bytes": path.stat().st_size}


def versions(*packages: str) -> dict[str, str]:
    """Installed version of each package, "not installed" for one that is missing; imports none of them."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def installed_versions() -> dict[str, str]:
    """The versions of what vit-edge works with, as far as it is installed."""
    return {name: version for name, version in versions(*RECORDED_PACKAGES).items() if version != "not installed"}


def nvidia_driver() -> str:
    """The kernel module's version line; "none" where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return "none"


def processor_name() -> str:
    """The CPU's name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
