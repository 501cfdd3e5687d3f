import time
from functools import partial

import numpy as np

from vit_edge.runtimes import clock
from vit_edge.target import Protocol


def sleep_ms(milliseconds: float, number: int) -> None:
    time.sleep(milliseconds / 1000)


def test_measures_each_in_milliseconds() -> None:
    queries = {"slow": partial(sleep_ms, 3.0), "fast": partial(sleep_ms, 1.0)}
    streams = clock.interleaved(queries, Protocol(warmup=1, seconds=0.1, min_queries=16, max_queries=16))
    latencies = {name: stream.latencies_ms for name, stream in streams.items()}
    assert 3.0 <= np.median(latencies["slow"]) < 6.0
    assert 1.0 <= np.median(latencies["fast"]) < 3.0
    assert len(latencies["slow"]) == len(latencies["fast"]) == 16


def test_takes_turns_and_reverses_the_order() -> None:
    asked: list[str] = []
    queries = {name: lambda number, name=name: asked.append(name) for name in "ab"}
    streams = clock.interleaved(queries, Protocol(warmup=1, seconds=0.001, min_queries=16, max_queries=16))
    turns = "".join(asked[sum(stream.warmup for stream in streams.values()) :: clock.TURN])
    assert turns == "abba"


def test_stops_in_time_once_it_has_enough() -> None:
    protocol = Protocol(warmup=1, seconds=0.1, min_queries=5, max_queries=100_000)
    start = time.monotonic()
    one = clock.interleaved({"one": partial(sleep_ms, 1.0)}, protocol)["one"]
    assert time.monotonic() - start < 1.0
    assert 8 <= len(one.latencies_ms) < 100


def test_every_artefact_is_measured_for_its_own_time() -> None:
    queries = {"slow": partial(sleep_ms, 4.0), "fast": partial(sleep_ms, 1.0)}
    protocol = Protocol(warmup=1, seconds=0.01, seconds_each=0.1, min_queries=1, max_queries=100_000)
    assert all(np.sum(one.latencies_ms) >= 100 for one in clock.interleaved(queries, protocol).values())


def test_official_is_what_mlperf_asks() -> None:
    protocol = clock.official(Protocol(seconds=1, max_queries=5))
    assert (protocol.min_queries, protocol.seconds_each) == (1024, 60.0)
    assert protocol.max_queries >= 1_000_000


def test_warms_up_until_the_latency_is_steady() -> None:
    def settles(number: int) -> None:
        time.sleep(0.002 if number >= 30 else 0.002 + 0.0005 * (30 - number))

    def never(number: int) -> None:
        time.sleep(0.001 * (1 + number // clock.WARM_TURN % 2))

    protocol = Protocol(warmup=1, seconds=2, min_queries=1, max_queries=1)
    streams = clock.interleaved({"settles": settles, "never": never}, protocol)
    assert streams["settles"].warmup > 30
    assert not streams["never"].steady


def test_offline_counts_the_images_of_all_streams() -> None:
    class Sleeping:
        def run(self, batch: list[int]) -> None:
            time.sleep(0.004)

    batches = [[0, 0], [0, 0]]
    one, three = (
        np.median(clock.images_per_second([Sleeping()] * streams, batches, 0.2))  # type: ignore[list-item, arg-type]
        for streams in (1, 3)
    )
    assert 250 < one <= 500
    assert 2 * one < three <= 1500


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
