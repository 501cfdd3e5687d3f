"""Times a bundle's artefacts in turn: single stream, then offline. B images of a batch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from vit_edge import latency, metrics
from vit_edge.bundle import Bundle
from vit_edge.evaluation import Evaluation
from vit_edge.progress import say
from vit_edge.report.schema import Artefact, Latency, Offline
from vit_edge.runtimes import clock, machine
from vit_edge.runtimes.base import Session
from vit_edge.stages.artefacts import Opened, timed_batches
from vit_edge.target import Protocol, Target

# Of the time to measure, for the offline throughput of all artefacts; images of a query where the graph leaves it open.
OFFLINE_SHARE, OPEN_BATCHES = 0.2, (8, 32)
# Sessions side by side, at most; on another device than a CPU, so many.
MOST_STREAMS, STREAMS_ELSEWHERE = 8, 2
# Sessions side by side take at most this share of the memory that is free.
MEMORY_SHARE = 0.25


def protocol(target: Target, seconds: float | None = None, official: bool = False) -> Protocol:
    """The target's own protocol, for other `seconds` altogether, or for as long as MLPerf asks."""
    own = target.protocol if seconds is None else target.protocol.model_copy(update={"seconds": seconds})
    return clock.official(own) if official else own


def measure(
    artefacts: Sequence[Opened], opened: Bundle, images: Evaluation, how: Protocol, *, sound: Sequence[str],
    reference_ms: metrics.Percentiles | None,
) -> Latency:  # fmt: skip
    """sound: names of the float artefacts that int8 may be compared with; reference_ms: at batch 1."""
    target = opened.manifest.target
    batches = timed_batches(opened, images, target.batch)
    queries = {one.name: clock.query(one.session, batches) for one in artefacts}
    seconds = max(how.seconds, how.seconds_each * len(queries))
    say(f"timing {', '.join(queries)} on {target.name}, about {seconds:g} s: leave the machine alone")
    with machine.Load() as load:
        streams = clock.interleaved(queries, how)
    span = latency.span_ms(streams)
    offline_seconds = OFFLINE_SHARE * how.seconds / len(artefacts)
    timed = [
        Artefact(
            name=one.name,
            precision=one.precision,
            offline=_offline(one, opened, images, offline_seconds),
            load_ms=one.load_ms,
            first_ms=one.first_ms,
            memory_bytes=one.memory_bytes,
            size_bytes=one.size_bytes,
            **latency.statistics(streams[one.name], span),
        )
        for one in artefacts
    ]
    return latency.measured(
        timed, streams, sound, reference_ms, batch=target.batch, elsewhere=load.elsewhere,
        peak_memory_bytes=machine.peak_memory_bytes(),
    )  # fmt: skip


def _offline(one: Opened, opened: Bundle, images: Evaluation, seconds: float) -> Offline:
    """The best of the ways to run it."""
    ways = list(_ways(one))
    found = []
    for batch, streams in ways:
        with ExitStack() as stack:
            own = (batch, streams) == ways[0]
            sessions = [one.session] if own else _side_by_side(stack, one, batch, streams)
            rates = clock.images_per_second(sessions, timed_batches(opened, images, batch), seconds / len(ways))
        noise = metrics.T975[len(rates)] * float(np.std(rates, ddof=1)) / len(rates) ** 0.5 / float(np.mean(rates))
        found.append(Offline(images_per_second=float(np.mean(rates)), noise=noise, batch=batch, streams=streams))
    return max(found, key=lambda way: way.images_per_second)


def _ways(one: Opened) -> Iterator[tuple[int, int]]:
    """Batch and streams: as it is open already, some side by side, and larger batches."""
    target = one.source.target
    yield target.batch, 1
    free = machine.free_memory_bytes() * MEMORY_SHARE // max(1, one.memory_bytes or 2 * one.size_bytes)
    streams = machine.threads(target) if target.device == "CPU" else STREAMS_ELSEWHERE
    streams = min(streams, MOST_STREAMS, int(free))
    if streams > 1:
        yield target.batch, streams
    if one.session.describe()["open_batch"]:
        yield from ((batch, 1) for batch in OPEN_BATCHES if batch != target.batch)


def _side_by_side(stack: ExitStack, one: Opened, batch: int, streams: int) -> list[Session]:
    """Sessions that share the target's threads."""
    threads = max(1, machine.threads(one.source.target) // streams)
    return [stack.enter_context(one.source.open(threads=threads, batch=batch)) for _ in range(streams)]
