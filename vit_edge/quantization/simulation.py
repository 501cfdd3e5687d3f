"""What an int8 graph would answer, computed in float: for choosing, never for reporting.

N images, K classes.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.quantization.layerwise import to_int8
from vit_edge.quantization.products import products, why_float
from vit_edge.quantization.ranges import Range

BATCH = 32


class Simulation(Interpreter):
    """Inputs of every int8 product go through int8; weights are taken as they are, on their grid already."""

    def __init__(self, graph_module: GraphModule, ranges: Mapping[str, Range], float_layers: Collection[str] = ()):
        super().__init__(graph_module)
        found = [p for p in products(graph_module) if why_float(p, float_layers) is None]
        self.inputs = {p.node: ranges[p.inputs[0].name] for p in found}

    def run_node(self, n: Node) -> Any:
        found = self.inputs.get(n)
        if found is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        assert callable(n.target)
        return n.target(to_int8(args[0], found), *args[1:], **kwargs)


@torch.no_grad()
def logits(run: Any, images_NHWC: np.ndarray, device: torch.device | None = None) -> np.ndarray:
    """Of a graph, of a simulation's `run`, or of a module on `device`."""
    pieces = range(0, len(images_NHWC), BATCH)
    batches = (torch.from_numpy(images_NHWC[i : i + BATCH].copy()).to(device) for i in pieces)
    return np.concatenate([run(batch).cpu().numpy() for batch in batches])
