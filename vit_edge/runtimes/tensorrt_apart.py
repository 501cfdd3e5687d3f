"""Parsing and building in a process of its own, with a time limit: a crash there is a refusal here.

The child reads a task as JSON from its standard input and writes an answer as JSON to its standard output.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.runtimes import tensorrt_build
from vit_edge.target import Target

# A builder times thousands of kernels; a large model takes a small device minutes.
PROOF_SECONDS, ENGINE_SECONDS = 900, 3600
# The folder that the child was started in is not searched for modules: it may be a stranger's bundle.
CHILD = f"import sys; sys.path[0] = sys.argv[1]; from {__name__} import main; sys.exit(main())"
PACKAGES = str(Path(__file__).parents[2])
DISTRUST = "export again for tensorrt; do not trust where this graph came from"
REFUSED = 2


def prove(onnx_path: Path, target: Target, limit_s: float = PROOF_SECONDS) -> str:
    """Says in words what was parsed and built. UserError for a graph that TensorRT refuses, crashes on, or never ends on."""
    task = {"onnx": str(onnx_path), "target": target.model_dump(mode="json")}
    return str(_done(task, onnx_path, limit_s)["proof"])


def build_engine(
    onnx_path: Path, target: Target, plan: Path, timings: Path, *, unfused: bool, limit_s: float = ENGINE_SECONDS
) -> dict[str, Any]:
    """Builds for the GPU that is here: writes the engine to `plan`, the kernels' times to `timings`, returns Build.record."""
    task = {
        "onnx": str(onnx_path), "target": target.model_dump(mode="json"),
        "plan": str(plan), "timings": str(timings), "unfused": unfused,
    }  # fmt: skip
    return dict(_done(task, onnx_path, limit_s)["record"])


def _done(task: dict[str, Any], onnx_path: Path, limit_s: float) -> dict[str, Any]:
    """The child's answer to a task."""
    command = [sys.executable, "-c", CHILD, PACKAGES]
    try:
        ended = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as err:
        raise UserError(f"TensorRT did not come to an end with {onnx_path} in {limit_s:g} s", DISTRUST) from err
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise UserError(f"TensorRT crashes on {onnx_path} ({name})", DISTRUST)
    if ended.returncode not in (0, REFUSED):
        raise RuntimeError(f"building {onnx_path} in a process of its own failed:\n{ended.stderr}")
    answer = json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode == REFUSED:
        raise UserError(answer["problem"], answer["fix"])
    return dict(answer)


def main() -> int:
    """The child."""
    try:
        print(json.dumps(_work(json.load(sys.stdin))))
    except UserError as err:
        print(json.dumps({"problem": err.problem, "fix": err.fix}))
        return REFUSED
    return 0


def _work(task: dict[str, Any]) -> dict[str, Any]:
    onnx_path, target = Path(task["onnx"]), Target.model_validate(task["target"])
    if "plan" not in task:
        return {"proof": tensorrt_build.prove(onnx_path, target)}
    build = tensorrt_build.Build(tensorrt_build.installed()[1], onnx_path, target, unfused=task["unfused"])
    timings = Path(task["timings"])
    build.use_timings(timings)
    Path(task["plan"]).write_bytes(build.serialized())
    timings.with_suffix(".new").write_bytes(build.timings())
    timings.with_suffix(".new").replace(timings)
    return {"record": build.record()}
