"""TensorRT: ONNX in the bundle, an engine built on the device.

Two builds with one code path: `tensorrt` (10.3 to 11, builds for the GPU that is present and needs one), else
TensorRT for RTX (builds for named GPU architectures without any GPU, runs on RTX GPUs).
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, tensorrt_apart
from vit_edge.runtimes.base import Probe
from vit_edge.runtimes.tensorrt_build import BUILDS, installed
from vit_edge.runtimes.tensorrt_session import TensorRtSession
from vit_edge.target import Target

# The one session option: what is wrong where a GPU's fused attention is.
ATTENTION, UNFUSED = "attention", "unfused"


class TensorRt:
    name = "tensorrt"

    def probe(self) -> Probe:
        try:
            module, tensorrt = installed()
        except UserError as err:
            return Probe(self.name, None, problem=err.problem, fix=err.fix)
        version = f"{tensorrt.__version__} ({BUILDS[module]})"
        if missing := cuda.missing_gpu():
            fix = "run the gate on the device that the target names, with its NVIDIA driver installed"
            return Probe(self.name, version, problem=missing, fix=fix)
        gpu = cuda.describe(0)
        return Probe(self.name, version, (f"{gpu['device']} ({gpu['compute_capability']})",), ("f32", "fp16"))

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        """Networks are strongly typed: f32 is what an f32 graph runs in; fp16 stands in a graph of its own."""
        return ("f32",)

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        """Copies the ONNX and proves that it parses and builds, for every architecture that the target names.

        The engines are thrown away: one belongs to one GPU and version, and is built again on the device.
        """
        _check_precision(target)
        folder.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy2(onnx_path, folder / "model.onnx"))
        tensorrt_apart.prove(copy, target)
        return [copy]

    def prove(self, files: Sequence[Path], target: Target) -> str:
        """Parses and builds the ONNX without running it; says in words what was built."""
        return tensorrt_apart.prove(files[0], target)

    def careful(self, options: Mapping[str, str]) -> dict[str, str] | None:
        """Attention in its parts."""
        return None if ATTENTION in options else {**options, ATTENTION: UNFUSED}

    def open(self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None) -> TensorRtSession:
        asked = dict(options or {})
        if asked not in ({}, {ATTENTION: UNFUSED}):
            raise UserError(
                f"TensorRT takes no session options but {ATTENTION}: {UNFUSED}, found {asked}", "remove the others"
            )
        _check_precision(target)
        _, tensorrt = installed()
        if missing := cuda.missing_gpu():
            raise UserError(f"TensorRT cannot run here: {missing}", "run on the device that the target names")
        return TensorRtSession(tensorrt, files[0], target, unfused=bool(asked))


def _check_precision(target: Target) -> None:
    if target.precision == "bf16":
        raise UserError(
            f"target {target.name!r} asks TensorRT for bf16, which no graph is exported in",
            "set precision: default (fp16 beside int8) or f32",
        )
