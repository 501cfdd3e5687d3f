"""Which nodes of an f32 graph fp16, which ends at 65504, would not serve: decided by what the values were on real images.

NVIDIA's kernels may add up in fp16 what is fp16 in the graph: sums over many values count, not only what is stored.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import onnx_ir as ir

from vit_edge.export.graph import array, entry, name_of, only_consumer
from vit_edge.export.magnitudes import Magnitude
from vit_edge.export.operator_types import F32, has_fp16_form

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_subnormal) / 2
MARGIN = 4.0
"""How many times as large as on the images that were seen a value may become on others."""
SUMS = {"ReduceMean", "ReduceSum", "GlobalAveragePool"}
# Sums of squares that are not measured.
SQUARES = {"InstanceNormalization", "GroupNormalization", "ReduceL2", "ReduceSumSquare", "LpNormalization"}

Magnitudes = Mapping[str, Magnitude]


def kept_in_f32(model: ir.Model, magnitudes: Magnitudes) -> dict[str, str]:
    """Name → reason, of each node that must compute in f32. The model's values have types."""
    reasons = {str(node.name): _why(node, magnitudes, model.graph.opset_imports[""]) for node in model.graph}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why(node: ir.Node, magnitudes: Magnitudes, opset: int) -> str | None:
    floats = [value for value in (*node.inputs, *node.outputs) if value is not None and value.dtype == F32]
    if not floats:
        return None
    constants = [value for value in floats if value.is_initializer()]
    computed = [value for value in floats if not value.is_initializer()]
    if not all(_fits(array(constant)) for constant in constants):
        return "fp16 does not hold its constant"
    if any(_largest(value, magnitudes) > LARGEST / MARGIN for value in computed):
        return "a value is too large"
    if _adds_up_to(node, magnitudes) > LARGEST / MARGIN:
        return "a sum is too large"
    return None if has_fp16_form(node, opset) else "the operator has no fp16 form"


def _fits(numbers: np.ndarray) -> bool:
    """Nothing beyond fp16's largest number, and no lone number, an ε say, that becomes zero."""
    lost = numbers.size == 1 and 0 < abs(float(numbers.reshape(()))) < SMALLEST
    return not lost and bool(np.abs(numbers).max(initial=0) <= LARGEST)


def _adds_up_to(node: ir.Node, magnitudes: Magnitudes) -> float:
    """A bound of the sums that a normalisation or a reduction makes on its way."""
    if node.op_type in SQUARES:
        return np.inf
    if node.op_type in SUMS:
        return _largest(entry(node, 0), magnitudes) * _terms(node)
    if node.op_type == "LayerNormalization":
        found = magnitudes.get(name_of(entry(node, 0)))
        return found.energy if found is not None and found.energy is not None else np.inf
    return 0.0


def _largest(value: ir.Value, magnitudes: Magnitudes) -> float:
    """Of |x|, as seen; a bound for a product without its bias, which is no value of the exporter's graph."""
    found = magnitudes.get(name_of(value))
    if found is not None:
        return found.largest
    reader = only_consumer(value)
    if reader is None or reader.op_type != "Add" or name_of(reader.outputs[0]) not in magnitudes:
        return 0.0
    biases = (np.abs(array(one)).max() for one in reader.inputs if one is not None and one.is_initializer())
    return magnitudes[name_of(reader.outputs[0])].largest + float(max(biases, default=0.0))


def _terms(reduction: ir.Node) -> int:
    """How many values it adds up for each that it makes; a batch that is open counts on neither side."""
    read, made = (_size(value) for value in (entry(reduction, 0), reduction.outputs[0]))
    return max(1, read // made)


def _size(value: ir.Value) -> int:
    assert value.shape is not None
    return prod(size for size in value.shape if isinstance(size, int))
