"""Latency of this project's artefacts against what its peers make of the same architectures.

    python benchmarks/latency.py --models vit_ti16 --tables openvino --batches 1 --threads 2
    python benchmarks/latency.py                  everything: takes hours
    python benchmarks/latency.py --build          makes the artefacts and times nothing
    python benchmarks/latency.py --show           prints the tables of what was timed before

One process for each artefact, timed in turn (side_by_side/processes.py); a query is one batch from numpy to numpy. The
same file in another process can be half as fast, for as long as that lives: each is started --restarts times, and a
percentile is the median over the processes.
Peers take normalised float planes, whose making is not timed; ours take uint8 pixels. Shapes are static. The weights
are random: this says nothing of accuracy. Artefacts and timings are kept in --out; a peer that is not installed or
cannot do a model is named and left out.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from statistics import median
from typing import Any

from side_by_side import processes, tables
from side_by_side.models import MODELS, Case
from side_by_side.processes import Job
from side_by_side.tables import TABLES, Peer

from vit_edge.metrics import percentiles
from vit_edge.progress import say
from vit_edge.runtimes import machine

TIMINGS = "timings.json"


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / TIMINGS
    measured: dict[str, Any] = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    for name in () if options.show else options.tables:
        for model in options.models:
            for batch in options.batches:
                case = Case(model, batch)
                files, reasons = built(name, case, options)
                for threads in () if options.build else options.threads:
                    found = timed(name, files, case, threads, options) | reasons
                    settings = measured.setdefault(name, {}).setdefault(model, {})
                    settings[f"{batch}/{threads}"] = found  # ratios hold within one measurement alone
                    store.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    if not options.build:
        print(conditions())
        print(tables.markdown(measured))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--peers", nargs="+", help="names of rows, or parts of them; all by default, ours always")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each artefact, all its processes together")
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/latency"))
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--show", action="store_true")
    return parser.parse_args()


def built(table: str, case: Case, options: argparse.Namespace) -> tuple[dict[str, tuple[Peer, Path]], dict[str, Any]]:
    """The file of every peer that is asked for, made where it is not there, and why others have none."""
    files, reasons = {}, {}
    shared = options.out / case.model / "shared"
    for name, peer in TABLES[table].peers.items():
        if (
            options.peers
            and name not in (tables.OURS, tables.TUNED)
            and not any(part in name for part in options.peers)
        ):
            continue
        path = options.out / case.model / str(case.batch) / peer.file
        try:
            if peer.needs and importlib.util.find_spec(peer.needs) is None:
                raise ImportError(f"{peer.needs} is not installed")
            if not path.exists():
                say(f"making {name} of {case.model}, batch {case.batch}")
                path.parent.mkdir(parents=True, exist_ok=True)
                peer.make(case, path, shared)
            files[name] = (peer, path)
        except Exception as err:  # a peer that cannot do a model is a row of the table
            say(f"{name} of {case.model}: {type(err).__name__}: {err}")
            reasons[name] = {"reason": f"{type(err).__name__}: {err}".splitlines()[0]}
    return files, reasons


def timed(
    name: str, files: dict[str, tuple[Peer, Path]], case: Case, threads: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Artefact → p50, p90, p99, n, or the reason why it has none."""
    table = TABLES[name]
    jobs = []
    for artefact, (peer, path) in files.items():
        precision = table.precision if peer.precision == "default" else peer.precision
        engine = peer.engine or table.engine
        jobs.append(
            Job(artefact, case.model, engine, str(path), precision, threads, case.batch, peer.planes, table.isa)
        )
    told: dict[str, list[dict[str, float]]] = {}
    reasons: dict[str, str] = {}
    for _ in range(options.restarts):
        found, reasons = processes.timed(jobs, options.seconds / options.restarts)
        for artefact, latencies_ms in found.items():
            told.setdefault(artefact, []).append(dict(percentiles(latencies_ms)))
    say(f"{name}, {case}, {threads} threads: {len(told)} artefacts timed; failed: {reasons or 'none'}")
    return {
        **{
            artefact: {key: median(one[key] for one in several) for key in several[0]}
            for artefact, several in told.items()
        },
        **{artefact: {"reason": reason} for artefact, reason in reasons.items()},
    }


def conditions() -> str:
    """Machine and versions that the numbers belong to."""
    from importlib.metadata import PackageNotFoundError, version

    def told(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package}: not installed"

    found = machine.machine()
    packages = ("onnxruntime", "openvino", "nncf", "torch", "torchao", "timm")
    return f"{found['processor']}, {', '.join(found['instruction_sets'])}; " + ", ".join(map(told, packages)) + "\n"


if __name__ == "__main__":
    main()
