import time
from functools import partial

import numpy as np

from vit_edge.runtimes import clock
from vit_edge.target import Protocol


def sleep_ms(milliseconds: float, number: int) -> None:
    time.sleep(milliseconds / 1000)


def test_measures_each_in_milliseconds() -> None:
    queries = {"slow": partial(sleep_ms, 3.0), "fast": partial(sleep_ms, 1.0)}
    latencies = clock.interleaved(queries, Protocol(warmup=1, seconds=0.1, min_queries=16, max_queries=16))
    assert 3.0 <= np.median(latencies["slow"]) < 6.0
    assert 1.0 <= np.median(latencies["fast"]) < 3.0
    assert len(latencies["slow"]) == len(latencies["fast"]) == 16


def test_takes_turns_and_reverses_the_order() -> None:
    asked: list[str] = []
    queries = {name: lambda number, name=name: asked.append(name) for name in "ab"}
    clock.interleaved(queries, Protocol(warmup=1, seconds=0.001, min_queries=16, max_queries=16))
    turns = "".join(asked[2 :: clock.TURN])
    assert turns == "abba"


def test_stops_in_time_once_it_has_enough() -> None:
    protocol = Protocol(warmup=1, seconds=0.1, min_queries=5, max_queries=100_000)
    start = time.monotonic()
    latencies = clock.interleaved({"one": partial(sleep_ms, 1.0)}, protocol)
    assert time.monotonic() - start < 1.0
    assert 8 <= len(latencies["one"]) < 100


def test_every_query_gets_the_next_batch() -> None:
    class Counting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def run(self, batch: int) -> None:
            self.seen.append(batch)

    session = Counting()
    query = clock.query(session, [0, 1, 2])  # type: ignore[arg-type]
    for number in range(5):
        query(number)
    assert session.seen == [0, 1, 2, 0, 1]
