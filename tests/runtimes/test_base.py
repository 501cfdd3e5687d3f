import sys

import numpy as np
import pytest

from vit_edge.errors import UserError
from vit_edge.runtimes import base, registry
from vit_edge.runtimes.base import Coverage, Product
from vit_edge.target import Target

TARGET = Target(name="t", runtime="onnxruntime", batch=4)


def test_the_last_batch_is_padded_and_told() -> None:
    images = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1)
    pieces = list(base.in_batches(images, 4))
    assert [piece.ravel().tolist() for piece, _ in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert [real for _, real in pieces] == [4, 4, 2]


def test_a_graph_of_another_batch_than_the_targets_is_refused() -> None:
    assert base.batch_of_graph("N", TARGET) == base.batch_of_graph(4, TARGET) == 4
    with pytest.raises(UserError, match="takes 1 images at once"):
        base.batch_of_graph(1, TARGET)


def test_int8_share_is_by_multiply_adds_and_unknown_where_a_shape_is() -> None:
    known = Product(("a",), "MatMul", "int8", 30), Product(("b",), "MatMul", "f32", 10)
    assert Coverage(known).int8_share == 0.75
    assert Coverage((*known, Product(("c",), "Conv", "int8", None))).int8_share is None


def test_a_missing_library_comes_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError) as caught:
        base.imported("openvino", "openvino")
    assert caught.value.fix == 'pip install "vit-edge[openvino]"'
    assert registry.load("openvino").probe().fix == caught.value.fix


def test_an_unknown_runtime_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'openvino'"):
        registry.load("openvin")
