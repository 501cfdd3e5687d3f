"""Latency: several artefacts in turn, on the same varied real images, wall-clock time of each query.

A query is one call of Session.run with one batch, from numpy array to numpy array, results ready.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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


def query(session: Session, batches: Sequence[np.ndarray]) -> Query:
    """Queries of a session that go round its batches."""
    return partial(_run, session, batches)


def interleaved(queries: Mapping[str, Query], protocol: Protocol) -> dict[str, np.ndarray]:
    """Latencies in milliseconds of every timed query, by artefact; the order is reversed every other round.

    Each is warmed up on its own first. Measures for protocol.seconds altogether, and until each has
    protocol.min_queries; never more than protocol.max_queries each. Shows no progress: that would be measured too.
    """
    for one in queries.values():
        _turn(one, 0, protocol.warmup)
    latencies_ms: dict[str, list[float]] = {name: [] for name in queries}
    order = list(queries)
    start, done = time.perf_counter(), 0
    while not _finished(done, time.perf_counter() - start, protocol):
        timed = min(TURN - SETTLE, protocol.max_queries - done)
        for name in order:
            _turn(queries[name], done, SETTLE)
            latencies_ms[name] += _turn(queries[name], done + SETTLE, timed)
        done += timed
        order.reverse()
    return {name: np.asarray(values) for name, values in latencies_ms.items()}


def _finished(done: int, seconds: float, protocol: Protocol) -> bool:
    enough = done >= protocol.min_queries and seconds >= protocol.seconds
    return enough or done >= protocol.max_queries


def _turn(one: Query, first: int, count: int) -> list[float]:
    latencies_ms = []
    for number in range(first, first + count):
        before = time.perf_counter_ns()
        one(number)
        latencies_ms.append((time.perf_counter_ns() - before) / 1e6)
    return latencies_ms


def _run(session: Session, batches: Sequence[np.ndarray], number: int) -> np.ndarray:
    return session.run(batches[number % len(batches)])
