"""Which engines are taken from the cache, and which are built again. Engines are files of bytes here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vit_edge.errors import UserError
from vit_edge.runtimes.engine_cache import Wanted, engine

GPU = {"device": "A GPU", "compute_capability": "8.6", "cuda_driver": "12.4"}
WANTED = Wanted("0" * 64, GPU, "tensorrt", "10.3.0", (1, 1, 1), False)


class Builder:
    """Writes a new engine each time, and counts."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, plan: Path, timings: Path) -> dict[str, Any]:
        self.built += 1
        plan.write_bytes(b"engine %d" % self.built)
        timings.write_bytes(b"times")
        return {"output": "logits", "products": ["head"], "precision": "fp16"}


def test_an_engine_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    first, second = (engine(WANTED, build, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert first.plan == b"engine 1"
    assert first.record["products"] == ["head"]
    assert build.built == 1
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "other",
    [
        replace(WANTED, onnx_sha256="1" * 64),
        replace(WANTED, gpu=GPU | {"cuda_driver": "12.5"}),
        replace(WANTED, gpu=GPU | {"device": "Another"}),
        replace(WANTED, version="10.4.0"),
        replace(WANTED, package="tensorrt_rtx_bindings"),
        replace(WANTED, batches=(1, 1, 32)),
        replace(WANTED, unfused=True),
    ],
)
def test_another_graph_device_version_or_way_to_build_has_its_own(tmp_path: Path, other: Wanted) -> None:
    build = Builder()
    assert engine(WANTED, build, tmp_path).plan != engine(other, build, tmp_path).plan
    assert build.built == 2


def test_timings_are_shared_by_graphs_and_not_by_versions(tmp_path: Path) -> None:
    for wanted in (WANTED, replace(WANTED, onnx_sha256="1" * 64), replace(WANTED, version="11.0.0")):
        engine(wanted, Builder(), tmp_path)
    assert len(list(tmp_path.glob("*.timings"))) == 2


def swap_plan(plan: Path) -> None:
    plan.write_bytes(b"somebody else's")


def drop_record(plan: Path) -> None:
    plan.with_suffix(".json").unlink()


def spoil_record(plan: Path) -> None:
    plan.with_suffix(".json").write_text("[1", encoding="utf-8")


def move_record(plan: Path) -> None:
    """A record of the very same bytes, but for another GPU."""
    told = json.loads(plan.with_suffix(".json").read_text(encoding="utf-8"))
    told["wanted"]["gpu"]["device"] = "Another"
    plan.with_suffix(".json").write_text(json.dumps(told), encoding="utf-8")


@pytest.mark.parametrize("change", [swap_plan, drop_record, spoil_record, move_record, Path.unlink])
def test_what_was_not_built_here_is_never_taken(tmp_path: Path, change: Callable[[Path], None]) -> None:
    build = Builder()
    engine(WANTED, build, tmp_path)
    change(tmp_path / f"{WANTED.key}.plan")
    assert engine(WANTED, build, tmp_path).plan == b"engine 2"
    assert engine(WANTED, build, tmp_path).plan == b"engine 2"


def test_a_build_that_fails_leaves_no_engine(tmp_path: Path) -> None:
    def refuse(plan: Path, timings: Path) -> dict[str, Any]:
        plan.write_bytes(b"half")
        raise UserError("no", "yes")

    with pytest.raises(UserError):
        engine(WANTED, refuse, tmp_path)
    assert engine(WANTED, Builder(), tmp_path).plan == b"engine 1"


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        engine(WANTED, Builder(), tmp_path)
