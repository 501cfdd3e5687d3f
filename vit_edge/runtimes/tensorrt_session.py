"""An engine on a GPU: its execution context, its buffers, and one CUDA graph of a whole query."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.errors import UserError
from vit_edge.runtimes import cuda, engine_cache, tensorrt_apart, tensorrt_layers
from vit_edge.runtimes.base import Coverage, in_batches
from vit_edge.runtimes.tensorrt_build import batches
from vit_edge.target import Target

NUMPY_TYPES = {"FLOAT": np.float32, "HALF": np.float16, "UINT8": np.uint8, "INT8": np.int8, "INT32": np.int32}
ANEW = f"delete {engine_cache.FOLDER}: engines are built again"


class TensorRtSession:
    """unfused: attention in its parts (`tensorrt_build.Build`)."""

    def __init__(self, library: Any, onnx_path: Path, target: Target, *, unfused: bool):
        ordinal = int(target.device.partition(":")[2] or 0)
        self._library, self._unfused, self._batch = library, unfused, target.batch
        self._gpu, self._stream = cuda.describe(ordinal), cuda.Stream(ordinal)
        built = _built(library, onnx_path, target, self._gpu, unfused)
        self._record = built.record
        self._runtime = library.Runtime(library.Logger(library.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(built.plan)
        if self._engine is None:
            raise UserError(f"TensorRT cannot open the engine of {onnx_path} that it built", ANEW)
        self._context = self._engine.create_execution_context()
        self._input = next(name for name in self._tensors() if self._is_input(name))
        self._input_address, self._output_BK, self._output_address = self._bound()
        self._recorded = self._warm_up()

    def run(self, images_BHWC: np.ndarray) -> np.ndarray:
        pieces = [self._run_batch(piece)[:real] for piece, real in in_batches(images_BHWC, self._batch)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def coverage(self) -> Coverage:
        inspector = self._engine.create_engine_inspector()
        text = inspector.get_engine_information(self._library.LayerInformationFormat.JSON)
        return tensorrt_layers.coverage(json.loads(text), self._record["products"])

    def describe(self) -> dict[str, Any]:
        shape = list(self._engine.get_tensor_shape(self._input))
        return {
            "runtime": "tensorrt",
            "version": self._library.__version__,
            **self._gpu,
            "batch": self._batch,
            "open_batch": shape[0] == -1,
            "precision": self._record["precision"],
            "input": {"type": np.dtype(self._numpy_type(self._input)).name, "shape": shape},
            "cuda_graph": self._recorded,
            "attention": "unfused" if self._unfused else "fused",
        }

    def __enter__(self) -> "TensorRtSession":
        return self

    def __exit__(self, *_: object) -> None:
        del self._context, self._engine, self._runtime
        self._stream.close()

    def _bound(self) -> tuple[int, np.ndarray, int]:
        """Gives every input and output its memory: addresses of the input and of the logits, and logits on this side."""
        whole = (self._batch, *tuple(self._engine.get_tensor_shape(self._input))[1:])
        self._context.set_input_shape(self._input, whole)
        addresses, arrays = {}, {}
        for name in self._tensors():
            arrays[name] = np.empty(tuple(self._context.get_tensor_shape(name)), self._numpy_type(name))
            addresses[name] = self._stream.allocate(arrays[name].nbytes)
            self._context.set_tensor_address(name, addresses[name])
        output = self._record["output"]
        return addresses[self._input], arrays[output], addresses[output]

    def _warm_up(self) -> bool:
        """Runs once, which settles the context's own state, and then records a query; whether that was possible."""
        self._execute()
        self._stream.synchronize()
        return self._stream.record(self._enqueue)

    def _run_batch(self, images_BHWC: np.ndarray) -> np.ndarray:
        self._stream.upload(self._input_address, images_BHWC)
        if self._recorded:
            self._stream.replay()
        else:
            self._execute()
        self._stream.download(self._output_BK, self._output_address)
        self._stream.synchronize()
        return self._output_BK.astype(np.float32)

    def _execute(self) -> None:
        if not self._enqueue():
            raise UserError("TensorRT cannot run the engine that it built", ANEW)

    def _enqueue(self) -> bool:
        return bool(self._context.execute_async_v3(self._stream.handle))

    def _tensors(self) -> list[str]:
        """Names of the inputs and outputs."""
        return [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]

    def _is_input(self, tensor: str) -> bool:
        return bool(self._engine.get_tensor_mode(tensor) == self._library.TensorIOMode.INPUT)

    def _numpy_type(self, tensor: str) -> Any:
        return NUMPY_TYPES[self._engine.get_tensor_dtype(tensor).name]


def _built(library: Any, onnx_path: Path, target: Target, gpu: dict[str, str], unfused: bool) -> engine_cache.Engine:
    wanted = engine_cache.wanted_for(onnx_path, gpu, library, batches(target), unfused=unfused)
    build = partial(tensorrt_apart.build_engine, onnx_path, target, unfused=unfused)
    return engine_cache.engine(wanted, build)
