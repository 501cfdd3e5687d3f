"""The two ways of timing a session: single stream, one query after the other, and offline, as many images as it can.

A query is one call of Session.run with one batch, from numpy array to numpy array, results ready. Batches are of varied
real images. B images of a batch.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from vit_edge.runtimes.base import Session
from vit_edge.target import Protocol

# Runs the query of that number to its end.
Query = Callable[[int], object]

# Queries of one artefact before it is the next one's turn. The first SETTLE of them are not timed: they refill the
# caches, and another runtime's worker threads, which spin for some milliseconds after their own query, come to rest.
TURN = 12
SETTLE = 4
TIMED = TURN - SETTLE

# An artefact is warm when the medians of the last STEADY_TURNS turns lie within STEADY of each other. It is waited for
# up to WARMUP_SHARE of the time to measure.
WARM_TURN, STEADY_TURNS, STEADY, WARMUP_SHARE = 5, 3, 0.05, 0.2

# MLPerf Inference's least for its single stream scenario.
OFFICIAL_QUERIES, OFFICIAL_SECONDS = 1024, 60.0
OFFLINE_ROUNDS = 5


@dataclass(frozen=True)
class Stream:
    """Milliseconds (N,) of each timed query, in order, TIMED a turn; and the runs before, after which it was steady or not."""

    latencies_ms: np.ndarray
    warmup: int
    steady: bool


def official(protocol: Protocol) -> Protocol:
    """The protocol with at least OFFICIAL_QUERIES and OFFICIAL_SECONDS of every artefact."""
    least = {"seconds_each": OFFICIAL_SECONDS, "min_queries": OFFICIAL_QUERIES, "max_queries": 10_000_000}
    return protocol.model_copy(update=least)


def query(session: Session, batches: Sequence[np.ndarray]) -> Query:
    """Queries of a session that go round its batches."""
    return partial(_run, session, batches)


def interleaved(queries: Mapping[str, Query], protocol: Protocol) -> dict[str, Stream]:
    """Every artefact's single stream, in turns, so that what slows the machine slows all; the order is reversed each round.

    Each is warmed up on its own first. Measures for protocol.seconds altogether and protocol.seconds_each of every one,
    and until each has protocol.min_queries; never more than protocol.max_queries each. All have equally many. Shows no
    progress: that would be measured too.
    """
    warmups = {name: _warmed_up(one, protocol) for name, one in queries.items()}
    latencies_ms: dict[str, list[float]] = {name: [] for name in queries}
    spent_ms = dict.fromkeys(queries, 0.0)
    order = list(queries)
    start, done = time.perf_counter(), 0
    while not _finished(done, time.perf_counter() - start, min(spent_ms.values()), protocol):
        timed = min(TIMED, protocol.max_queries - done)
        for name in order:
            turn(queries[name], done, SETTLE)
            turn_ms = turn(queries[name], done + SETTLE, timed)
            latencies_ms[name] += turn_ms
            spent_ms[name] += sum(turn_ms)
        done += timed
        order.reverse()
    return {name: Stream(np.asarray(latencies_ms[name]), *warmups[name]) for name in queries}


def images_per_second(sessions: Sequence[Session], batches: Sequence[np.ndarray], seconds: float) -> np.ndarray:
    """Throughput in each of OFFLINE_ROUNDS, of sessions that run side by side, each in a thread of its own.

    seconds: for all rounds together, but at least one query of each session a round.
    """
    rates = []
    with ThreadPoolExecutor(len(sessions)) as pool:
        for _ in range(OFFLINE_ROUNDS):
            together = threading.Barrier(len(sessions))
            one = partial(_for_a_while, batches, seconds / OFFLINE_ROUNDS, together)
            done, starts, ends = zip(*pool.map(one, sessions), strict=True)
            rates.append(sum(done) / (max(ends) - min(starts)))
    return np.asarray(rates)


def _warmed_up(one: Query, protocol: Protocol) -> tuple[int, bool]:
    """Runs it until its latency is steady; how many runs that took, and whether it is."""
    medians_ms: list[float] = []
    until, runs = time.perf_counter() + WARMUP_SHARE * protocol.seconds, 0
    while True:
        medians_ms.append(float(np.median(turn(one, runs, WARM_TURN))))
        runs += WARM_TURN
        last = medians_ms[-STEADY_TURNS:]
        steady = len(last) == STEADY_TURNS and max(last) <= (1 + STEADY) * min(last)
        if runs >= protocol.warmup and (steady or time.perf_counter() >= until):
            return runs, steady


def _finished(done: int, seconds: float, least_spent_ms: float, protocol: Protocol) -> bool:
    long_enough = seconds >= protocol.seconds and least_spent_ms >= 1000 * protocol.seconds_each
    return (done >= protocol.min_queries and long_enough) or done >= protocol.max_queries


def turn(one: Query, first: int, count: int) -> list[float]:
    """Milliseconds of so many queries, one after another."""
    latencies_ms = []
    for number in range(first, first + count):
        before = time.perf_counter_ns()
        one(number)
        latencies_ms.append((time.perf_counter_ns() - before) / 1e6)
    return latencies_ms


def _run(session: Session, batches: Sequence[np.ndarray], number: int) -> np.ndarray:
    return session.run(batches[number % len(batches)])


def _for_a_while(
    batches: Sequence[np.ndarray], seconds: float, together: threading.Barrier, session: Session
) -> tuple[int, float, float]:
    """Images that one session did, from when to when."""
    together.wait()
    start, images, number = time.perf_counter(), 0, 0
    while number == 0 or time.perf_counter() - start < seconds:
        batch_B = batches[number % len(batches)]
        session.run(batch_B)
        images, number = images + len(batch_B), number + 1
    return images, start, time.perf_counter()
