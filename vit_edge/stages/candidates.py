"""Int8 candidates on the recipe's targets: files as an export makes them, timed in turn with the float artefact."""

import copy
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vit_edge import metrics
from vit_edge.export import onnx
from vit_edge.export.lower import lowered
from vit_edge.progress import say
from vit_edge.quantization import quantizer
from vit_edge.quantization.choice import Chosen
from vit_edge.quantization.products import products
from vit_edge.quantization.ranges import Range
from vit_edge.report.quantization import Timed
from vit_edge.runtimes import clock, registry
from vit_edge.runtimes.base import Runtime
from vit_edge.runtimes.clock import Query
from vit_edge.stages.export import built
from vit_edge.target import Target

BATCHES, WARMUP, QUERIES = 16, 5, 24


@dataclass(frozen=True)
class Canonical:
    """The canonical int8 graph, and the ranges by its value names; module: the same in torch; program: as exported."""

    module: nn.Module
    program: torch.onnx.ONNXProgram
    graph: onnx.ir.Model
    ranges: dict[str, Range]


def canonical(chosen: Chosen, image_size: int) -> Canonical:
    """Of a choice, which stays as it is."""
    by_node, example = chosen.outcome.ranges, torch.from_numpy(chosen.fit_NHWC[:2].copy())
    on_grid = copy.deepcopy(chosen.on_grid)
    module = quantizer.quantize(on_grid, example, by_node, chosen.float_layers, chosen.outcome.scales)
    program = onnx.program(module, image_size)
    graph = onnx.clean(program.model)
    return Canonical(module, program, graph, onnx.ranges_by_value(graph, products(chosen.floats), by_node))


@dataclass(frozen=True)
class _Place:
    """A target whose runtime runs here, and a query of the float artefact in each precision that it has."""

    target: Target
    runtime: Runtime
    batches: list[np.ndarray]
    floats: dict[str, Query]


class Bench:
    """Holds the float artefacts open for as long as the stack lives. Targets that cannot run here are left out, and said.

    floats: the float graph, free batch size. images_NHWC: uint8, what queries are made of. seconds: of measuring, for
    each candidate on each target.
    """

    def __init__(
        self, stack: ExitStack, targets: Sequence[Target], floats: onnx.ir.Model, images_NHWC: np.ndarray,
        seconds: float, image_size: int,
    ):  # fmt: skip
        self.seconds, self.image_size = seconds, image_size
        self.places = []
        for target in targets:
            runtime = registry.load(target.runtime)
            if problem := runtime.probe().problem:
                say(f"search: {target.name} is not timed: {problem}")
            else:
                self.places.append(_place(stack, target, runtime, floats, images_NHWC))

    def timed(self, candidate: Chosen) -> list[Timed]:
        """One for each target that runs here."""
        made = canonical(candidate, self.image_size) if self.places else None
        return [_timed(place, made, self.seconds) for place in self.places if made]


def _timed(place: _Place, made: Canonical, seconds: float) -> Timed:
    target = place.target
    protocol = target.protocol.model_copy(
        update={"seconds": seconds, "seconds_each": 0.0, "warmup": WARMUP, "min_queries": QUERIES}
    )
    graph = lowered(onnx.with_batch(made.graph, target.fixed_batch), made.ranges, target.runtime)
    with tempfile.TemporaryDirectory(prefix="vit-edge-") as scratch, ExitStack() as stack:
        files = built(place.runtime, graph, target, Path(scratch))
        session = stack.enter_context(place.runtime.open(files, target))
        queries = {"int8": clock.query(session, place.batches)} | place.floats
        streams = clock.interleaved(queries, protocol)
    p50_ms = {name: metrics.percentiles(stream.latencies_ms)["p50"] for name, stream in streams.items()}
    fastest = min(place.floats, key=lambda name: p50_ms[name])
    return Timed(
        target=target.name, p50_ms=p50_ms["int8"], float_p50_ms=p50_ms[fastest], float_precision=fastest
    )  # fmt: skip


def _place(
    stack: ExitStack, target: Target, runtime: Runtime, floats: onnx.ir.Model, images_NHWC: np.ndarray
) -> _Place:
    count = max(1, min(BATCHES, len(images_NHWC) // target.batch))
    images = [
        images_NHWC[np.arange(i, i + target.batch) % len(images_NHWC)]
        for i in range(0, count * target.batch, target.batch)
    ]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vit-edge-")))
    files = built(runtime, onnx.with_batch(floats, target.fixed_batch), target, folder)
    queries = {}
    for precision in runtime.float_precisions(target):
        session = stack.enter_context(runtime.open(files, target.model_copy(update={"precision": precision})))
        queries[precision] = clock.query(session, images)
    return _Place(target, runtime, images, queries)
