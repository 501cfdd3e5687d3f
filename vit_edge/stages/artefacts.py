"""A bundle's artefacts as sessions on this device: int8 first, then each float one in each precision that it has.

B images of a batch, N images of the evaluation, H×W pixels, C = 3 channels, K classes.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vit_edge import metrics
from vit_edge.bundle import Bundle
from vit_edge.errors import UserError
from vit_edge.evaluation import Evaluation
from vit_edge.progress import say
from vit_edge.runtimes import machine
from vit_edge.runtimes.base import Cautious, Runtime, Session
from vit_edge.target import Target

TIMED_BATCHES = 64
# Answers nearer to the reference's than so are no sign of a wrong fusion; one that is left out must bring so much.
SOUND_DB, SOUND_F32_DB, GAIN_DB = 20.0, 50.0, 3.0


@dataclass(frozen=True)
class Source:
    """What a session is opened from."""

    runtime: Runtime
    files: list[Path]
    target: Target
    options: Mapping[str, str]

    def open(self, **changes: int) -> Session:
        """A session, with fields of the target changed: threads, batch."""
        return self.runtime.open(self.files, self.target.model_copy(update=changes), self.options)


@dataclass(frozen=True)
class Opened:
    """An artefact ready to run. precision: of its floats; load_ms: from files to session; first_ms: of the first query.

    memory_bytes: the most that opening and the first query took, null where the system does not tell; the one that is
    opened first starts the runtime too.
    """

    name: str
    precision: str
    source: Source
    session: Session
    load_ms: float
    first_ms: float
    memory_bytes: int | None

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.source.files)


@dataclass(frozen=True)
class Known:
    """Images as the graph takes them, and the reference's logits of them."""

    images_NHWC: np.ndarray
    logits_NK: np.ndarray

    def sqnr_db(self, session: Session) -> float:
        """Of a session's answers to the reference's; minus infinity for answers that are no numbers."""
        found_NK = session.run(self.images_NHWC)
        return metrics.sqnr_db(self.logits_NK, found_NK) if np.isfinite(found_NK).all() else -np.inf


def open_sessions(
    stack: ExitStack, opened: Bundle, runtime: Runtime, images_BHWC: np.ndarray, *, floats: bool = True,
    known: Known | None = None,
) -> list[Opened]:  # fmt: skip
    """Sessions of the bundle's artefacts, each with its first query on uint8 `images_BHWC` behind it.

    known: what to find wrong fusions by, where the runtime can do without them.
    """
    target, options = opened.manifest.target, opened.manifest.session_options
    source = Source(runtime, int8_files(opened), target, options)
    asked: list[tuple[str, str, Source]] = [("int8", target.precision, source)]
    for graph, files in opened.floats.items() if floats else ():
        for precision in runtime.float_precisions(target) if graph == "f32" else (graph,):
            source = Source(runtime, files, _in_precision(target, graph, precision), options)
            asked.append((precision, precision, source))
    given_B = graph_input(opened)(images_BHWC)
    sessions = [_open(stack, *one, given_B) for one in asked]
    return sessions if known is None else [closer(stack, one, given_B, known) for one in sessions]


def closer(stack: ExitStack, one: Opened, given_B: np.ndarray, known: Known) -> Opened:
    """The artefact, or the same without its runtime's fusions, where its answers are off and are not without them."""
    runtime = one.source.runtime
    options = runtime.careful(one.source.options) if isinstance(runtime, Cautious) else None
    if options is None:
        return one
    before_db = known.sqnr_db(one.session)
    if before_db >= (SOUND_F32_DB if one.name == "f32" else SOUND_DB):
        return one
    say(f"{one.name}: answers are far from the reference's ({before_db:.0f} dB), tried again with {options}")
    other = _open(stack, one.name, one.precision, replace(one.source, options=options), given_B)
    return other if known.sqnr_db(other.session) > before_db + GAIN_DB else one


def int8_files(opened: Bundle) -> list[Path]:
    """Those for this processor: with weights of seven bits where eight would saturate and the bundle brings them."""
    return opened.reduced if opened.reduced and _saturates(opened) else opened.int8


def int8_variant(opened: Bundle) -> str | None:
    """What is to be said of the choice, null where there was none to make."""
    if not _saturates(opened):
        return None
    if opened.reduced:
        return "this processor has no VNNI: int8 with weights of seven bits"
    return "this processor has no VNNI: sums of int8 products may saturate; set reduced_range: true in the target's profile, and export again"


def _saturates(opened: Bundle) -> bool:
    return opened.manifest.target.device == "CPU" and machine.int8_saturates()


def timed_batches(opened: Bundle, images: Evaluation, batch: int) -> list[np.ndarray]:
    """Up to TIMED_BATCHES batches of different images, as the graph takes them, in memory."""
    count = max(1, min(TIMED_BATCHES, len(images.labels_N) // batch))
    feed = graph_input(opened)
    return [
        feed(images.images_NHWC[np.arange(i * batch, (i + 1) * batch) % len(images.labels_N)]) for i in range(count)
    ]


def graph_input(opened: Bundle) -> Callable[[np.ndarray], np.ndarray]:
    """What turns uint8 (B, H, W, 3) images into the graph's input: nothing, or normalisation to float (B, 3, H, W)."""
    if opened.manifest.input_layout == "uint8-nhwc":
        return np.ascontiguousarray
    preprocessing = opened.manifest.preprocessing
    mean_C, std_C = (np.asarray(triple, np.float32) for triple in (preprocessing.mean, preprocessing.std))
    return lambda images_BHWC: np.ascontiguousarray(
        ((images_BHWC.astype(np.float32) / 255 - mean_C) / std_C).transpose(0, 3, 1, 2)
    )


def check_logits(found: np.ndarray, shape: tuple[int, int], name: str) -> None:
    if found.shape != shape or found.dtype != np.float32:
        raise UserError(
            f"the {name} graph gives {found.dtype} {found.shape}, expected float32 {shape}: images and classes",
            "export again; the graph's only output must be the logits of the bundle's classes",
        )


def _in_precision(target: Target, graph: str, precision: str) -> Target:
    """The target with its float precision set; a graph that is not f32 carries its precision itself."""
    return target.model_copy(update={"precision": precision if graph == "f32" else "default"})


def _open(stack: ExitStack, name: str, precision: str, source: Source, given_B: np.ndarray) -> Opened:
    held_bytes = machine.restart_peak_memory()
    start = time.perf_counter_ns()
    session = stack.enter_context(source.open())
    loaded = time.perf_counter_ns()
    session.run(given_B)
    ran = time.perf_counter_ns()
    used = precision if precision != "default" else str(session.describe()["precision"])
    memory_bytes = machine.peak_memory_since(held_bytes)
    return Opened(name, used, source, session, (loaded - start) / 1e6, (ran - loaded) / 1e6, memory_bytes)
