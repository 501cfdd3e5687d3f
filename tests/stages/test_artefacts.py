"""Sessions whose runtime computes wrong answers in a fused way, and right ones without: a runtime in numpy."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_model import TinyModel, digits
from vit_edge import target
from vit_edge.runtimes.base import Coverage, Probe
from vit_edge.stages.artefacts import Known, Opened, Source, closer
from vit_edge.target import Target

IMAGES = digits()[0][1200:1216]


class Numpy:
    """The tiny model; wrong[options] is what the logits are multiplied by."""

    name = "numpy"

    def __init__(self, model: TinyModel, wrong: Mapping[str, float]):
        self.model, self.wrong, self.opened = model, wrong, 0

    def probe(self) -> Probe:
        return Probe(self.name, np.__version__)

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        return ("f32",)

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        return []

    def careful(self, options: Mapping[str, str]) -> dict[str, str] | None:
        return None if options else {"attention": "unfused"}

    def open(self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None) -> "NumpySession":
        self.opened += 1
        return NumpySession(self.model, self.wrong["unfused" if options else "fused"])


class NumpySession:
    def __init__(self, model: TinyModel, factor: float):
        self.model, self.factor = model, factor

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        return (self.model.logits(images_BHWC) * self.factor).astype(np.float32)

    def coverage(self) -> Coverage:
        return Coverage(())

    def describe(self) -> dict[str, Any]:
        return {"runtime": "numpy", "precision": "f32"}

    def __enter__(self) -> "NumpySession":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("precision", "fused", "unfused", "expected", "opened"),
    [
        ("fp16", 1.001, 1.0, "fused", 1),
        ("fp16", -1.0, 1.001, "unfused", 2),
        ("fp16", np.nan, 1.001, "unfused", 2),
        ("fp16", np.nan, np.nan, "fused", 2),
        ("fp16", 1.3, 1.29, "fused", 2),  # int8 that is bad in itself
        ("f32", 1.01, 1.0, "unfused", 2),
    ],
)
def test_what_answers_wrong_is_opened_without_its_fusions_where_that_mends_it(
    tiny: TinyModel, precision: str, fused: float, unfused: float, expected: str, opened: int
) -> None:
    runtime = Numpy(tiny, {"fused": fused, "unfused": unfused})
    source = Source(runtime, [], target.load("tensorrt"), {})
    known = Known(IMAGES, tiny.logits(IMAGES))
    with ExitStack() as stack:
        one = Opened(precision, precision, source, source.open(), 0.0, 0.0, None)
        found = closer(stack, one, IMAGES[:1], known)
    assert ("unfused" if found.source.options else "fused") == expected
    assert found.name == precision
    assert runtime.opened == opened


def test_what_has_no_fusions_left_to_leave_out_is_opened_once(tiny: TinyModel) -> None:
    runtime = Numpy(tiny, {"unfused": -1.0})
    source = Source(runtime, [], target.load("tensorrt"), {"attention": "unfused"})
    with ExitStack() as stack:
        one = Opened("fp16", "fp16", source, source.open(), 0.0, 0.0, None)
        assert closer(stack, one, IMAGES[:1], Known(IMAGES, tiny.logits(IMAGES))) is one
    assert runtime.opened == 1
