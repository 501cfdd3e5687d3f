"""OpenVINO on CPU, GPU or NPU. The only module that imports openvino."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.errors import UserError
from vit_edge.runtimes import machine
from vit_edge.runtimes.base import Coverage, Probe, Product, batch_of_graph, check_input, imported, in_batches
from vit_edge.target import Target

PRODUCT_KINDS = {
    "Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention",
}  # fmt: skip
# What OpenVINO calls a precision → what we call it.
PRECISIONS = {"f32": "f32", "bf16": "bf16", "f16": "fp16", "i8": "int8", "u8": "int8"}
INPUT_TYPES = {"u8": "uint8", "f32": "float32"}
CAPABILITIES = {"BF16": "bf16", "FP16": "fp16"}


class OpenVino:
    name = "openvino"

    @cached_property
    def _library(self) -> Any:
        return imported("openvino", self.name)

    @cached_property
    def _core(self) -> Any:
        return self._library.Core()

    def probe(self) -> Probe:
        try:
            core = self._core
        except UserError as err:
            return Probe(self.name, None, problem=err.problem, fix=err.fix)
        devices = tuple(f"{name}: {core.get_property(name, 'FULL_DEVICE_NAME')}" for name in core.available_devices)
        version = self._library.__version__.partition("-")[0]
        return Probe(self.name, version, devices, self._precisions_of("CPU") if devices else ())

    def float_precisions(self, target: Target) -> tuple[str, ...]:
        return self._precisions_of(self._checked(target))

    def build(self, onnx_path: Path, target: Target, folder: Path) -> list[Path]:
        """Converts to OpenVINO's own format, weights kept as they are: model.xml and model.bin."""
        folder.mkdir(parents=True, exist_ok=True)
        graph = folder / "model.xml"
        try:
            model = self._core.read_model(str(onnx_path))  # convert_model would send telemetry
            self._library.save_model(model, str(graph), compress_to_fp16=False)
        except RuntimeError as err:
            raise _explained(f"convert {onnx_path}", err) from err
        return [graph, graph.with_suffix(".bin")]

    def open(
        self, files: Sequence[Path], target: Target, options: Mapping[str, str] | None = None
    ) -> "OpenVinoSession":
        device = self._checked(target)
        settings = self._settings(target, device) | dict(options or {})
        try:
            model, open_batch = _read(self._core, files[0], target)
            compiled = self._core.compile_model(model, device, settings)
        except RuntimeError as err:
            raise _explained(f"compile {files[0]} for {device}", err) from err
        return OpenVinoSession(self._core, compiled, files[0], target, open_batch)

    def _checked(self, target: Target) -> str:
        """The target's device, which must be here."""
        found = self._core.available_devices
        if target.device.partition(".")[0] not in {name.partition(".")[0] for name in found}:
            raise UserError(
                f"OpenVINO finds no device {target.device!r} here, it finds {', '.join(found) or 'none'}",
                "run on the device that the target names, or install its driver",
            )
        return target.device

    def _precisions_of(self, device: str) -> tuple[str, ...]:
        capabilities = self._core.get_property(device, "OPTIMIZATION_CAPABILITIES")
        return ("f32", *(name for capability, name in CAPABILITIES.items() if capability in capabilities))

    def _settings(self, target: Target, device: str) -> dict[str, Any]:
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if device == "CPU":
            settings |= {"INFERENCE_NUM_THREADS": machine.threads(target), "NUM_STREAMS": 1}
        if target.precision == "default":
            return settings
        if target.precision not in self._precisions_of(device):
            raise UserError(
                f"target {target.name!r}: {device} has no fast {target.precision}, "
                f"it has {', '.join(self._precisions_of(device))}",
                "set precision: default, which takes the best that the device has",
            )
        types = {"f32": self._library.Type.f32, "bf16": self._library.Type.bf16, "fp16": self._library.Type.f16}
        return settings | {"INFERENCE_PRECISION_HINT": types[target.precision]}


class OpenVinoSession:
    def __init__(self, core: Any, compiled: Any, path: Path, target: Target, open_batch: bool):
        self._core, self._compiled, self._path, self._target = core, compiled, path, target
        self._device = core.get_property(target.device, "FULL_DEVICE_NAME")
        self._version = core.get_versions("CPU")["CPU"].build_number.partition("-")[0]
        self._request = compiled.create_infer_request()
        self._batch, self._open_batch = target.batch, open_batch

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        pieces = [self._ran(piece)[:real] for piece, real in in_batches(images_BHWC, self._batch)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def coverage(self) -> Coverage:
        """Read from the compiled graph. A node that fused several operators is looked up in the graph before compiling."""
        products = []
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            if _info(node, "layerType") in PRODUCT_KINDS:
                products.append(_product(node))
            elif _info(node, "layerType") == "Subgraph":
                products += [
                    _fused_product(node, source, self._float_precision)
                    for source in self._sources
                    if _holds(node, source)
                ]
        return Coverage(tuple(products))

    def _ran(self, images_BHWC: np.ndarray) -> np.ndarray:
        """The first output of one batch."""
        try:
            return np.asarray(self._request.infer({0: images_BHWC}, share_inputs=True)[0])
        except RuntimeError as err:
            raise _explained(f"run {self._path}", err) from err

    @cached_property
    def _sources(self) -> list[Any]:
        """The products of the graph before it was compiled."""
        model, _ = _read(self._core, self._path, self._target)
        return [op for op in model.get_ordered_ops() if op.get_type_name() in PRODUCT_KINDS]

    @property
    def _float_precision(self) -> str:
        """Of what is not int8."""
        used = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return PRECISIONS.get(used, used)

    def describe(self) -> dict[str, Any]:
        on_cpu, kind = self._target.device == "CPU", self._compiled.input(0).get_element_type().get_type_name()
        return {
            "runtime": "openvino",
            "version": self._version,
            "device": self._device,
            "threads": self._compiled.get_property("INFERENCE_NUM_THREADS") if on_cpu else None,
            "batch": self._batch,
            "open_batch": self._open_batch,
            "input": {"type": INPUT_TYPES.get(kind, kind), "shape": _shape(self._compiled.input(0))},
            "precision": self._float_precision,
        }

    def __enter__(self) -> "OpenVinoSession":
        return self

    def __exit__(self, *_: object) -> None:
        del self._request, self._compiled


def _read(core: Any, path: Path, target: Target) -> tuple[Any, bool]:
    """The graph for the target's batch, and whether the file leaves that open: fixed here, it is as fast as in the file."""
    model = core.read_model(str(path))
    check_input(path, [_shape(given) for given in model.inputs])
    batch, *rest = _shape(model.input(0))
    batch_of_graph(batch, target)
    if batch is None:
        model.reshape([target.batch, *rest])
    return model, batch is None


def _explained(attempt: str, err: RuntimeError) -> UserError:
    reason = (str(err).strip() or type(err).__name__).splitlines()[-1]
    return UserError(
        f"OpenVINO cannot {attempt}: {reason}",
        "export again for openvino, or install the version that the bundle names",
    )


def _shape(port: Any) -> list[int | None]:
    """Of an input or output; null for a dimension that is open."""
    shape = port.get_partial_shape()
    sizes = list(shape) if shape.rank.is_static else []
    return [size.get_length() if size.is_static else None for size in sizes]


def _product(node: Any) -> Product:
    precision, kind = _info(node, "runtimePrecision"), _info(node, "layerType")
    names = tuple(dict.fromkeys((*_names(node), node.get_friendly_name())))
    return Product(names, kind, PRECISIONS.get(precision, precision), _multiply_adds(kind, node))


def _fused_product(node: Any, source: Any, precision: str) -> Product:
    """One product inside a fused node: int8 when its second operand is quantized and the node takes that as int8; else in
    `precision`, that of the graph's floats: a node is named after what it takes.
    """
    weights = math.prod(source.input(1).get_partial_shape().get_min_shape())
    takes = {
        math.prod(port.get_partial_shape().get_min_shape())
        for port in node.inputs()
        if port.get_element_type().get_type_name() in ("i8", "u8")
    }
    in_int8 = weights in takes and _is_quantized(source.input_value(1).get_node())
    kind = source.get_type_name()
    return Product((source.get_friendly_name(),), kind, "int8" if in_int8 else precision, _multiply_adds(kind, source))


def _is_quantized(node: Any) -> bool:
    """Whether what the node makes was quantized and is given back as floats, or is a weight that was."""
    while node.get_type_name() in ("Multiply", "Subtract"):
        node = node.input_value(0).get_node()
    return node.get_type_name() in ("Convert", "FakeQuantize")


def _holds(node: Any, source: Any) -> bool:
    """Whether a compiled node fused the operator; some keep only the name of the addition that follows a product."""
    following = [port.get_node().get_friendly_name() for port in source.output(0).get_target_inputs()]
    names = _names(node)
    return source.get_friendly_name() in names or (len(following) == 1 and following[0] in names)


def _names(node: Any) -> list[str]:
    return _info(node, "originalLayersNames").split(",")


def _info(node: Any, key: str) -> str:
    info = node.get_rt_info()
    return info[key].astype(str) if key in info else ""


def _multiply_adds(kind: str, node: Any) -> int | None:
    """Of a product in a graph, from its shapes; null when one is dynamic."""
    shapes = [port.get_partial_shape() for port in (*node.inputs()[:2], node.output(0))]
    if any(shape.is_dynamic for shape in shapes):
        return None
    first, weight, result = (list(shape.to_shape()) for shape in shapes)
    if "onvolution" in kind:
        return math.prod(result) * math.prod(weight[-3:])
    return math.prod(first) * result[-1]
