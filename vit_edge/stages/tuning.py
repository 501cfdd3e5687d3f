"""Which of a runtime's lowerings is the fastest on this device, of those that answer as well as the first.

N images, K classes.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from vit_edge import metrics
from vit_edge.errors import UserError
from vit_edge.export import onnx
from vit_edge.export.lower import LOWERINGS, Ranges, lowered
from vit_edge.progress import say
from vit_edge.runtimes import clock, registry
from vit_edge.runtimes.base import Runtime, Session
from vit_edge.target import Target

PARITY = 1.25
"""A lowering may leave so many times the KL divergence from float that the first one leaves, or HARDLY any."""
HARDLY = 1e-5
WORTH = 0.98
"""Another than the first is taken when its p50 is at most this share of the first one's."""
IMAGES = 128


def fastest(
    canonical: ir.Model, floats: ir.Model, ranges: Ranges, target: Target, images_NHWC: np.ndarray
) -> tuple[str, list[dict[str, Any]]]:
    """The name of the lowering, and what was tried: name, p50_ms, kl_from_float, and why it was not taken, if it was not.

    canonical, floats: graphs of the target's batch. images_NHWC: uint8, of the calibration split. Says each in a line.
    """
    names = list(LOWERINGS[target.runtime])
    runtime = registry.load(target.runtime)
    problem = runtime.probe().problem
    if len(names) == 1 or problem:
        say(f"tune: {target.name} is lowered as a rule: {problem or 'there is one way only'}")
        return names[0], []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vit-edge-")))
        in_f32 = target.model_copy(update={"precision": "f32"})
        float_NK = _opened(stack, runtime, in_f32, scratch / "float", floats).run(images_NHWC[:IMAGES])
        tried: dict[str, dict[str, Any]] = {}
        sessions: dict[str, Session] = {}
        graphs: dict[bytes, str] = {}
        for name in names:
            model = lowered(canonical.clone(), ranges, target.runtime, name)
            same = graphs.setdefault(ir.to_proto(model).SerializeToString(deterministic=True), name)
            if same != name:
                tried[name] = {"lowering": name, "left": f"the same graph as {same}"}
                continue
            try:
                sessions[name] = _opened(stack, runtime, target, scratch / name, model)
            except UserError as err:
                tried[name] = {"lowering": name, "left": err.problem}
                continue
            kl = metrics.mean_kl(float_NK, sessions[name].run(images_NHWC[:IMAGES]))
            tried[name] = {"lowering": name, "kl_from_float": kl}
        for name, p50_ms in _p50s_ms(sessions, target, images_NHWC).items():
            tried[name]["p50_ms"] = p50_ms
    chosen = _choose(names, tried)
    for one in tried.values():
        say(f"tune: {target.name}: {_told(one)}")
    return chosen, list(tried.values())


def _opened(stack: ExitStack, runtime: Runtime, target: Target, folder: Path, model: ir.Model) -> Session:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return stack.enter_context(runtime.open(runtime.build(folder / "model.onnx", target, folder / "built"), target))


def _p50s_ms(sessions: Mapping[str, Session], target: Target, images_NHWC: np.ndarray) -> dict[str, float]:
    """Of all in turn, with the target's own protocol."""
    batches = [images_NHWC[i : i + target.batch] for i in range(0, min(IMAGES, len(images_NHWC)), target.batch)]
    streams = clock.interleaved({n: clock.query(s, batches) for n, s in sessions.items()}, target.protocol)
    return {name: float(np.median(stream.latencies_ms)) for name, stream in streams.items()}


def _choose(names: list[str], tried: dict[str, dict[str, Any]]) -> str:
    """The fastest that passes parity; says of each other why it is left."""
    ready = [name for name in names if "p50_ms" in tried[name]]
    if not ready:
        return names[0]
    first = tried[ready[0]]
    bound = max(HARDLY, PARITY * first["kl_from_float"])
    for name in ready:
        if tried[name]["kl_from_float"] > bound:
            tried[name]["left"] = f"further from float than {bound:.3g}"
    passed = [name for name in ready if "left" not in tried[name]]
    best = min(passed, key=lambda name: tried[name]["p50_ms"])
    if tried[best]["p50_ms"] > WORTH * first["p50_ms"]:
        best = ready[0]
    for name in passed:
        if name != best:
            tried[name]["left"] = "no faster"
    return best


def _told(one: dict[str, Any]) -> str:
    if "p50_ms" not in one:
        return f"{one['lowering']}: left, {one['left']}"
    numbers = f"p50 {one['p50_ms']:.3g} ms, KL from float {one['kl_from_float']:.3g}"
    return f"{one['lowering']}: {numbers}: " + (f"left, {one['left']}" if "left" in one else "taken")
