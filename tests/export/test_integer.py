from tests.small_models import built, images, operators, run_onnx, worst
from vit_edge.export import lower, onnx
from vit_edge.export.integer import integer_products


def test_a_linear_layer_in_one_operator_gives_the_same() -> None:
    graph, sample = onnx.with_batch(built("vit").canonical, 3), images(3, seed=6)
    lower.in_uint8(graph, built("vit").by_value)
    before = run_onnx(graph, sample, optimised=False)
    integer_products(graph, {})
    onnx.tidy(graph)
    layers = [product for product in built("vit").products if product.kind == "linear"]
    assert operators(graph)["MatMulIntegerToFloat"] + operators(graph)["Gemm"] == len(layers)
    assert operators(graph)["MatMul"] == 4  # attention's
    assert worst(run_onnx(graph, sample, optimised=False), before) < 1e-4
