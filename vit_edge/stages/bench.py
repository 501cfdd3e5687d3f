"""Times several bundles side by side on this machine: every artefact of every bundle, in turn."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from vit_edge import bundle, evaluation, metrics
from vit_edge.bundle import Trust
from vit_edge.progress import say
from vit_edge.report.schema import BenchRow
from vit_edge.runtimes import clock, registry
from vit_edge.stages.gate import Opened, evaluation_folder, open_sessions, timed_batches


def bench_bundles(
    paths: Sequence[Path], *, reference: Path | None = None, seconds: float | None = None, trust: Trust = Trust()
) -> list[BenchRow]:
    """One row for each artefact. seconds: time to measure for altogether; null: as the first bundle's target says."""
    with ExitStack() as stack:
        opened = [stack.enter_context(bundle.opened(path, trust)) for path in paths]
        timed: dict[str, tuple[int, Opened]] = {}
        queries = {}
        for number, one in enumerate(opened):
            images = evaluation.read(evaluation_folder(one, reference), one.manifest.evaluation_sha256)
            batches = timed_batches(one, images)
            for artefact in open_sessions(stack, one, registry.load(one.manifest.target.runtime)):
                timed[f"{number}/{artefact.name}"] = (number, artefact)
                queries[f"{number}/{artefact.name}"] = clock.query(artefact.session, batches)
        protocol = opened[0].manifest.target.protocol
        protocol = protocol if seconds is None else protocol.model_copy(update={"seconds": seconds})
        say(f"timing {len(queries)} artefacts, about {protocol.seconds:g} s: leave the machine alone")
        latencies = clock.interleaved(queries, protocol)
    return [
        BenchRow(
            bundle=str(paths[number]),
            target=opened[number].manifest.target.name,
            artefact=artefact.name,
            batch=opened[number].manifest.target.batch,
            ms=metrics.percentiles(latencies[key]),
            load_ms=artefact.load_ms,
            size_bytes=artefact.size_bytes,
        )
        for key, (number, artefact) in timed.items()
    ]
