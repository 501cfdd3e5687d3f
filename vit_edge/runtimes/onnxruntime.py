"""ONNX Runtime on the CPU. The only module that imports onnxruntime."""

import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.errors import UserError
from vit_edge.runtimes import machine
from vit_edge.runtimes.base import Coverage, Probe, Product, batch_of_graph, check_input, imported, in_batches
from vit_edge.target import Target

PROVIDER = "CPUExecutionProvider"
BATCH = "batch"  # what an exported graph calls its open dimension
INPUT_TYPES = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}
INT8_KINDS = {
    "QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulInteger", "ConvInteger",
    "DynamicQuantizeMatMul", "QAttention",
}  # fmt: skip
FLOAT_KINDS = {
    "Conv", "FusedConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Attention",
    "MultiHeadAttention", "Einsum", "ConvTranspose",
}  # fmt: skip


class OnnxRuntime:
    name = "onnxruntime"

    def probe(self) -> Probe:
        try:
            library = imported("onnxruntime", self.name)
        except UserError as err:
            return Probe(self.name, None, problem=err.problem, fix=err.fix)
        return Probe(self.name, library.__version__, (f"CPU: {machine.processor_name()}",), ("f32",))

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        return ("f32",)

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        """Copies the model and opens the copy, which fails when weights lie in another file."""
        folder.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy2(onnx_path, folder / "model.onnx"))
        with self.open([copy], target):
            return [copy]

    def open(
        self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None
    ) -> "OnnxRuntimeSession":
        _refuse_what_has_no_effect(target)
        return OnnxRuntimeSession(files[0], target, dict(options or {}))


class OnnxRuntimeSession:
    def __init__(self, path: Path, target: Target, entries: dict[str, str]):
        self._path, self._target, self._entries = path, target, entries
        self._library = imported("onnxruntime", "onnxruntime")
        self._session = self._opened(self._options())
        check_input(path, [given.shape for given in self._session.get_inputs()])
        given = self._session.get_inputs()[0]
        self._input, self._input_shape = given.name, given.shape
        self._input_type = INPUT_TYPES.get(given.type, given.type)
        self._batch = batch_of_graph(given.shape[0], target)
        self._open_batch = target.dynamic_batch or not isinstance(given.shape[0], int)

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        pieces = [self._ran(self._session, piece)[:real] for piece, real in in_batches(images_BHWC, self._batch)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def coverage(self) -> Coverage:
        """Read from the profile of one run: the operators that ran are those of the optimised graph."""
        with tempfile.TemporaryDirectory() as folder:
            options = self._options()
            options.enable_profiling = True
            options.add_session_config_entry(
                "session.disable_prepacking", "1"
            )  # so that the weights' shapes are listed
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = self._opened(options)
            self._ran(session, self._zeros())
            events = self._events(Path(session.end_profiling()))
        found = [_product(event) for event in events if event.get("cat") == "Node"]
        return Coverage(tuple(product for product in found if product))

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": "onnxruntime",
            "version": self._library.__version__,
            "device": machine.processor_name(),
            "providers": self._session.get_providers(),
            "threads": machine.threads(self._target),
            "batch": self._batch,
            "open_batch": self._open_batch,
            "input": {"type": self._input_type, "shape": self._input_shape},
            "precision": "f32",
            "options": self._entries,
        }

    def __enter__(self) -> "OnnxRuntimeSession":
        return self

    def __exit__(self, *_: object) -> None:
        del self._session

    def _options(self) -> Any:
        options = self._library.SessionOptions()
        options.intra_op_num_threads = machine.threads(self._target)
        options.inter_op_num_threads = 1
        if self._target.dynamic_batch:  # fixed here, it is as fast as in the file
            options.add_free_dimension_override_by_name(BATCH, self._target.batch)
        options.log_severity_level = 4  # its warnings speak to the graph's author, its errors are raised too
        for key, value in self._entries.items():
            options.add_session_config_entry(key, value)
        return options

    def _opened(self, options: Any) -> Any:
        try:
            return self._library.InferenceSession(str(self._path), options, providers=[PROVIDER])
        except Exception as err:  # its exceptions have no common base
            raise UserError(
                f"ONNX Runtime {self._library.__version__} cannot open {self._path}: {err}",
                "export again for onnxruntime as one self-contained file, or install the version that the bundle names",
            ) from err

    def _ran(self, session: Any, images_BHWC: np.ndarray) -> np.ndarray:
        """The first output of one batch."""
        try:
            return np.asarray(session.run(None, {self._input: images_BHWC})[0])
        except Exception as err:  # its exceptions have no common base
            raise UserError(
                f"ONNX Runtime {self._library.__version__} cannot run {self._path}: {err}",
                "export again for onnxruntime, or install the version that the bundle names",
            ) from err

    def _events(self, profile: Path) -> list[dict[str, Any]]:
        """Of a profile that ONNX Runtime wrote, which does not escape every name that a graph may hold."""
        try:
            return list(json.loads(profile.read_text(encoding="utf-8")))
        except ValueError as err:
            raise UserError(
                f"{self._path}: ONNX Runtime cannot profile it, a node has an unfit name",
                "export again for onnxruntime",
            ) from err

    def _zeros(self) -> np.ndarray:
        given = self._session.get_inputs()[0]
        shape = [self._batch, *given.shape[1:]]
        return np.zeros(shape, np.uint8 if given.type == "tensor(uint8)" else np.float32)


def _refuse_what_has_no_effect(target: Target) -> None:
    if target.precision not in ("default", "f32"):
        raise UserError(
            f"target {target.name!r}: precision {target.precision} has no effect, ONNX Runtime's CPU runs float in f32",
            "set precision: f32, or leave it out",
        )
    if target.device != "CPU":
        raise UserError(
            f"target {target.name!r}: onnxruntime runs on device CPU, found {target.device!r}", "set device: CPU"
        )


def _product(event: dict[str, Any]) -> Product | None:
    kind = event["args"].get("op_name", "")
    if not event["name"].endswith("_kernel_time") or kind not in INT8_KINDS | FLOAT_KINDS:
        return None
    name = event["name"].removesuffix("_kernel_time").removesuffix("_nchwc").removeprefix("fused ")
    precision = "int8" if kind in INT8_KINDS else "f32"
    return Product((name,), kind, precision, _multiply_adds(kind, event["args"]))


def _multiply_adds(kind: str, arguments: dict[str, Any]) -> int | None:
    """From the shapes in the profile; null when the weight of a convolution is not listed."""
    inputs = [shape for entry in arguments.get("input_type_shape", []) for shape in entry.values()]
    outputs = [shape for entry in arguments.get("output_type_shape", []) for shape in entry.values()]
    if not inputs or not outputs:
        return None
    if kind == "MultiHeadAttention":  # queries (B, R, D) and keys (B, T, D), scored and mixed
        return 2 * math.prod(inputs[0]) * inputs[1][1]
    if "Conv" not in kind:
        return math.prod(inputs[0]) * outputs[0][-1]
    weights = [shape for shape in inputs[1:] if len(shape) == 4]
    return math.prod(outputs[0]) * math.prod(weights[0][1:]) if weights else None
