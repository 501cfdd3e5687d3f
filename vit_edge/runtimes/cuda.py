"""GPU memory and streams through cuda-python, in both of its layouts. The only module that imports cuda."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vit_edge.errors import UserError

INSTALL = 'pip install "vit-edge[tensorrt]"'


def library() -> Any:
    """cuda-python's runtime module: `cuda.bindings.runtime` since 12.8, `cuda.cudart` before."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        try:
            from cuda import cudart as runtime
        except ImportError as err:
            raise UserError("cuda-python is not installed", INSTALL) from err
    return runtime


def missing_gpu() -> str | None:
    """Why no CUDA GPU can be used here, in words; null when one can."""
    try:
        cudart = library()
        error, count = cudart.cudaGetDeviceCount()
    except UserError as err:
        return f"{err.problem} ({err.fix})"
    except Exception as err:  # the bindings raise their own types when there is no driver
        return f"no NVIDIA driver: {str(err).splitlines()[0]}"
    if int(error) != 0:
        return f"no CUDA GPU: {cudart.cudaGetErrorString(error)[1].decode()}"
    return None if count else "no CUDA GPU: the driver lists none"


def describe(ordinal: int) -> dict[str, str]:
    """Name, compute capability and driver of a GPU."""
    cudart = library()
    properties = _checked(cudart.cudaGetDeviceProperties(ordinal))
    driver = _checked(cudart.cudaDriverGetVersion())
    return {
        "device": properties.name.decode().rstrip("\0"),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
    }


class Stream:
    """A stream on one GPU and the buffers that live with it. Freed by `close`."""

    def __init__(self, ordinal: int):
        self._cudart = library()
        _checked(self._cudart.cudaSetDevice(ordinal))
        self.handle = int(_checked(self._cudart.cudaStreamCreate()))
        self._buffers: list[int] = []
        self._graph: Any = None

    def allocate(self, size_bytes: int) -> int:
        """The address of new GPU memory."""
        address = int(_checked(self._cudart.cudaMalloc(size_bytes)))
        self._buffers.append(address)
        return address

    def upload(self, address: int, array: np.ndarray) -> None:
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        _checked(self._cudart.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.handle))

    def download(self, array: np.ndarray, address: int) -> None:
        """Fills `array`; its contents are valid after `synchronize`."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _checked(self._cudart.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self.handle))

    def record(self, work: Callable[[], bool]) -> bool:
        """Keeps what `work` puts on the stream as a CUDA graph for `replay`; whether that was possible.

        Nothing is run. work: whether it went well; memory that it uses must stay where it is.
        """
        mode = self._cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _checked(self._cudart.cudaStreamBeginCapture(self.handle, mode))
        went_well = work()
        error, graph = self._cudart.cudaStreamEndCapture(self.handle)
        if went_well and int(error) == 0:
            error, ready = self._cudart.cudaGraphInstantiate(graph, 0)
            self._graph = ready if int(error) == 0 else None
            _checked(self._cudart.cudaGraphDestroy(graph))
        self._cudart.cudaGetLastError()  # what could not be recorded is no error of what follows
        return self._graph is not None

    def replay(self) -> None:
        """Runs what was recorded, in one launch."""
        _checked(self._cudart.cudaGraphLaunch(self._graph, self.handle))

    def synchronize(self) -> None:
        _checked(self._cudart.cudaStreamSynchronize(self.handle))

    def close(self) -> None:
        if self._graph is not None:
            _checked(self._cudart.cudaGraphExecDestroy(self._graph))
        for address in self._buffers:
            _checked(self._cudart.cudaFree(address))
        _checked(self._cudart.cudaStreamDestroy(self.handle))


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a CUDA call, whose first part is an error code."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {int(error)}: {library().cudaGetErrorString(error)[1].decode()}")
    return values[0] if values else None
