"""Inside the stage `int8`: holds the int8 model against the limit on the tune split, and where it does not keep it, gives
products back to float until it does: as few and as cheap ones as a budget finds.

search.json    how it went (report/quantization.py)
search.jsonl   while it goes on: a line for the costs and one for each trial, from which a killed search goes on

N images.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from vit_edge import accuracy, metrics
from vit_edge.export import onnx
from vit_edge.inputs import USUAL_DISCORDANCE
from vit_edge.metrics import PairedDrop
from vit_edge.progress import say
from vit_edge.quantization import search, sensitivity
from vit_edge.quantization.choice import Chosen, with_float
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.recipe import Limits, SearchConfig
from vit_edge.report.quantization import SEARCH, Cost, Search, Trial
from vit_edge.runtimes import machine
from vit_edge.stages.candidates import Bench
from vit_edge.stages.trial_log import TrialLog
from vit_edge.store import write_json
from vit_edge.target import Roundings, Target, ways

NOISE = 0.02
"""Share of a latency by which it differs from one session to the next: what is not further apart is as fast."""


@dataclass(frozen=True)
class Ground:
    """What an int8 model is held against. tune: uint8 images (N, H, W, 3) and labels (N,) in pieces, so many at most."""

    tune: Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]
    limits: Limits
    targets: Sequence[Target]

    @property
    def roundings(self) -> Roundings:
        return Roundings.of(self.targets)


def has_limit(config: SearchConfig, ground: Ground) -> bool:
    """Whether anything limits the drop."""
    return any(
        limit is not None
        for limit in (config.max_drop_points, ground.limits.max_drop_points, ground.limits.min_relative_top1)
    )


def reasons(found: Search) -> dict[str, str]:
    """Why each product that was given back is float."""
    alone = {one.name: one.kl_alone for one in found.costs}
    together = sum(alone.values())
    return {
        name: f"given back to float: KL {alone[name]:.3g} of {together:.3g} that all products cost alone"
        for name in found.trials[found.chosen].given_back
    }


def run(folder: Path, chosen: Chosen, config: SearchConfig, ground: Ground, image_size: int) -> tuple[Chosen, Search]:
    """`chosen` where it keeps the limit, else with products in float so that it does; search.json goes into `folder`.

    Where the budget ends before, the best that was found, and search.json says so. folder/float.onnx must be there.
    """
    judge, log = _Judge(chosen, config, ground), TrialLog(folder)
    attempts = _Attempts(chosen, config, judge, log)
    ended = "nothing needs to be given back"
    if not attempts.holds(()):
        say(
            f"search: {_told(attempts.plain, judge)}: looking for what to give back to float, {config.seconds:g} s at most"
        )
        with ExitStack() as stack:
            floats = onnx.load(folder / "float.onnx")
            bench = Bench(stack, ground.targets, floats, chosen.held_NHWC, config.timing_seconds, image_size)
            ended = attempts.searched(bench)
    trials = list(log.trials.values())
    best = _best(trials, attempts.shares)
    found = Search(
        outcome=f"{ended}; {_told(trials[best], judge)}",
        n=judge.n,
        float_top1=judge.float_top1,
        margin_points=judge.margin_points,
        held_by="upper95" if judge.bounds_decide else "drop",
        budget_seconds=config.seconds,
        budget_trials=config.trials,
        seconds=log.seconds,
        costs=log.costs,
        trials=trials,
        chosen=best,
        device=machine.machine(),
    )
    write_json(folder / SEARCH, found.model_dump(mode="json", by_alias=True))
    log.remove()
    say(f"search: {found.outcome}")
    return attempts.candidate(trials[best].given_back), found


class _Judge:
    """Paired drops against the float model on the tune split."""

    def __init__(self, chosen: Chosen, config: SearchConfig, ground: Ground):
        self.pieces = lambda: ground.tune(config.tune_images)
        self.float_right_N = self._right(chosen.floats)
        self.n, self.float_top1 = len(self.float_right_N), float(np.mean(self.float_right_N))
        given = config.max_drop_points
        margin_points = accuracy.margin(ground.limits, self.float_top1) if given is None else given
        assert margin_points is not None
        self.margin_points = margin_points
        needed = metrics.images_needed(USUAL_DISCORDANCE, margin_points)
        self.bounds_decide = needed is not None and self.n >= needed
        self.with_outputs = ground.roundings.outputs > 0
        self.symmetric = ways(ground.roundings.symmetric)

    def drop(self, candidate: Chosen) -> PairedDrop:
        """The largest, of the ways that the targets' runtimes round."""
        drops = []
        for symmetric in self.symmetric:
            outcome = replace(candidate.outcome, symmetric=symmetric)
            with_outputs = self.with_outputs and not symmetric
            run = Simulation(candidate.on_grid, outcome, candidate.float_layers, with_outputs).run
            drops.append(metrics.paired_drop(self.float_right_N, self._right(run)))
        return max(drops, key=lambda drop: drop.points)

    def holds(self, drop: PairedDrop) -> bool:
        """With 95 % confidence; where the images are too few for that, as it is seen, and one image proves nothing."""
        if self.bounds_decide:
            return bool(metrics.within_margin(drop.lost, drop.won, drop.n, self.margin_points))
        return drop.lost - drop.won <= max(1.0, self.margin_points / 100 * drop.n)

    def _right(self, run: Any) -> np.ndarray:
        return np.concatenate([metrics.answers(logits(run, images)) == labels for images, labels in self.pieces()])


class _Attempts:
    """Tries sets of products in float, each once, until the budget is spent; a trial is in the log when it is done."""

    def __init__(self, chosen: Chosen, config: SearchConfig, judge: _Judge, log: TrialLog):
        self.chosen, self.config, self.judge, self.log = chosen, config, judge, log
        self.bench: Bench | None = None
        self.shares: dict[str, float] = {}

    @property
    def plain(self) -> Trial:
        return self.log.trials[frozenset()]

    def searched(self, bench: Bench) -> str:
        """Finds what to give back; in words how that ended."""
        self.bench = bench
        if not self.log.costs:
            self._measure_plain(bench)
        costs = {one.name: sensitivity.Cost(one.kl_alone, one.multiply_adds) for one in self.log.costs}
        self.shares = search.time_shares(costs)
        try:
            order = search.ranked(costs)
            kept = search.fewest(order, self.shares, self.holds, search.halfway(costs, order))
        except search.BudgetSpentError as spent:
            return f"stopped, {spent}"
        return "not even every product in float keeps the limit" if kept is None else "finished"

    def holds(self, given_back: Collection[str]) -> bool:
        found = self.log.trials.get(frozenset(given_back))
        if found is None:
            self._check_budget()
            found = self._tried(list(given_back))
            self.log.add(found)
        return found.holds

    def candidate(self, given_back: Sequence[str]) -> Chosen:
        if not given_back:
            return self.chosen
        return with_float(self.chosen, (*self.chosen.float_layers, *given_back))

    def _measure_plain(self, bench: Bench) -> None:
        """What was left out as long as nothing was searched for: the costs, and the plain model's latency."""
        started = monotonic()
        costs = [
            Cost(name=name, kl_alone=one.kl, multiply_adds=one.multiply_adds)
            for name, one in sensitivity.costs(self.chosen, self.judge.with_outputs).items()
        ]
        self.log.add(self.plain.model_copy(update={"timed": bench.timed(self.chosen)}))
        self.log.add_costs(costs, monotonic() - started)

    def _tried(self, given_back: list[str]) -> Trial:
        started = monotonic()
        candidate = self.candidate(given_back)
        drop = self.judge.drop(candidate)
        return Trial(
            given_back=given_back,
            kl=candidate.kl,
            lost=drop.lost,
            won=drop.won,
            drop_points=drop.points,
            drop_lower95_one_sided=drop.lower95,
            drop_upper95_one_sided=drop.upper95,
            holds=self.judge.holds(drop),
            timed=self.bench.timed(candidate) if self.bench else [],
            seconds=monotonic() - started,
        )

    def _check_budget(self) -> None:
        """Raises BudgetSpentError where another trial has no place in it. The first has one in any case."""
        trials = self.log.trials.values()
        if len(trials) >= self.config.trials:
            raise search.BudgetSpentError(f"its {self.config.trials} trials are spent")
        if trials and self.log.seconds + max(trial.seconds for trial in trials) > self.config.seconds:
            raise search.BudgetSpentError(f"its {self.config.seconds:g} s are spent")


def _best(trials: Sequence[Trial], shares: Mapping[str, float]) -> int:
    """Of those that hold the fastest, of the equally fast the one nearest to float; where none holds, the least drop."""
    holding = [trial for trial in trials if trial.holds]
    if not holding:
        return trials.index(min(trials, key=lambda one: (one.drop_upper95_one_sided, one.kl)))
    times = [one.time_ratio or sum(shares[name] for name in one.given_back) + 1 for one in holding]
    fastest = [one for one, time in zip(holding, times, strict=True) if time <= (1 + NOISE) * min(times)]
    return trials.index(min(fastest, key=lambda one: one.kl))


def _told(trial: Trial, judge: _Judge) -> str:
    """What a model loses, against what it may."""
    sure = f" (95 %: at most {trial.drop_upper95_one_sided:.2f})" if judge.bounds_decide else ""
    few = "" if judge.bounds_decide else ", too few for a bound"
    kept = "keeps" if trial.holds else "does not keep"
    given_back = f" with {len(trial.given_back)} products in float" if trial.given_back else ""
    return (
        f"int8{given_back} {kept} the limit: a drop of {trial.drop_points:.2f} points{sure} on {judge.n} images of the "
        f"tune split{few}, allowed {judge.margin_points:.2f}"
    )
