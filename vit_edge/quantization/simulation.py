"""What an int8 graph would answer, computed in float: for choosing, never for reporting.

N images, K classes.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from vit_edge import memory
from vit_edge.quantization import integers
from vit_edge.quantization.batches import batches
from vit_edge.quantization.layerwise import Outcome
from vit_edge.quantization.outputs import written
from vit_edge.quantization.products import products, why_float
from vit_edge.quantization.ranges import Range
from vit_edge.quantization.steps import steps_of, to_int8, to_uint8


class Simulation(Interpreter):
    """Inputs of every int8 product go through int8; weights are taken as they are, on their grid already.

    outcome: what put them there. with_outputs: outputs of convolutions go through uint8 (outputs.py).
    """

    def __init__(
        self,
        graph_module: GraphModule,
        outcome: Outcome,
        float_layers: Collection[str] = (),
        with_outputs: bool = False,
    ):
        super().__init__(graph_module)
        self.ranges, self.symmetric = outcome.ranges, outcome.symmetric
        self.outputs = written(graph_module, float_layers) if with_outputs else {}
        found = [p for p in products(graph_module) if why_float(p, float_layers) is None]
        self.inputs = {p.node: self.ranges[p.inputs[0].name] for p in found}
        linear = [p for p in found if p.kind == "linear" and p.name in outcome.scales and integers.run_here()]
        self.scales_O = {p.node: outcome.scales[p.name] for p in linear}
        self._last: tuple[Any, torch.Tensor] | None = None

    def run_node(self, n: Node) -> Any:
        found = self.inputs.get(n)
        if found is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        assert callable(n.target)
        inputs = self._int8(args[0], found)
        if n in self.scales_O:
            steps = steps_of(found, self.symmetric)
            return integers.linear(inputs, steps, args[1], self.scales_O[n], *(args[2:] or (None,)))
        output = n.target(inputs, *args[1:], **kwargs)
        return to_uint8(output, self.ranges[n.name], self.outputs[n]) if n in self.outputs else output

    def _int8(self, values: torch.Tensor, found: Range) -> torch.Tensor:
        """Once for q, k and v, which read the same tensor one after the other."""
        if self._last is None or self._last[0] is not values:
            self._last = values, to_int8(values, found, self.symmetric)
        return self._last[1]


@memory.kept()
@torch.no_grad()
def logits(run: Any, images_NHWC: np.ndarray, device: torch.device | None = None) -> np.ndarray:
    """Of a graph, of a simulation's `run`, or of a module on `device`."""
    return np.concatenate([run(images_BHWC.to(device)).cpu().numpy() for images_BHWC in batches(images_NHWC)])
