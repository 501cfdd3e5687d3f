"""The process of one artefact: opens it, says how many queries fill a turn, then times as many as it is asked to.

    python -m side_by_side.worker JOB

JOB is a Job in JSON. Each line on stdin is a number of queries, each on stdout their milliseconds, or {"failed": why}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.runtimes.clock import Query, turn

SETTLE = 3
"""Queries at the start of a turn that are not timed."""
TURN_SECONDS, WARMUP_SECONDS, LEAST_TIMED = 0.25, 1.0, 4


def main(job: dict[str, Any]) -> None:
    try:
        query = torchs(job) if job["engine"].startswith("torch") else runtimes(job)
        count = warmed_up(query)
    except Exception as err:  # a peer that cannot do a model is a row of the table
        print(json.dumps({"failed": f"{type(err).__name__}: {err}".splitlines()[0]}), flush=True)
        return
    print(json.dumps({"count": count}), flush=True)
    for asked in sys.stdin:
        turn(query, 0, SETTLE)
        print(json.dumps(turn(query, SETTLE, int(asked))), flush=True)


def warmed_up(query: Query) -> int:
    """How many queries fill a turn."""
    until, latencies_ms = time.perf_counter() + WARMUP_SECONDS, []
    while len(latencies_ms) < 5 or time.perf_counter() < until:
        latencies_ms += turn(query, len(latencies_ms), 1)
    return max(LEAST_TIMED, round(1000 * TURN_SECONDS / float(np.median(latencies_ms))))


def runtimes(job: dict[str, Any]) -> Query:
    """A session as the product opens it."""
    from side_by_side.images import batches
    from vit_edge.runtimes import clock, registry
    from vit_edge.target import load

    changes = {key: job[key] for key in ("threads", "batch", "precision")}
    session = registry.load(job["engine"]).open([Path(job["path"])], load(job["engine"]).model_copy(update=changes))
    return clock.query(session, batches(job["batch"], job["planes"]))


def torchs(job: dict[str, Any]) -> Query:
    import torch

    from side_by_side.images import batches
    from side_by_side.models import Case, timms

    torch.set_num_threads(job["threads"])
    dtype = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    model: Any = timms(Case(job["model"], job["batch"])).to(dtype)
    if job["engine"] == "torch.compile":
        model = torch.compile(model)
    given = [torch.from_numpy(batch).to(dtype) for batch in batches(job["batch"], job["planes"])]

    def query(number: int) -> object:
        with torch.inference_mode():
            return model(given[number % len(given)]).float().numpy()

    return query


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
