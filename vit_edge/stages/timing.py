"""Times a bundle's artefacts in turn: single stream, then offline. B images of a batch."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from vit_edge import latency, metrics
from vit_edge.bundle import Bundle
from vit_edge.evaluation import Evaluation
from vit_edge.progress import say
from vit_edge.report.schema import Artefact, Latency, Offline, Throughput
from vit_edge.runtimes import clock, machine
from vit_edge.stages.artefacts import Opened, timed_batches
from vit_edge.target import Protocol, Target

# Of the time to measure, for the offline throughput of all artefacts.
OFFLINE_SHARE = 0.2
# Images of a query where the graph leaves it open: larger ones as long as each makes the rate grow by so much, and its
# query is not longer than so many seconds.
OPEN_BATCHES, GROWTH, LONGEST_QUERY = (8, 32, 128, 512), 1.02, 0.5
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
    """The best of the ways to run it: in one session or several, then in larger and larger batches as long as that pays."""
    own, open_batch = one.source.target.batch, bool(one.session.describe()["open_batch"])
    each = seconds / (4 if open_batch else 2)
    tried = [_rate(one, opened, images, own, 1, each)]
    if (streams := _streams(one)) > 1:
        tried.append(_rate(one, opened, images, own, streams, each))
    best = max(tried, key=_images_per_second)
    for batch in (batch for batch in OPEN_BATCHES if open_batch and batch > own):
        if batch * best.streams / best.images_per_second > LONGEST_QUERY:
            break
        tried.append(_rate(one, opened, images, batch, best.streams, each))
        if tried[-1].images_per_second < GROWTH * best.images_per_second:
            break
        best = tried[-1]
    best = max(tried, key=_images_per_second)
    return Offline(**best.model_dump(), open_batch=open_batch, tried=tried)


def _rate(one: Opened, opened: Bundle, images: Evaluation, batch: int, streams: int, seconds: float) -> Throughput:
    """Of so many sessions that share the target's threads."""
    source = one.source
    threads = max(1, machine.threads(source.target) // streams)
    with ExitStack() as stack:
        if (batch, streams) == (source.target.batch, 1):
            sessions = [one.session]
        else:
            sessions = [stack.enter_context(source.open(threads=threads, batch=batch)) for _ in range(streams)]
        rates = clock.images_per_second(sessions, timed_batches(opened, images, batch), seconds)
    noise = metrics.T975[len(rates)] * float(np.std(rates, ddof=1)) / len(rates) ** 0.5 / float(np.mean(rates))
    return Throughput(images_per_second=float(np.mean(rates)), noise=noise, batch=batch, streams=streams)


def _streams(one: Opened) -> int:
    """How many sessions may run side by side: a thread each, and no more memory than there is."""
    target = one.source.target
    free = machine.free_memory_bytes() * MEMORY_SHARE // max(1, one.memory_bytes or 2 * one.size_bytes)
    wished = machine.threads(target) if target.device == "CPU" else STREAMS_ELSEWHERE
    return min(wished, MOST_STREAMS, int(free))


def _images_per_second(way: Throughput) -> float:
    return way.images_per_second
