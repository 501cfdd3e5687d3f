"""From ONNX to an engine's bytes, or a reason why not. Runs in a process of its own (`tensorrt_apart`): TensorRT's parser
and builder crash on some broken graphs, and a crash of theirs must not be one of ours.
"""

import importlib.util
from pathlib import Path
from typing import Any

from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, tensorrt_layers
from vit_edge.runtimes.base import batch_of_graph, check_input, imported
from vit_edge.target import Target

BUILDS = {"tensorrt": "tensorrt", "tensorrt_rtx_bindings": "tensorrt-rtx"}
# An engine whose batch is left open takes up to so many images at once, and is tuned for the target's batch.
LARGEST_BATCH = 32


def installed() -> tuple[str, Any]:
    """The name of the installed build's module, and the module. UserError when there is none."""
    for module in BUILDS:
        if importlib.util.find_spec(module):
            return module, imported(module, BUILDS[module])
    raise UserError(
        "TensorRT is not installed: neither tensorrt nor tensorrt_rtx_bindings",
        'pip install "vit-edge[tensorrt-rtx]" (builds without a GPU), or "vit-edge[tensorrt]" on the device',
    )


def batches(target: Target) -> tuple[int, int, int]:
    """Images that an engine takes at once, where the graph leaves that open: at least, what it is tuned for, at most."""
    if not target.dynamic_batch:
        return target.batch, target.batch, target.batch
    return 1, target.batch, max(target.batch, LARGEST_BATCH)


def prove(onnx_path: Path, target: Target) -> str:
    """Parses and builds for every architecture that the target names, as far as it can here; says in words what was built."""
    module, tensorrt = installed()
    if BUILDS[module] == "tensorrt":
        Build(tensorrt, onnx_path, target).serialized()
        return f"parses and builds with TensorRT {tensorrt.__version__}"
    Build(tensorrt, onnx_path, target)
    built = [_built_for(tensorrt, onnx_path, target, asked) for asked in target.compute_capabilities]
    return f"parses with TensorRT-RTX {tensorrt.__version__}; builds for {', '.join(built) or 'nothing, none is named'}"


class Build:
    """An ONNX file parsed into a strongly typed network, ready to be built.

    unfused: softmax's results are outputs of the network too, so that no kernel computes attention as a whole;
    fused attention has been seen to be wrong (TensorRT 10.7 in every precision, up to 10.16 on compute capability 12.0).
    """

    def __init__(self, library: Any, onnx_path: Path, target: Target, *, unfused: bool = False):
        self._library, self._path = library, onnx_path
        self._log = _log(library)
        self._builder = _created(library, self._log)
        # TensorRT 11 knows strongly typed networks only and may drop the flag.
        flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.network = self._builder.create_network(0 if flag is None else 1 << int(flag))
        self._parse()
        self.output, self.layers = self.network.get_output(0).name, tensorrt_layers.layers_of(self.network)
        if unfused:
            self._mark_softmax()
        self._config = self._builder.create_builder_config()
        self._config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
        self._config.clear_flag(library.BuilderFlag.TF32)  # f32 is f32: ten bits are not what parity allows
        self._fix_batch(target)

    def serialized(self, compute_capability: str | None = None) -> bytes:
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
        return bytes(plan)

    def use_timings(self, path: Path) -> None:
        """Starts from the kernels' times that earlier builds for this GPU and version measured."""
        self._timings = self._config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        self._config.set_timing_cache(self._timings, ignore_mismatch=False)

    def timings(self) -> bytes:
        """The times after building, those from before among them."""
        return bytes(self._config.get_timing_cache().serialize())

    def record(self) -> dict[str, Any]:
        """What a session must know of the network that the engine does not tell."""
        return {
            "output": self.output,
            "products": tensorrt_layers.products(self._library, self.network),
            "precision": tensorrt_layers.float_precision(self._library, self.layers),
        }

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

    def _mark_softmax(self) -> None:
        for layer in self.layers:
            if layer.type == self._library.LayerType.SOFTMAX:
                self.network.mark_output(layer.get_output(0))

    def _choose(self, compute_capability: str) -> None:
        name = "SM" + compute_capability.replace(".", "")
        self._config.num_compute_capabilities = 1
        self._config.set_compute_capability(getattr(self._library.ComputeCapability, name), 0)

    def _fix_batch(self, target: Target) -> None:
        given = self.network.get_input(0)
        shapes = [tuple(self.network.get_input(index).shape) for index in range(self.network.num_inputs)]
        check_input(self._path, [[None if size < 0 else size for size in shape] for shape in shapes])
        batch_of_graph(shapes[0][0], target)
        if shapes[0][0] == -1:
            profile = self._builder.create_optimization_profile()
            profile.set_shape(given.name, *((batch, *shapes[0][1:]) for batch in batches(target)))
            self._config.add_optimization_profile(profile)


def _built_for(library: Any, onnx_path: Path, target: Target, asked: str) -> str:
    """Builds for a compute capability, or the nearest older one of its generation that this build knows; says which."""
    known = [f"{n[2:-1]}.{n[-1]}" for n in dir(library.ComputeCapability) if n.startswith("SM")]
    fitting = [one for one in known if one.partition(".")[0] == asked.partition(".")[0] and one <= asked]
    if not fitting:
        return f"none in place of {asked}, which this build does not know"
    nearest = max(fitting)
    Build(library, onnx_path, target).serialized(nearest)
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
