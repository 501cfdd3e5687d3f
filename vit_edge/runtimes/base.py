"""What a runtime must offer: say what it can run, make its files from ONNX, open them, run images.

B images of a batch, H×W pixels, C = 3 channels, K classes. A new runtime is one module and one line in registry.py.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vit_edge.errors import UserError
from vit_edge.target import Target

# Precision of a product that the runtime does not tell.
UNKNOWN = "unknown"
MAX_SIDE = 4096


@dataclass(frozen=True)
class Probe:
    """What a runtime finds on this machine. `problem` says why it cannot run here and `fix` how to mend that."""

    runtime: str
    version: str | None
    devices: tuple[str, ...] = ()
    float_precisions: tuple[str, ...] = ()
    problem: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class Product:
    """One matrix product or convolution of a compiled graph. names: the ONNX nodes that it came from, as far as known."""

    names: tuple[str, ...]
    kind: str
    precision: str
    multiply_adds: int | None = None

    @property
    def is_int8(self) -> bool:
        return self.precision == "int8"

    @property
    def is_known(self) -> bool:
        return self.precision != UNKNOWN

    def came_from(self, node: str) -> bool:
        """Whether the ONNX node of that name is part of it; runtimes append "/…" to names that they rewrite."""
        return any(name == node or name.startswith(node + "/") for name in self.names)


@dataclass(frozen=True)
class Coverage:
    """The products of the graph that the runtime compiled, with the precision that each really runs in."""

    products: tuple[Product, ...]

    @property
    def int8(self) -> int:
        return sum(product.is_int8 for product in self.products)

    @property
    def floats(self) -> list[Product]:
        return [product for product in self.products if not product.is_int8]

    @property
    def int8_share(self) -> float | None:
        """Share of multiply-adds that run in int8; null when the runtime does not tell every shape."""
        counts = [product.multiply_adds for product in self.products]
        if not counts or None in counts:
            return None
        total = sum(count or 0 for count in counts)
        return sum(p.multiply_adds or 0 for p in self.products if p.is_int8) / total if total else None


class Session(Protocol):
    """A compiled model on a device; a context manager that frees it."""

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        """float32 logits (B, K) of any number of images, as the graph takes them (uint8 NHWC); ready when it returns."""
        ...

    def coverage(self) -> Coverage: ...

    def describe(self) -> dict[str, Any]:
        """Device, threads, batch, precision really used, and all else that the numbers depend on.

        open_batch: whether the target's batch, which the graph leaves open, may be another.
        """
        ...

    def __enter__(self) -> "Session": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Runtime(Protocol):
    name: str

    def probe(self) -> Probe: ...

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        """Precisions that the target's device can run an f32 graph in, "f32" first."""
        ...

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        """Writes the runtime's files of an ONNX model into `folder`, the one to open first."""
        ...

    def open(self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None) -> Session:
        """A session of files that `build` wrote; options: the runtime's own, beside its defaults (bundle.json)."""
        ...


@runtime_checkable
class Provable(Protocol):
    """A runtime that can check its files further than it can run them here."""

    def prove(self, files: Sequence[Path], target: Target) -> str:
        """Says in words what it proved; UserError when the files cannot work."""
        ...


@runtime_checkable
class Cautious(Protocol):
    """A runtime whose fusions have been seen to compute wrong answers, and that can do without them."""

    def careful(self, options: Mapping[str, str]) -> dict[str, str] | None:
        """Session options that leave such fusions out; None when `options` do so already."""
        ...


def imported(module: str, extra: str) -> Any:
    """A runtime's library, or a UserError with the pip command when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        missing = isinstance(err, ModuleNotFoundError) and err.name == module.partition(".")[0]
        problem = "is not installed" if missing else f"cannot be loaded: {err}"
        raise UserError(f"{module} {problem}", f'pip install "vit-edge[{extra}]"') from err


def check_input(path: Path, shapes: Sequence[Sequence[Any]]) -> None:
    """UserError unless the graph has one input, of images: four dimensions, the last three of them fixed.

    shapes: of every input as the runtime states it, an int where a dimension is fixed.
    """
    given = [[size if isinstance(size, int) else "?" for size in shape] for shape in shapes]
    fixed = given[0][1:] if len(given) == 1 else []
    if len(fixed) != 3 or not all(isinstance(size, int) and 0 < size <= MAX_SIDE for size in fixed):
        raise UserError(
            f"{path}: the graph's inputs have the shapes {given}, expected one of images: batch, height, width, channels",
            "export again; only the batch may be open",
        )


def batch_of_graph(dimension: Any, target: Target) -> int:
    """Images that the graph takes at once: its own fixed number, which must be the target's, or the target's.

    dimension: the batch dimension as the runtime states it, an int when it is fixed.
    """
    if isinstance(dimension, int) and dimension > 0 and dimension != target.batch:
        raise UserError(
            f"the graph takes {dimension} images at once, the target {target.name!r} asks for {target.batch}",
            f"set batch: {dimension} in the target, or export for this target",
        )
    return target.batch


def in_batches(images_BHWC: np.ndarray, batch: int) -> Iterator[tuple[np.ndarray, int]]:
    """Contiguous pieces of exactly `batch` images, the last one padded with its last image, and how many are real."""
    for start in range(0, len(images_BHWC), batch):
        piece = np.ascontiguousarray(images_BHWC[start : start + batch])
        real = len(piece)
        if real < batch:
            piece = np.concatenate([piece, np.repeat(piece[-1:], batch - real, axis=0)])
        yield piece, real
