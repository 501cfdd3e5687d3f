import onnx_ir as ir

from tests.small_models import built, images, run_onnx
from vit_edge.export import onnx
from vit_edge.export.graph import entry, producer
from vit_edge.export.moves import MOVES, quantize_before_moves


def moved_then_quantized(graph: ir.Model) -> int:
    """Quantizings that stand behind a move."""
    made = [entry(node, 0).producer() for node in graph.graph if node.op_type == "QuantizeLinear"]
    return sum(node is not None and node.op_type in MOVES for node in made)


def test_quantizing_goes_before_the_moves_and_changes_no_bit() -> None:
    graph, sample = onnx.with_batch(built("vit").canonical, 3), images(3, seed=5)
    assert moved_then_quantized(graph) > 0
    before = run_onnx(graph, sample, optimised=False)
    quantize_before_moves(graph, {})
    assert moved_then_quantized(graph) == 0
    assert (run_onnx(graph, sample, optimised=False) == before).all()


def test_a_move_that_others_read_stays_before_the_quantizing() -> None:
    graph = onnx.with_batch(built("vit").canonical, 3)
    quantize = next(
        node for node in graph.graph if node.op_type == "QuantizeLinear" and producer(entry(node, 0), "Reshape")
    )
    moved = entry(quantize, 0)
    graph.graph.append(ir.node("Identity", [moved]))
    quantize_before_moves(graph, {})
    assert entry(quantize, 0) is moved
