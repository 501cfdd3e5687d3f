"""The runtimes by name, each loaded only when it is asked for."""

import importlib
from typing import cast

from vit_edge.errors import unknown
from vit_edge.runtimes.base import Runtime

RUNTIMES = {
    "onnxruntime": "vit_edge.runtimes.onnxruntime:OnnxRuntime",
    "openvino": "vit_edge.runtimes.openvino:OpenVino",
    "tensorrt": "vit_edge.runtimes.tensorrt:TensorRt",
}


def load(name: str) -> Runtime:
    """The runtime called `name`; its library need not be installed."""
    if name not in RUNTIMES:
        raise unknown("runtime", name, RUNTIMES)
    module, _, attribute = RUNTIMES[name].partition(":")
    return cast(Runtime, getattr(importlib.import_module(module), attribute)())
