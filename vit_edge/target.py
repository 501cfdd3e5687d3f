"""A device profile: runtime, precision, threads, batch and measuring protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, Strict

from vit_edge.errors import unknown
from vit_edge.safety.documents import Text
from vit_edge.settings import Settings, parse
from vit_edge.shipped import shipped

RuntimeName = Literal["onnxruntime", "openvino", "tensorrt"]
ALIASES = {"onnx": "onnxruntime"}


class Protocol(Settings):
    """How latency is measured: int8 and float in turn, batch after batch, on varied real images."""

    warmup: int = Field(20, gt=0, le=10_000, description="runs before each artefact is timed; more until it is steady")
    seconds: float = Field(5.0, gt=0, le=3600, description="time to measure for, all artefacts together")
    seconds_each: float = Field(0.0, ge=0, le=3600, description="least time to measure each artefact for")
    min_queries: int = Field(
        50, gt=0, le=100_000, description="least timed runs of each artefact, even if it takes longer"
    )
    max_queries: int = Field(2000, gt=0, le=10_000_000)


class Target(Settings):
    name: Text
    runtime: RuntimeName
    description: Text = ""
    device: str = Field(
        "CPU",
        pattern=r"^[A-Za-z]+([.:]\d{1,3})?$",
        description="the runtime's own name of the device: CPU, GPU.0, NPU, cuda:0",
    )
    precision: Literal["default", "f32", "bf16", "fp16"] = Field(
        "default", description="precision of what is not int8; default: what the runtime chooses on the device"
    )
    threads: int | None = Field(None, gt=0, le=1024, description="threads of one inference; null: every physical core")
    batch: int = Field(1, gt=0, le=4096)
    dynamic_batch: bool = Field(
        False, description="leave the files' batch open; `batch` is then what a session is opened for"
    )
    reduced_range: bool = Field(
        False,
        description="bring int8 with weights of seven bits too, for an x86 CPU without VNNI, where eight saturate",
    )
    compute_capabilities: Annotated[tuple[str, ...], Strict(False)] = Field(
        (), description="TensorRT: the GPU architectures that the graph is built for as a proof, e.g. 8.7"
    )
    protocol: Protocol = Protocol()

    @property
    def fixed_batch(self) -> int | None:
        """What the files' batch is; None where it is open."""
        return None if self.dynamic_batch else self.batch


GENERIC = {
    "onnxruntime": Target(name="onnxruntime", runtime="onnxruntime", description="ONNX Runtime on this machine's CPU"),
    "openvino": Target(name="openvino", runtime="openvino", description="OpenVINO on this machine's CPU"),
    "tensorrt": Target(
        name="tensorrt",
        runtime="tensorrt",
        description="TensorRT on this machine's GPU",
        device="cuda:0",
        compute_capabilities=("8.6", "8.9"),
    ),
}


class Roundings(NamedTuple):
    """Shares of targets. outputs: whose int8 convolutions write uint8 (quantization/outputs.py). symmetric: that have no
    finer steps than symmetric int8 (quantization/steps.py); a model for others too is fitted to the others."""

    outputs: float
    symmetric: float

    @classmethod
    def of(cls, targets: Sequence[Target]) -> "Roundings":
        runtimes, count = [target.runtime for target in targets], max(1, len(targets))
        return cls(runtimes.count("onnxruntime") / count, runtimes.count("tensorrt") / count)


def ways(share: float) -> list[bool]:
    """Of what a share of the targets does: whether it is not done, done, or both."""
    return [way for way, asked in ((False, share < 1), (True, share > 0)) if asked]


def load(name: str) -> Target:
    """The profile called `name`: a runtime's generic one, one of targets/, or the path of a YAML file."""
    name = ALIASES.get(name, name)
    if name in GENERIC:
        return GENERIC[name]
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped("targets").get(name)
    if path is None:
        raise unknown("target", name, known())
    from vit_edge import yaml_text

    return parse(Target, {"name": path.stem} | (yaml_text.read(path) or {}), str(path))


def known() -> list[str]:
    """Names that `load` takes, beside paths."""
    return sorted([*GENERIC, *ALIASES, *shipped("targets")])
