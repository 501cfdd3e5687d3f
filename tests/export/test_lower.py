"""Each lowering in its real runtime, under default options, on the small ViT and the small CNN."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.conftest import require
from tests.small_models import Built, built, images, logits_of, run_onnx, worst
from vit_edge.export import lower, onnx
from vit_edge.export.graph import array, entry, name_of, product_name, products
from vit_edge.quantization import ranges
from vit_edge.quantization.ranges import Range
from vit_edge.runtimes import registry
from vit_edge.runtimes.base import Coverage
from vit_edge.target import Target
from vit_edge.target import load as load_target

KINDS = pytest.mark.parametrize("kind", ["vit", "cnn"])
BATCHES = pytest.mark.parametrize("batch", [1, 4, None], ids=["1", "4", "open"])
STANDARD = "standard operators"


def lowered(kind: str, runtime: str, batch: int | None = 1, variant: str | None = None) -> ir.Model:
    return lower.lowered(onnx.with_batch(built(kind).canonical, batch), built(kind).by_value, runtime, variant)


def variants(*runtimes: str) -> pytest.MarkDecorator:
    """Every (runtime, lowering) of these."""
    return pytest.mark.parametrize(("runtime", "variant"), [(r, name) for r in runtimes for name in lower.LOWERINGS[r]])


def target(runtime: str, batch: int = 1, is_open: bool = False) -> Target:
    fields = {"threads": 1, "batch": batch, "dynamic_batch": is_open}
    return load_target(runtime).model_copy(update=fields)


def ran(model: ir.Model, runtime: str, folder: Path, sample: np.ndarray) -> tuple[np.ndarray, Coverage]:
    """Logits and coverage as the device would get them: built, opened and run by the target's runtime."""
    path = folder / "graph.onnx"
    onnx.save(model, path)
    is_open = not isinstance((model.graph.inputs[0].shape or [None])[0], int)
    aimed, loaded = target(runtime, len(sample), is_open), registry.load(runtime)
    with loaded.open(loaded.build(path, aimed, folder / "built"), aimed) as session:
        return session.run(sample), session.coverage()


def assert_int8(found: Built, coverage: Coverage, *, named: bool, attention: int) -> None:
    """Every linear and convolution runs in int8, and so many of attention's products; OpenVINO loses some names."""
    layers = [product.name for product in found.products if product.kind != "attention"]
    assert coverage.int8 == len(layers) + attention
    for name in layers:
        mine = [product.is_int8 for product in coverage.products if product.came_from(name)]
        assert mine == [True] or (not named and not mine), name


@KINDS
@BATCHES
def test_onnxruntime_runs_every_layer_in_int8(kind: str, batch: int | None, tmp_path: Path) -> None:
    require("onnxruntime", "onnxruntime")
    sample = images(batch or 3, seed=4)
    _, coverage = ran(lowered(kind, "onnxruntime", batch, STANDARD), "onnxruntime", tmp_path, sample)
    kinds = Counter(product.kind for product in coverage.products if product.is_int8)
    layers = Counter(product.kind for product in built(kind).products)
    assert kinds["QGemm"] == layers["linear"]
    assert kinds["QLinearConv"] == layers["conv"]


@KINDS
@BATCHES
@variants("onnxruntime", "openvino")
def test_every_lowering_runs_every_layer_in_int8_and_answers_like_float(
    kind: str, batch: int | None, runtime: str, variant: str, tmp_path: Path
) -> None:
    require(runtime, runtime)
    found, sample = built(kind), images(batch or 3, seed=4)
    logits_BK, coverage = ran(lowered(kind, runtime, batch, variant), runtime, tmp_path, sample)
    attention = [product for product in found.products if product.kind == "attention"]
    in_int8 = {"int8 scores": len(attention) // 2, "int8 attention": len(attention)}.get(variant, 0)
    assert_int8(found, coverage, named=runtime == "onnxruntime", attention=in_int8)
    assert worst(logits_BK, logits_of(found.classifier, sample)) < 0.25


@variants("openvino")
def test_a_stems_first_convolution_is_int8_behind_the_transpose_of_the_pixels(
    runtime: str, variant: str, tmp_path: Path
) -> None:
    require(runtime, runtime)
    _, coverage = ran(lowered("hybrid", runtime, 1, variant), runtime, tmp_path, images(1, seed=4))
    stem = [product for product in coverage.products if product.came_from("patch_embed.backbone.0.conv")]
    assert [product.is_int8 for product in stem] == [True]


@KINDS
def test_the_canonical_graph_alone_would_be_float_in_onnxruntime(kind: str, tmp_path: Path) -> None:
    require("onnxruntime", "onnxruntime")
    graph = onnx.with_batch(built(kind).canonical, 1)
    assert ran(graph, "onnxruntime", tmp_path, images(1))[1].int8 < len(built(kind).products) / 2


def test_unsigned_activations_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without finer steps and convolutions nothing but the biases, in far smaller steps, is rounded anew."""
    monkeypatch.setattr(ranges, "FINER", 0.0)
    found, sample = built("vit"), images(4, seed=4)
    graph = run_onnx(lowered("vit", "onnxruntime", 4, STANDARD), sample, optimised=False)
    assert worst(graph, logits_of(found.quantized, sample)) < 0.05


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_finer_steps_bring_the_answers_closer_to_float(kind: str) -> None:
    found, sample = built(kind), images(64, seed=4)
    graph = onnx.with_batch(found.canonical, len(sample))
    float_NK, errors = logits_of(found.classifier, sample), []
    for rewrite in (lambda *_: None, lower.in_finer_steps):
        rewrite(graph, found.by_value)
        errors.append(np.sqrt(np.mean(np.square(run_onnx(graph, sample, optimised=False) - float_NK))))
    assert errors[1] < 0.97 * errors[0]


@KINDS
def test_what_is_never_negative_has_all_steps_above_zero(kind: str) -> None:
    graph, by_value = lowered(kind, "openvino", variant="float attention"), built(kind).by_value
    found = {name_of(entry(node, 0)): node for node in graph.graph if node.op_type == "QuantizeLinear"}
    for name, node in found.items():
        if name in by_value and by_value[name].low >= 0:
            assert float(array(entry(node, 1))) == pytest.approx(by_value[name].limit / 255)
            assert int(array(entry(node, 2))) == 0
    unsigned = [node for node in found.values() if node.outputs[0].dtype == ir.DataType.UINT8]
    assert 0 < len(unsigned) < len(found)


def test_pixels_go_into_onnxruntime_as_uint8() -> None:
    graph = lowered("vit", "onnxruntime", variant=STANDARD)
    first = next(iter(graph.graph))
    assert not {"Cast", "Sub"} & {node.op_type for node in graph.graph}
    assert first.inputs[0] is not None
    (projection,) = (node for node in products(graph) if product_name(node) == "patch_embed.proj")
    dequantize = entry(projection, 0).producer()
    assert dequantize is not None
    assert (array(entry(dequantize, 1)), array(entry(dequantize, 2))) == (1, 128)
    assert entry(dequantize, 0).dtype == ir.DataType.UINT8


def test_every_bias_step_is_input_scale_times_weight_scale() -> None:
    graph = lowered("cnn", "onnxruntime")
    for node in products(graph):
        activation, weight, bias = (entry(node, index).producer() for index in range(3))
        assert activation is not None and weight is not None and bias is not None  # noqa: PT018
        expected = array(entry(activation, 1)) * array(entry(weight, 1)).astype(np.float64)
        assert np.allclose(array(entry(bias, 1)), expected, rtol=1e-6)
        assert array(entry(bias, 0)).dtype == np.int32


def test_a_bias_that_int32_cannot_hold_stays_float() -> None:
    graph = onnx.with_batch(built("cnn").canonical, 1)
    node = products(graph)[0]
    bias = entry(node, 2)
    bias.const_value = ir.tensor(np.full(16, 1e9, np.float32))
    lower.quantize_bias(graph, node)
    assert entry(node, 2) is bias


@pytest.mark.parametrize(
    ("found", "scale", "zero_point"),
    [
        (Range(0.0, 5.1, 5.1), 0.02, 0),
        (Range(-1.0, 1.55, 9.0), 0.01, 100),
        (Range(-9.0, 1.55, 1.0), 2 / 255, 128),
        (Range(0.5, 5.1, 5.1), 0.02, 0),
        (Range(0.0, 0.0, 1.0), 1.0, 0),
    ],
)
def test_output_ranges_hold_zero_and_are_clipped_at_the_limit(found: Range, scale: float, zero_point: int) -> None:
    affine = lower.Affine.of(found)
    assert affine.scale == pytest.approx(scale)
    assert affine.zero_point == zero_point


@KINDS
def test_tensorrt_parses_and_builds_int8_and_float(kind: str, tmp_path: Path) -> None:
    require("tensorrt_rtx_bindings", "tensorrt")
    graphs = {"int8": lowered(kind, "tensorrt"), "float": onnx.with_batch(built(kind).floats, 1)}
    aimed, runtime = target("tensorrt"), registry.load("tensorrt")
    assert set(aimed.compute_capabilities) >= {"8.6", "8.9"}
    for name, graph in graphs.items():
        path = tmp_path / f"{name}.onnx"
        onnx.save(graph, path)
        assert runtime.build(path, aimed, tmp_path / name)
