"""How large the values of an exported graph become on real images: what fp16, which ends at 65504, could not hold.

magnitudes.json holds them by graph ("float", "int8") and value name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.export.onnx import OUTPUT
from vit_edge.quantization.batches import batches
from vit_edge.store import write_json

SCHEMA = "vit-edge/magnitudes/1"
aten = torch.ops.aten
LAYER_NORMS = {aten.layer_norm.default, aten.native_layer_norm.default}


@dataclass(frozen=True)
class Magnitude:
    """largest: of |x|. energy: largest Σx² over the last axis where a LayerNorm reads the value, else None."""

    largest: float
    energy: float | None = None

    def joined(self, other: "Magnitude") -> "Magnitude":
        """Of both parts of the images."""
        energies = [energy for energy in (self.energy, other.energy) if energy is not None]
        return Magnitude(max(self.largest, other.largest), max(energies, default=None))


@torch.no_grad()
def observe(program: torch.onnx.ONNXProgram, images_NHWC: np.ndarray) -> dict[str, Magnitude]:
    """Of every float value that both the exporter's graph and its ONNX model have; they bear the same names.

    program: of `onnx.program`. images_NHWC: uint8 (N, H, W, 3).
    """
    assert program.exported_program is not None
    recorder = _Recorder(program.exported_program.module(check_guards=False))
    for images_BHWC in batches(images_NHWC):
        recorder.run(images_BHWC)
    return recorder.found


def write(path: Path, graphs: Mapping[str, Mapping[str, Magnitude]]) -> None:
    """Writes magnitudes.json: graph → value name → magnitude."""
    told = {graph: {name: asdict(one) for name, one in found.items()} for graph, found in graphs.items()}
    write_json(path, {"schema": SCHEMA, "graphs": told})


def read(path: Path, graph: str) -> dict[str, Magnitude]:
    """What `write` wrote of one graph."""
    values = json.loads(path.read_text(encoding="utf-8"))["graphs"][graph]
    return {name: Magnitude(**found) for name, found in values.items()}


class _Recorder(Interpreter):
    def __init__(self, graph_module: GraphModule):
        super().__init__(graph_module)
        self.found: dict[str, Magnitude] = {}
        (result,) = (node for node in graph_module.graph.nodes if node.op == "output")
        self._results = set(result.all_input_nodes)

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_floating_point():
            normed = any(reader.target in LAYER_NORMS and reader.args[0] is node for reader in node.users)
            one = Magnitude(float(value.abs().max()), float(value.square().sum(-1).max()) if normed else None)
            name = OUTPUT if node in self._results else node.name
            self.found[name] = self.found[name].joined(one) if name in self.found else one
        return value
