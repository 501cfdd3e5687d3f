from pathlib import Path

import numpy as np
import onnx as onnx_library
import onnx_ir as ir
import pytest

from tests.small_models import SIDE, build, built, classifier, cnn, images, logits_of, operators, run_onnx, vit, worst
from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.export.graph import array, entry, producer, product_name, products

KINDS = pytest.mark.parametrize("kind", ["vit", "cnn"])


@KINDS
@pytest.mark.parametrize("batch", [1, 4])
def test_float_onnx_equals_torch(kind: str, batch: int) -> None:
    found, sample = built(kind), images(batch, seed=3)
    expected = logits_of(found.classifier, sample)
    assert worst(run_onnx(found.floats, sample), expected) < 1e-4
    assert worst(run_onnx(onnx.with_batch(found.floats, batch), sample), expected) < 1e-4


@KINDS
@pytest.mark.parametrize("batch", [1, 4])
def test_int8_onnx_equals_the_converted_graph(kind: str, batch: int) -> None:
    found, sample = built(kind), images(batch, seed=3)
    expected = logits_of(found.quantized, sample)
    assert worst(run_onnx(found.canonical, sample, optimised=False), expected) < 1e-3
    assert worst(run_onnx(onnx.with_batch(found.canonical, batch), sample, optimised=False), expected) < 1e-3


@KINDS
def test_the_graph_is_the_canonical_one(kind: str) -> None:
    for node in onnx.with_batch(built(kind).canonical, 1).graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero_point = array(entry(node, 2))
            assert zero_point.dtype == np.int8
            assert not zero_point.any()
    assert built(kind).canonical.opset_imports == {"": 20}
    given, result = built(kind).canonical.graph.inputs, built(kind).canonical.graph.outputs
    assert [(v.name, str(v.dtype), str(v.shape)) for v in (*given, *result)] == [
        ("images", "UINT8", f"[batch,{SIDE},{SIDE},3]"),
        ("logits", "FLOAT", "[batch,10]"),
    ]


@KINDS
def test_products_are_named_after_modules_in_both_graphs(kind: str) -> None:
    found = built(kind)
    names = [product.name for product in found.products]
    assert [product_name(node) for node in products(found.canonical)] == names
    assert [product_name(node) for node in products(found.floats)] == names
    assert len(set(names)) == len(names)
    assert ("blocks.0.attn.q" if kind == "vit" else "stem.0") in names


@KINDS
def test_every_tensor_that_a_lowering_may_quantize_has_a_range(kind: str) -> None:
    found = built(kind)
    for graph in (found.canonical, onnx.with_batch(found.canonical, 2)):
        for node in products(graph):
            wanted = [before_quantization(entry(node, 0))]
            if "/" in product_name(node):
                wanted.append(before_quantization(entry(node, 1)))
            if node.op_type == "Conv":
                wanted.append(node.outputs[0].name or "")
            assert set(wanted) <= set(found.by_value), product_name(node)


@KINDS
def test_weights_stand_transposed_beside_their_product_with_constants_of_their_own(kind: str) -> None:
    graph = onnx.with_batch(built(kind).canonical, 1)
    constants: list[str | None] = []
    for node in products(graph):
        dequantize = producer(entry(node, 1), "DequantizeLinear")
        if dequantize is None:
            assert "/" in product_name(node)
            continue
        assert all(value is not None and value.is_initializer() for value in dequantize.inputs)
        constants += [value.name for value in dequantize.inputs if value is not None]
    assert len(set(constants)) == len(constants)


@KINDS
def test_the_same_model_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    make = vit if kind == "vit" else cnn
    again = build(make())
    for one, other in ((built(kind).canonical, again.canonical), (built(kind).floats, again.floats)):
        for batch in (None, 1):
            graphs = [model if batch is None else onnx.with_batch(model, batch) for model in (one, other)]
            for index, graph in enumerate(graphs):
                onnx.save(graph, tmp_path / f"{index}.onnx")
            assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()


@KINDS
def test_files_are_self_contained_and_tell_nothing_of_this_machine(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.with_batch(built(kind).canonical, 1), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    onnx_library.checker.check_model(str(path), full_check=True)
    content = path.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content
    assert ir.to_proto(onnx.load(path)) == onnx_library.load(path)


@KINDS
def test_a_fixed_batch_leaves_no_shape_arithmetic(kind: str) -> None:
    graph = onnx.with_batch(built(kind).canonical, 4)
    assert not set(operators(graph)) & {"Shape", "Expand", "Gather", "Range", "Unsqueeze", "Constant", "Identity"}
    assert all(
        isinstance(size, int) for node in graph.graph for value in node.outputs for size in value.shape or [None]
    )


@KINDS
@pytest.mark.parametrize("batch", [1, 4])
def test_an_open_batch_takes_any_number_and_leaves_the_pixels_one_reader(kind: str, batch: int) -> None:
    found, sample = built(kind), images(batch, seed=3)
    graph = onnx.with_batch(found.floats, None)
    (given,) = graph.graph.inputs
    assert str(given.shape) == f"[batch,{SIDE},{SIDE},3]"
    assert [node.op_type for node in given.consumers()] == ["Cast"]
    assert operators(graph) == operators(found.floats)
    assert worst(run_onnx(graph, sample), logits_of(found.classifier, sample)) < 1e-4


def test_a_model_of_timm_is_exported() -> None:
    import timm

    model = classifier(timm.create_model("mobilenetv3_small_050", num_classes=10), 64)
    graph = onnx.with_batch(onnx.to_onnx(deployable(model), 64), 1)
    sample = images(1, 64)
    assert worst(run_onnx(graph, sample), logits_of(model, sample)) < 1e-4
    assert not set(operators(graph)) & {"Gather", "BatchNormalization", "Dropout", "Shape"}


def before_quantization(value: ir.Value) -> str:
    dequantize = producer(value, "DequantizeLinear")
    quantize = producer(entry(dequantize, 0), "QuantizeLinear") if dequantize else None
    return str((entry(quantize, 0) if quantize else value).name)
