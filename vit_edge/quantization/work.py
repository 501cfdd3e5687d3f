"""What a graph has to compute for an image: what goes by work, not by the number of layers, is reckoned with it."""

from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from vit_edge.quantization.products import parameter, products


@torch.no_grad()
def multiply_adds(graph_module: GraphModule, image_1HWC: np.ndarray) -> dict[str, int]:
    """Of the layers with weights, for one image, by name."""
    run = _Counting(graph_module)
    run.run(torch.from_numpy(image_1HWC.copy()))
    return run.multiply_adds


class _Counting(Interpreter):
    def __init__(self, graph_module: GraphModule):
        super().__init__(graph_module)
        weighted = [p for p in products(graph_module) if p.kind in ("linear", "conv")]
        self.weights = {p.node: (p.name, parameter(graph_module, p.weight)) for p in weighted}
        self.multiply_adds: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self.weights:
            name, weight = self.weights[n]
            assert weight is not None
            self.multiply_adds[name] = value.numel() * weight[0].numel()
        return value
