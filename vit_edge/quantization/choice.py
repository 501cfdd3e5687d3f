"""The int8 model that answers most like float on calibration images that nothing was fitted to.

From the plainest on, each step is kept where it brings the logits closer: bias correction, equalization, the choice of
ranges, error-compensated rounding. Biases come first, since correcting them makes up for much of what equalization does.
Where the model is still far from float with the ranges of all images, the costliest tensors are clipped by the answers
(clipping.py), after which corrected biases may help. N images, K classes.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch.fx import GraphModule, Node

from vit_edge import memory, metrics
from vit_edge.quantization import calibration, clipping, equalization, layerwise, outputs
from vit_edge.quantization.calibration import Observed
from vit_edge.quantization.layerwise import Options, Outcome
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.quantization.work import multiply_adds
from vit_edge.recipe import Int8Config

T = TypeVar("T")
GAIN = 0.97
"""A step is kept when it leaves at most this share of the KL divergence from float."""
FEWEST, MOST = 32, 256
FAR = 0.02
"""KL from float above which costly tensors are clipped by the answers themselves, which takes longer (clipping.py)."""
FAR_BESIDE = 1.5  # times as far with outputs of convolutions in uint8 as without
CLIPPED_AGAIN = 3  # at most: those that cost little beside others come to light when the others are mended
BIASES = "bias correction"
WORK, VALUES = 32e9, 1 << 27
"""Images that a trial is fitted to: as many as so many multiply-adds are enough for and the largest tensor holds so many
values of, within bounds. It is judged on twice as many, MOST at most. Fewer than a hundred are too few for the biases of a
convolutional network, whose last maps have few places."""


@dataclass(frozen=True)
class Chosen:
    """floats: the equalized graph. on_grid: the same with weights on int8's grid and its biases. alphas by product.

    fit_NHWC, held_NHWC: images that it was fitted to and judged on; observed: statistics of all calibration images, means
    of the former; float_NK: the float graph's logits of the latter, kl: the int8 model's divergence from them.
    """

    floats: GraphModule
    on_grid: GraphModule
    outcome: Outcome
    options: Options
    alphas: dict[str, float]
    observed: Observed
    fit_NHWC: np.ndarray
    held_NHWC: np.ndarray
    float_NK: np.ndarray
    kl: float
    float_layers: tuple[str, ...] = ()

    def divergence(self, with_outputs: bool) -> float:
        """KL from float; with_outputs: where outputs of convolutions are uint8 as well (outputs.py)."""
        run = Simulation(self.on_grid, self.outcome, self.float_layers, with_outputs).run
        return metrics.mean_kl(self.float_NK, logits(run, self.held_NHWC))


@memory.kept()
@torch.no_grad()
def choose(
    graph_module: GraphModule, images_NHWC: np.ndarray, config: Int8Config, say: Callable[[str], None],
    symmetric: bool = False,
) -> Chosen:  # fmt: skip
    """Chooses on a part of the images, then takes the ranges from all of them; says in a line each what was chosen.

    symmetric: for a runtime without finer steps (Range.finer). `graph_module` is not changed.
    """
    half = len(images_NHWC) // 2
    count = max(1, min(images_tried(graph_module, images_NHWC[:1]), half))
    fit_NHWC, held_NHWC = images_NHWC[:count], images_NHWC[half : half + min(2 * count, MOST)]
    trial = _Trial(graph_module, fit_NHWC, held_NHWC, config, symmetric)
    best = trial.plain()
    if config.bias_correction != "never":
        best = trial.changed(best, {"correct_bias": True}, BIASES, config, say)
    best = trial.equalized(best, say)
    if config.ranges in ("auto", "output"):
        best = trial.changed(best, {"method": "output"}, "each tensor's range by the outputs that read it", config, say)
    if config.rounding != "nearest":
        best = trial.changed(best, {"compensate": True}, "error-compensated rounding", config, say)
    observed = replace(calibration.observe(best.floats, images_NHWC), means=best.observed.means)
    undecided = Chosen(
        best.floats, best.floats, Outcome(), best.options, best.alphas, observed, fit_NHWC, held_NHWC, trial.float_NK,
        np.inf,
    )  # fmt: skip
    chosen = with_float(undecided, config.float_layers)
    if config.ranges != "auto":
        return chosen
    return _clipped(chosen, config, say) if chosen.kl > FAR else chosen


@memory.kept()
@torch.no_grad()
def with_float(chosen: Chosen, float_layers: Collection[str]) -> Chosen:
    """The same choice with these layers, and no others, in float: what is int8 is rounded and corrected anew."""
    on_grid = copy.deepcopy(chosen.floats)
    images = torch.from_numpy(chosen.fit_NHWC.copy())
    outcome = layerwise.decide(on_grid, images, chosen.observed, chosen.options, float_layers)
    return judged(replace(chosen, on_grid=on_grid, outcome=outcome, float_layers=tuple(float_layers)))


def judged(chosen: Chosen) -> Chosen:
    """With the divergence that it has now."""
    return replace(chosen, kl=chosen.divergence(with_outputs=False))


def _clipped(chosen: Chosen, config: Int8Config, say: Callable[[str], None]) -> Chosen:
    """The choice with its costliest tensors clipped by the answers, and biases corrected then, as far as each helps."""
    for _ in range(CLIPPED_AGAIN):
        limits = clipping.input_limits(
            chosen.floats, chosen.on_grid, chosen.outcome, chosen.observed.statistics, chosen.fit_NHWC
        )
        before, words = chosen, f"{len(limits)} costly tensors clipped by the answers"
        if limits:
            chosen = _with(chosen, {"limits": {**chosen.options.limits, **limits}}, words, say)
        if chosen is before or chosen.kl <= FAR:
            break
    if config.bias_correction == "never" or chosen.options.correct_bias:
        return chosen
    return _with(chosen, {"correct_bias": True}, BIASES, say)


@memory.kept()
@torch.no_grad()
def outputs_clipped(chosen: Chosen, config: Int8Config, say: Callable[[str], None]) -> Chosen:
    """The choice with outputs of convolutions clipped by the answers, where a runtime that has them in uint8 is far off."""
    if config.ranges != "auto" or not outputs.written(chosen.floats, chosen.float_layers):
        return chosen
    before = chosen.divergence(with_outputs=True)
    if before <= max(FAR, FAR_BESIDE * chosen.kl):
        return chosen
    limits = clipping.output_limits(
        chosen.floats, chosen.outcome, chosen.observed.statistics, chosen.fit_NHWC, chosen.float_layers
    )
    if not limits:
        return chosen
    options = replace(chosen.options, limits={**chosen.options.limits, **limits})
    found = with_float(replace(chosen, options=options), chosen.float_layers)
    after = found.divergence(with_outputs=True)
    _tell(say, f"{len(limits)} outputs of convolutions clipped by the answers", after < before, after, before)
    return found if after < before else chosen


def _with(chosen: Chosen, changes: dict[str, object], words: str, say: Callable[[str], None]) -> Chosen:
    options = replace(chosen.options, **changes)  # type: ignore[arg-type]
    found = with_float(replace(chosen, options=options), chosen.float_layers)
    kept = found.kl <= GAIN * chosen.kl
    _tell(say, words, kept, found.kl, chosen.kl)
    return found if kept else chosen


def images_tried(graph_module: GraphModule, image_1HWC: np.ndarray) -> int:
    """How many images a trial is fitted to, as memory and time allow."""
    sizes = (node.meta["val"].shape[1:].numel() for node in graph_module.graph.nodes if _has_batch(node))
    work = sum(multiply_adds(graph_module, image_1HWC).values())
    return max(FEWEST, min(MOST, VALUES // max(sizes), int(WORK / work)))


@dataclass(frozen=True)
class _Candidate:
    floats: GraphModule
    observed: Observed
    options: Options
    alphas: dict[str, float]
    kl: float


class _Trial:
    def __init__(
        self, graph_module: GraphModule, fit_NHWC: np.ndarray, held_NHWC: np.ndarray, config: Int8Config, symmetric: bool
    ):  # fmt: skip
        self.graph_module, self.fit_NHWC, self.held_NHWC = graph_module, fit_NHWC, held_NHWC
        self.float_layers = config.float_layers
        self.float_NK = logits(graph_module, held_NHWC)
        method = "mse" if config.ranges in ("auto", "output") else config.ranges
        self.options = Options(method, symmetric=symmetric)
        self.strengths = config.equalization

    def plain(self) -> _Candidate:
        return self._candidate(self.graph_module, {}, self.options)

    def equalized(self, before: _Candidate, say: Callable[[str], None]) -> _Candidate:
        """The best strength, none included; a divergence that grows with one step of strength grows with the next too."""
        groups = equalization.groups(self.graph_module, self.float_layers)
        if not groups or not self.strengths:
            return before
        largest = equalization.largest_inputs(self.graph_module, groups, self.fit_NHWC)

        def with_strength(alpha: float) -> _Candidate:
            graph = copy.deepcopy(self.graph_module)
            equalization.equalize(graph, largest, alpha, self.float_layers)
            return self._candidate(graph, {r.name: alpha for g in groups for r in g.readers}, before.options)

        found = _downhill(sorted(self.strengths), with_strength, lambda candidate: candidate.kl)
        best = found if found.kl < GAIN * before.kl else before
        chosen = next(iter(best.alphas.values()), None)
        told = "none" if chosen is None else f"α = {chosen:g}"
        say(f"int8: equalization: {told} (KL from float {best.kl:.3g}, {before.kl:.3g} without)")
        return best

    def changed(
        self, before: _Candidate, changes: dict[str, object], words: str, config: Int8Config, say: Callable[[str], None]
    ) -> _Candidate:
        """The candidate with other options where that is better, or where the recipe asks for it."""
        options = replace(before.options, **changes)  # type: ignore[arg-type]
        found = replace(before, options=options, kl=self._kl(before.floats, before.observed, options))
        kept = _asked(config, changes) or found.kl <= GAIN * before.kl
        _tell(say, words, kept, found.kl, before.kl)
        return found if kept else before

    def _candidate(self, graph: GraphModule, alphas: dict[str, float], options: Options) -> _Candidate:
        observed = calibration.observe(graph, self.fit_NHWC)
        return _Candidate(graph, observed, options, alphas, self._kl(graph, observed, options))

    def _kl(self, graph: GraphModule, observed: Observed, options: Options) -> float:
        target = copy.deepcopy(graph)
        images = torch.from_numpy(self.fit_NHWC.copy())
        outcome = layerwise.decide(target, images, observed, options, self.float_layers)
        simulation = Simulation(target, outcome, self.float_layers)
        return metrics.mean_kl(self.float_NK, logits(simulation.run, self.held_NHWC))


def _downhill(values: Sequence[float], made: Callable[[float], T], cost: Callable[[T], float]) -> T:
    """The cheapest of what is made of ordered values, from the middle on for as long as it gets cheaper, down or else up."""
    middle = len(values) // 2
    best = first = made(values[middle])
    for side in (reversed(values[:middle]), values[middle + 1 :]):
        for value in side:
            found = made(value)
            if cost(found) >= cost(best):
                break
            best = found
        if best is not first:
            break
    return best


def _asked(config: Int8Config, changes: dict[str, object]) -> bool:
    asked = {
        "method": config.ranges == "output",
        "correct_bias": config.bias_correction == "always",
        "compensate": config.rounding == "compensated",
    }
    return all(asked[name] for name in changes)


def _tell(say: Callable[[str], None], words: str, kept: bool, kl: float, before: float) -> None:
    say(f"int8: {words}: {'yes' if kept else 'no'} (KL from float {kl:.3g} with, {before:.3g} without)")


def _has_batch(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim > 1 and isinstance(value.shape[0], torch.SymInt)
