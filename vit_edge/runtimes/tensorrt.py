"""TensorRT: ONNX in the bundle, an engine built on the device. The only module that imports tensorrt.

Two builds with one code path: `tensorrt` (10.3 to 11, builds for the GPU that is present and needs one), else
TensorRT for RTX (builds for named GPU architectures without any GPU, runs on RTX GPUs).
"""

import hashlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, tensorrt_layers
from vit_edge.runtimes.base import Coverage, Probe, batch_of_graph, imported, in_batches
from vit_edge.store import digest_and_size
from vit_edge.target import Target

BUILDS = {"tensorrt": "tensorrt", "tensorrt_rtx_bindings": "tensorrt-rtx"}
PARSE_APART = """\
import sys
from pathlib import Path
from vit_edge.runtimes.tensorrt import parse
from vit_edge.target import Target
parse(Path(sys.argv[1]), Target.model_validate_json(sys.argv[2]))
"""
# An engine whose batch is left open takes up to so many images at once, and is tuned for the target's batch.
LARGEST_BATCH = 32
NUMPY_TYPES = {"FLOAT": np.float32, "HALF": np.float16, "UINT8": np.uint8, "INT8": np.int8, "INT32": np.int32}


class TensorRt:
    name = "tensorrt"

    def probe(self) -> Probe:
        try:
            module, library = _library()
        except UserError as err:
            return Probe(self.name, None, problem=err.problem, fix=err.fix)
        version = f"{library.__version__} ({BUILDS[module]})"
        if missing := cuda.missing_gpu():
            fix = "run the gate on the device that the target names, with its NVIDIA driver installed"
            return Probe(self.name, version, problem=missing, fix=fix)
        gpu = cuda.describe(0)
        return Probe(self.name, version, (f"{gpu['device']} ({gpu['compute_capability']})",), ("f32",))

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        """Networks are strongly typed: f32 is what an f32 graph runs in; fp16 stands in a graph of its own."""
        return ("f32",)

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        """Copies the ONNX and proves that it parses and builds, for every architecture that the target names.

        The engines are thrown away: one belongs to one GPU and version, and is built again on the device.
        """
        folder.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy2(onnx_path, folder / "model.onnx"))
        self._prove(copy, target)
        return [copy]

    def prove(self, files: Sequence[Path], target: Target) -> str:
        """Parses and builds the ONNX without running it; says in words what was built."""
        check_apart(files[0], target)
        return self._prove(files[0], target)

    def _prove(self, onnx_path: Path, target: Target) -> str:
        module, library = _library()
        if BUILDS[module] == "tensorrt":
            _Build(library, onnx_path, target).serialized()
            return f"parses and builds with TensorRT {library.__version__}"
        _Build(library, onnx_path, target)
        built = [_built_for(library, onnx_path, target, asked) for asked in target.compute_capabilities]
        return (
            f"parses with TensorRT-RTX {library.__version__}; builds for {', '.join(built) or 'nothing, none is named'}"
        )

    def open(
        self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None
    ) -> "TensorRtSession":
        if options:
            raise UserError(f"TensorRT takes no session options, found {', '.join(options)}", "remove them")
        _, library = _library()
        if missing := cuda.missing_gpu():
            raise UserError(f"TensorRT cannot run here: {missing}", "run on the device that the target names")
        return TensorRtSession(library, files[0], target)


class TensorRtSession:
    """One engine, its execution context, and one input and one output buffer on the GPU."""

    def __init__(self, library: Any, onnx_path: Path, target: Target):
        ordinal = int(target.device.partition(":")[2] or 0)
        self._gpu, self._version = cuda.describe(ordinal), library.__version__
        self._stream = cuda.Stream(ordinal)
        plan, self._products = _cached_engine(library, onnx_path, target, self._gpu)
        self._library, self._runtime = library, library.Runtime(library.Logger(library.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        self._context = self._engine.create_execution_context()
        given, result = self._names()
        dimension = self._engine.get_tensor_shape(given)[0]
        self._batch, self._open_batch = batch_of_graph(dimension, target), dimension == -1
        self._context.set_input_shape(given, (self._batch, *tuple(self._engine.get_tensor_shape(given))[1:]))
        self._output_BK = np.empty(tuple(self._context.get_tensor_shape(result)), self._numpy_type(result))
        input_bytes = int(np.prod(tuple(self._context.get_tensor_shape(given)))) * self._numpy_type(given)().itemsize
        self._input_address = self._stream.allocate(input_bytes)
        self._output_address = self._stream.allocate(self._output_BK.nbytes)
        self._context.set_tensor_address(given, self._input_address)
        self._context.set_tensor_address(result, self._output_address)

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        pieces = [self._run_batch(piece)[:real] for piece, real in in_batches(images_BHWC, self._batch)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def coverage(self) -> Coverage:
        inspector = self._engine.create_engine_inspector()
        text = inspector.get_engine_information(self._library.LayerInformationFormat.JSON)
        return tensorrt_layers.coverage(json.loads(text), self._products)

    def describe(self) -> dict[str, Any]:
        given, _ = self._names()
        kind, shape = np.dtype(self._numpy_type(given)).name, list(self._engine.get_tensor_shape(given))
        own = {"batch": self._batch, "open_batch": self._open_batch, "precision": "f32"}
        own["input"] = {"type": kind, "shape": shape}
        return {"runtime": "tensorrt", "version": self._version, **self._gpu, **own}

    def __enter__(self) -> "TensorRtSession":
        return self

    def __exit__(self, *_: object) -> None:
        del self._context, self._engine, self._runtime
        self._stream.close()

    def _run_batch(self, images_BHWC: np.ndarray) -> np.ndarray:
        self._stream.upload(self._input_address, images_BHWC)
        if not self._context.execute_async_v3(self._stream.handle):
            raise UserError("TensorRT cannot run the engine that it built", "export again for tensorrt")
        self._stream.download(self._output_BK, self._output_address)
        self._stream.synchronize()
        return self._output_BK.astype(np.float32)

    def _names(self) -> tuple[str, str]:
        """Of the input and the output."""
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == self._library.TensorIOMode.INPUT]
        return inputs[0], next(name for name in names if name not in inputs)

    def _numpy_type(self, tensor: str) -> Any:
        return NUMPY_TYPES[self._engine.get_tensor_dtype(tensor).name]


class _Build:
    """An ONNX file parsed into a strongly typed network, ready to be built."""

    def __init__(self, library: Any, onnx_path: Path, target: Target):
        self._library, self._path = library, onnx_path
        self._log = _log(library)
        self._builder = _created(library, self._log)
        # TensorRT 11 knows strongly typed networks only and may drop the flag.
        flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.network = self._builder.create_network(0 if flag is None else 1 << int(flag))
        self._parse()
        self._config = self._builder.create_builder_config()
        self._config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
        self._fix_batch(target)

    def serialized(self, compute_capability: str | None = None) -> Any:
        """The engine's bytes, for a named architecture (TensorRT-RTX) or the GPU that is present."""
        if compute_capability is not None:
            self._choose(compute_capability)
        plan = self._builder.build_serialized_network(self.network, self._config)
        if plan is None:
            where = f" for compute capability {compute_capability}" if compute_capability else ""
            raise UserError(
                f"TensorRT {self._library.__version__} cannot build {self._path}{where}: {self._log.last()}",
                "export again, with the layer that it names left in float (int8.float_layers)",
            )
        return plan

    def _parse(self) -> None:
        parser = self._library.OnnxParser(self.network, self._log)
        if parser.parse_from_file(str(self._path)):
            return
        error = parser.get_error(0)
        operator, node = error.node_operator() or "the graph", error.node_name()
        reason = error.desc() if " " in error.desc() else self._log.last()  # desc may be the failed expression
        raise UserError(
            f"TensorRT {self._library.__version__} cannot parse {self._path}: operator {operator}"
            f"{f' ({node})' if node else ''}: {reason}",
            "export again for tensorrt; a graph made elsewhere must avoid this operator",
        )

    def _choose(self, compute_capability: str) -> None:
        name = "SM" + compute_capability.replace(".", "")
        self._config.num_compute_capabilities = 1
        self._config.set_compute_capability(getattr(self._library.ComputeCapability, name), 0)

    def _fix_batch(self, target: Target) -> None:
        given = self.network.get_input(0)
        shape = tuple(given.shape)
        batch_of_graph(shape[0], target)
        if shape[0] == -1:
            profile = self._builder.create_optimization_profile()
            fewest, most = (
                (1, max(target.batch, LARGEST_BATCH)) if target.dynamic_batch else (target.batch, target.batch)
            )
            profile.set_shape(given.name, *((batch, *shape[1:]) for batch in (fewest, target.batch, most)))
            self._config.add_optimization_profile(profile)


def check_apart(onnx_path: Path, target: Target) -> None:
    """Parses a graph that nobody vouches for in a process of its own: TensorRT's parser crashes on some broken ones.

    UserError when it crashed; what it refuses in words, the parsing that follows says.
    """
    command = [sys.executable, "-c", PARSE_APART, str(onnx_path), target.model_dump_json()]
    ended = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if ended.returncode < 0:
        raise UserError(
            f"TensorRT's parser crashes on {onnx_path} ({signal.Signals(-ended.returncode).name})",
            "export again for tensorrt; do not trust where this graph came from",
        )


def parse(onnx_path: Path, target: Target) -> None:
    """Parses an ONNX file. Raises UserError for what TensorRT refuses."""
    _Build(_library()[1], onnx_path, target)


def _library() -> tuple[str, Any]:
    """The name of the installed build's module, and the module."""
    for module in BUILDS:
        if importlib.util.find_spec(module):
            return module, imported(module, BUILDS[module])
    raise UserError(
        "TensorRT is not installed: neither tensorrt nor tensorrt_rtx_bindings",
        'pip install "vit-edge[tensorrt-rtx]" (builds without a GPU), or "vit-edge[tensorrt]" on the device',
    )


def _built_for(library: Any, onnx_path: Path, target: Target, asked: str) -> str:
    """Builds for a compute capability, or the nearest older one of its generation that this build knows; says which."""
    known = [f"{n[2:-1]}.{n[-1]}" for n in dir(library.ComputeCapability) if n.startswith("SM")]
    fitting = [one for one in known if one.partition(".")[0] == asked.partition(".")[0] and one <= asked]
    if not fitting:
        return f"none in place of {asked}, which this build does not know"
    nearest = max(fitting)
    _Build(library, onnx_path, target).serialized(nearest)
    return asked if nearest == asked else f"{nearest} in place of {asked}, which this build does not know"


def _log(library: Any) -> Any:
    class Log(library.ILogger):  # type: ignore[misc, name-defined]
        """Keeps the errors, for the message to the user."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

        def last(self) -> str:
            return self.errors[-1] if self.errors else "it gives no reason"

    return Log()


def _created(library: Any, log: Any) -> Any:
    try:
        return library.Builder(log)
    except Exception as err:  # pybind raises TypeError when the constructor returned null
        raise UserError(
            f"TensorRT {library.__version__} cannot build here: {cuda.missing_gpu() or log.last()}",
            'build on the device, or pip install "vit-edge[tensorrt-rtx]", which needs no GPU',
        ) from err


def _cached_engine(library: Any, onnx_path: Path, target: Target, gpu: dict[str, str]) -> tuple[bytes, tuple[str, ...]]:
    """The engine's bytes and the names of the network's products, from the user's cache or built into it.

    The key holds all that an engine depends on. Only what this machine built itself is ever deserialised.
    """
    batches = [target.batch, target.dynamic_batch]
    key = json.dumps([digest_and_size(onnx_path)["sha256"], gpu, library.__name__, library.__version__, batches])
    folder = Path.home() / ".cache" / "vit-edge" / "engines"
    plan = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.plan"
    names = plan.with_suffix(".json")
    if not plan.exists() or not names.exists():
        check_apart(onnx_path, target)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        build = _Build(library, onnx_path, target)
        names.write_text(json.dumps(tensorrt_layers.products(library, build.network)), encoding="utf-8")
        temporary = plan.with_suffix(".tmp")
        temporary.write_bytes(bytes(build.serialized()))
        temporary.replace(plan)
    return plan.read_bytes(), tuple(json.loads(names.read_text(encoding="utf-8")))
