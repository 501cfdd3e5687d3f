"""Students that a device is fast enough for: candidates with random weights, in int8, timed there.

B images of a batch, H×W pixels, C = 3 channels.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vit_edge import fitting, latency
from vit_edge.errors import UserError
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.export.lower import lowered
from vit_edge.fitting import Candidate, Line, Trial
from vit_edge.models import origin, sizes, zoo
from vit_edge.models.classifier import Classifier, multiply_adds
from vit_edge.progress import say
from vit_edge.quantization import calibration, quantizer
from vit_edge.quantization.products import products
from vit_edge.recipe import ModelConfig
from vit_edge.runtimes import clock, registry
from vit_edge.runtimes.base import Runtime
from vit_edge.runtimes.clock import Stream
from vit_edge.target import Protocol, Target

Family = Literal["vit", "cnn"]
BASE = "vit_ti16"
DEPTHS = (3, 4, 6, 9, 12)
WIDTHS = (*range(32, 256, 32), *range(256, 1024, 64), *range(1024, 2049, 128))
# Patches to a side, from what enlarged digits have to what ViT/16 has at 224 px.
GRIDS = range(4, 15)
# timm's, by family, smallest first: those whose int8 is proven.
SCALINGS = (
    ("mobilenetv3_small_050", "mobilenetv3_small_075", "mobilenetv3_small_100"),
    ("mobilenetv3_large_075", "mobilenetv3_large_100"),
    ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2", "efficientnet_lite3", "efficientnet_lite4"),
    ("resnet10t", "resnet14t", "resnet18", "resnet26", "resnet34", "resnet50"),
    ("repvit_m0_9", "repvit_m1_0", "repvit_m1_1", "repvit_m1_5", "repvit_m2_3"),
)
CALIBRATED, TIMED = 4, 16  # random images
# A candidate is timed a few times for a moment, and the calmest counts: what disturbs a machine only ever slows.
QUICK, MOMENTS = Protocol(warmup=10, seconds=0.4, min_queries=48, max_queries=600), 3
CONFIRMED, SECONDS_EACH = 3, 1.0


@dataclass(frozen=True)
class Fitted:
    """proposals: those that fit, the largest of each line, largest first, timed again in turn; trials: all, as first timed."""

    proposals: list[Trial]
    trials: list[Trial]
    complete: bool
    runtime: dict[str, Any]


def fit(
    target: Target, max_p90_ms: float, *, family: Family, image_size: int, classes: int, seconds: float
) -> Fitted:  # fmt: skip
    """Searches for about `seconds`. Raises UserError where the target cannot run here, or nothing is fast enough."""
    runtime = registry.load(target.runtime)
    probe = runtime.probe()
    if probe.problem:
        raise UserError(f"{target.name} cannot be timed here: {probe.problem}", probe.fix or "run this on the device")
    runtime.float_precisions(target)  # UserError where its device is another than this
    lines = list(vit_lines(image_size, classes) if family == "vit" else cnn_lines(image_size, classes))
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="vit-edge-") as scratch, ExitStack() as stack:
        bench = _Bench(runtime, target, image_size, classes, Path(scratch))
        say(f"fit: {sum(map(len, lines))} students, p90 of {max_p90_ms:g} ms on {target.name}, up to {seconds:g} s")
        trials = fitting.search(lines, bench.measure, max_p90_ms, lambda: time.monotonic() < until)
        complete = time.monotonic() < until
        fitting_ones = fitting.largest(trials, max_p90_ms)
        if not fitting_ones:
            raise _nothing_fits(trials, max_p90_ms, target, image_size)
        best = _best_of_lines(lines, fitting_ones)[:CONFIRMED]
        again = bench.in_turn(stack, [trial.candidate for trial in best])
    proposals = fitting.largest(again, max_p90_ms) or fitting_ones[-1:]
    return Fitted(proposals, trials, complete, bench.described)


def vit_lines(image_size: int, classes: int) -> Iterator[Line]:
    """Widths that rise, for each depth and patch; shallow ones first, where most is to be had."""
    for depth in DEPTHS:
        for patch in _patches(image_size):
            yield [_vit(depth, patch, width, image_size, classes) for width in WIDTHS]


def cnn_lines(image_size: int, classes: int) -> Iterator[Line]:
    """timm's families of networks that were made to be scaled."""
    for names in SCALINGS:
        yield [_cnn(name, image_size, classes) for name in names]


def _patches(image_size: int) -> list[int]:
    """Sides of the finest patches that tile the image, and of the finest that make at most half as many tokens."""
    grids = [grid for grid in reversed(GRIDS) if image_size % grid == 0]
    if not grids:
        raise UserError(
            f"no patch tiles {image_size} px into {GRIDS[0]} to {GRIDS[-1]} patches a side",
            "give an --image-size such as 32, 64, 96, 128, 160, 192 or 224",
        )
    coarser = [grid for grid in grids if 2 * grid**2 <= grids[0] ** 2]
    return [image_size // grid for grid in (grids[0], *coarser[:1])]


def _vit(depth: int, patch: int, width: int, image_size: int, classes: int) -> Candidate:
    given: dict[str, Any] = {"name": BASE, "patch_size": patch, "width": width, "depth": depth}
    geometry = zoo.vit_config(ModelConfig(**given), classes, image_size)
    settings = given | {"heads": geometry.heads}
    return Candidate(settings, sizes.parameters(geometry), sizes.multiply_adds(geometry))


def _cnn(name: str, image_size: int, classes: int) -> Candidate:
    with torch.device("meta"):
        model = zoo.create(ModelConfig(name=name), classes, image_size)
    return Candidate({"name": name}, sum(p.numel() for p in model.parameters()), multiply_adds(model, image_size))


@dataclass
class _Bench:
    """Makes candidates and times them in the target's runtime, on random images: their weights are random too."""

    runtime: Runtime
    target: Target
    image_size: int
    classes: int
    folder: Path

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (TIMED, self.target.batch, self.image_size, self.image_size, 3)
        self.batches = list(random.integers(0, 256, shape, dtype=np.uint8))
        self.calibration_NHWC = random.integers(
            0, 256, (CALIBRATED, self.image_size, self.image_size, 3), dtype=np.uint8
        )
        self.files: dict[int, list[Path]] = {}
        self.described: dict[str, Any] = {}

    def measure(self, candidate: Candidate) -> Trial:
        started = time.monotonic()
        self.files[id(candidate)] = self._built(candidate, self.folder / str(len(self.files)))
        moments = []
        for _ in range(MOMENTS):
            with ExitStack() as stack:
                moments += self.in_turn(stack, [candidate], QUICK)
        trial = min(moments, key=lambda moment: moment.p90_ms)
        say(f"fit: {words(candidate)}: p90 {trial.p90_ms:.3g} ms ({time.monotonic() - started:.1f} s)")
        return trial

    def in_turn(self, stack: ExitStack, candidates: Sequence[Candidate], how: Protocol | None = None) -> list[Trial]:
        """Candidates that were measured before, timed in turn. how: default: longer than the first time."""
        how = how or QUICK.model_copy(update={"seconds": SECONDS_EACH * len(candidates), "max_queries": 2000})
        sessions = [
            stack.enter_context(self.runtime.open(self.files[id(candidate)], self.target)) for candidate in candidates
        ]
        self.described = sessions[0].describe()
        queries = {str(i): clock.query(session, self.batches) for i, session in enumerate(sessions)}
        streams = clock.interleaved(queries, how)
        return [_trial(candidate, streams[str(i)]) for i, candidate in enumerate(candidates)]

    def _built(self, candidate: Candidate, folder: Path) -> list[Path]:
        """The candidate in int8 as the target's runtime takes it; ranges are plain, which is all that timing needs."""
        config = ModelConfig(**candidate.settings)
        torch.manual_seed(0)
        backbone = zoo.create(config, self.classes, self.image_size)
        graph = deployable(Classifier(backbone, origin.preprocessing(config, self.image_size)).eval())
        weighted = products(graph)
        observed = calibration.observe(graph, self.calibration_NHWC).statistics
        by_node = {node.name: found.range("minmax") for node, found in observed.items()}
        quantized = quantizer.quantize(graph, torch.from_numpy(self.calibration_NHWC[:2]), by_node)
        canonical = onnx.to_onnx(quantized, self.image_size)
        by_value = onnx.ranges_by_value(canonical, weighted, by_node)
        folder.mkdir()
        own = lowered(onnx.with_batch(canonical, self.target.fixed_batch), by_value, self.target.runtime)
        onnx.save(own, folder / "int8.onnx")
        return self.runtime.build(folder / "int8.onnx", self.target, folder / "built")


def words(candidate: Candidate) -> str:
    """A candidate's settings in a line."""
    name, *rest = candidate.settings.items()
    return " ".join([str(name[1]), *(f"{key} {value}" for key, value in rest)])


def _trial(candidate: Candidate, stream: Stream) -> Trial:
    p50_ms, p90_ms = (float(value) for value in np.percentile(stream.latencies_ms, (50, 90)))
    span = latency.span_ms({"int8": stream})
    return Trial(candidate, p50_ms, p90_ms, latency.statistics(stream, span)["p90_noise"])


def _best_of_lines(lines: Sequence[Line], trials: Sequence[Trial]) -> list[Trial]:
    """The largest of each line that has one, largest first."""
    line_of = {id(candidate): number for number, line in enumerate(lines) for candidate in line}
    best: dict[int, Trial] = {}
    for trial in trials:
        best.setdefault(line_of[id(trial.candidate)], trial)
    return list(best.values())


def _nothing_fits(trials: Sequence[Trial], max_p90_ms: float, target: Target, image_size: int) -> UserError:
    fastest = min(trials, key=lambda trial: trial.p90_ms)
    return UserError(
        f"nothing fits into a p90 of {max_p90_ms:g} ms on {target.name}: the fastest, {words(fastest.candidate)} at "
        f"{image_size} px, takes {fastest.p90_ms:.3g} ms ± {fastest.noise:.0%}",
        "give a larger --max-p90-ms, a smaller --image-size, the other --family, or a faster target",
    )
