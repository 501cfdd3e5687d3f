"""What works on this machine, and what is missing. Loads the runtimes' libraries, never torch."""

import platform
from dataclasses import asdict
from typing import Any

from vit_edge.runtimes import machine, registry
from vit_edge.store import versions

TRAINING = (
    "torch",
    "torchvision",
    "timm",
    "torchao",
    "accelerate",
    "onnx",
    "onnxscript",
    "safetensors",
    "scikit-learn",
)


def findings() -> dict[str, Any]:
    """The machine, each runtime's probe, and the training side's packages, as plain JSON data."""
    training = versions(*TRAINING)
    missing = [name for name, version in training.items() if version == "not installed"]
    return {
        "schema": "vit-edge/doctor/1",
        "versions": {"python": platform.python_version(), **versions("vit-edge", "numpy", "pillow")},
        "machine": machine.machine(),
        "runtimes": [asdict(registry.load(name).probe()) for name in registry.RUNTIMES],
        "training": training,
        "training_fix": 'pip install "vit-edge[train]"' if missing else None,
    }
