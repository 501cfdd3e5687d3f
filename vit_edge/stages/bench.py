"""Times several bundles side by side on this machine: every artefact of every bundle, in turn."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vit_edge import bundle, evaluation, metrics
from vit_edge.bundle import Trust
from vit_edge.progress import say
from vit_edge.report.schema import BenchRow
from vit_edge.runtimes import clock, registry
from vit_edge.stages import timing
from vit_edge.stages.artefacts import Opened, open_sessions, timed_batches
from vit_edge.stages.gate import evaluation_of


def bench_bundles(
    paths: Sequence[Path], *, reference: Path | None = None, seconds: float | None = None, trust: Trust = Trust()
) -> list[BenchRow]:
    """One row for each artefact. seconds: time to measure for altogether; null: as the first bundle's target says."""
    with ExitStack() as stack:
        opened = [stack.enter_context(bundle.opened(path, trust)) for path in paths]
        timed: dict[str, tuple[int, Opened]] = {}
        queries = {}
        for number, one in enumerate(opened):
            images = evaluation.read(*evaluation_of(one, reference))
            target = one.manifest.target
            batches = timed_batches(one, images, target.batch)
            first_BHWC = np.array(images.images_NHWC[: target.batch])
            for artefact in open_sessions(stack, one, registry.load(target.runtime), first_BHWC):
                timed[f"{number}/{artefact.name}"] = (number, artefact)
                queries[f"{number}/{artefact.name}"] = clock.query(artefact.session, batches)
        protocol = timing.protocol(opened[0].manifest.target, seconds)
        say(f"timing {len(queries)} artefacts, about {protocol.seconds:g} s: leave the machine alone")
        streams = clock.interleaved(queries, protocol)
    return [
        BenchRow(
            bundle=str(paths[number]),
            target=opened[number].manifest.target.name,
            artefact=artefact.name,
            batch=opened[number].manifest.target.batch,
            ms=metrics.percentiles(streams[key].latencies_ms),
            load_ms=artefact.load_ms,
            size_bytes=artefact.size_bytes,
        )
        for key, (number, artefact) in timed.items()
    ]
