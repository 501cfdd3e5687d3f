"""A tiny real classifier of 8×8 digits as ONNX, in float and in int8 (Q/DQ): random convolution, least-squares head.

N images, 8×8 pixels, 3 equal channels, K = 10 classes, F = 144 features.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from sklearn.datasets import load_digits

CHANNELS, SIDE, KERNEL, STRIDE = 16, 8, 4, 2
FEATURES = CHANNELS * 3 * 3
PRODUCTS = ["conv", "hidden", "head"]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """uint8 images (N, 8, 8, 3) and int64 labels (N,) of scikit-learn's digits, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    grey = np.round(images[order].reshape(-1, SIDE, SIDE, 1) * 255 / 16).astype(np.uint8)
    return np.repeat(grey, 3, axis=3), labels[order].astype(np.int64)


class TinyModel:
    """The weights, fitted on the first 1200 digits: pixel - 128 → conv → ReLU → hidden → ReLU → head."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.conv = rng.normal(0, 0.01, (CHANNELS, 3, KERNEL, KERNEL)).astype(np.float32)
        self.conv_bias = rng.normal(0, 0.1, CHANNELS).astype(np.float32)
        self.hidden = rng.normal(0, FEATURES**-0.5, (FEATURES, 128)).astype(np.float32)
        self.hidden_bias = rng.normal(0, 0.1, 128).astype(np.float32)
        images_NHWC, labels_N = digits()
        features = self._features(images_NHWC[:1200])[-1]
        targets = 8 * np.eye(10)[labels_N[:1200]] - 4
        ones = np.ones((len(features), 1))
        solution = np.linalg.lstsq(
            np.vstack([np.hstack([features, ones]), 0.3 * np.eye(129)]), np.vstack([targets, np.zeros((129, 10))]), rcond=None
        )[0]  # fmt: skip
        self.head, self.head_bias = solution[:-1].astype(np.float32), solution[-1].astype(np.float32)

    def logits(self, images_NHWC: np.ndarray) -> np.ndarray:
        """float32 (N, 10): the reference, computed in numpy."""
        return (self._features(images_NHWC)[-1] @ self.head + self.head_bias).astype(np.float32)

    def save(self, path: Path, *, int8: bool = False, batch: int | None = 1, conv_in_float: bool = False, operator: str = "Relu") -> Path:  # fmt: skip
        """Writes the ONNX file. batch: None leaves it open; conv_in_float: leave the convolution out of int8; operator: the first activation's."""
        images_NHWC, _ = digits()
        flat, hidden = (np.abs(part).max() / 127 for part in self._features(images_NHWC[:1200]))
        graph = _Graph(int8)
        graph.node("Cast", ["images"], "float", to=onnx.TensorProto.FLOAT)
        graph.node("Transpose", ["float"], "planes", perm=[0, 3, 1, 2])
        graph.node("Sub", ["planes", graph.constant("half", np.float32(128))], "centred")
        graph.int8 = int8 and not conv_in_float
        graph.product("Conv", "centred", 1.0, self.conv, 0, self.conv_bias, "conv", strides=[STRIDE, STRIDE])
        graph.int8 = int8
        graph.node(operator, ["conv_out"], "active")
        graph.node("Flatten", ["active"], "flat")
        graph.product("MatMul", "flat", flat, self.hidden, 1, None, "hidden")
        graph.node("Add", ["hidden_out", graph.constant("hidden_bias", self.hidden_bias)], "hidden_sum")
        graph.node("Relu", ["hidden_sum"], "rectified")
        graph.product("MatMul", "rectified", hidden, self.head, 1, None, "head")
        graph.node("Add", ["head_out", graph.constant("head_bias", self.head_bias)], "logits")
        onnx.save(graph.model(batch), path)
        return path

    def _features(self, images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inputs of the two matrix products: (N, F) and (N, 128)."""
        centred = images_NHWC.astype(np.float32).transpose(0, 3, 1, 2) - 128
        windows = np.lib.stride_tricks.sliding_window_view(centred, (KERNEL, KERNEL), axis=(2, 3))[
            :, :, ::STRIDE, ::STRIDE
        ]
        maps = np.einsum("nchwij,ocij->nohw", windows, self.conv) + self.conv_bias[:, None, None]
        flat = np.maximum(maps, 0).reshape(len(maps), -1)
        return flat, np.maximum(flat @ self.hidden + self.hidden_bias, 0)


class _Graph:
    def __init__(self, int8: bool):
        self.int8 = int8
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, inputs: list[str], output: str, name: str = "", **attributes: object) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], name=name or output, **attributes))
        return output

    def product(
        self, operator: str, given: str, scale: float, weight: np.ndarray, axis: int, bias: np.ndarray | None, name: str,
        **attributes: object,
    ) -> None:  # fmt: skip
        inputs = [self._input(given, scale), self._weight(f"{name}_weight", weight, axis)]
        if bias is not None:
            inputs.append(self.constant(f"{name}_bias", bias))
        self.node(operator, inputs, f"{name}_out", name, **attributes)

    def model(self, batch: int | None) -> onnx.ModelProto:
        images = helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, [batch or "batch", SIDE, SIDE, 3])
        logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [batch or "batch", 10])
        graph = helper.make_graph(self.nodes, "tiny", [images], [logits], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)

    def _input(self, given: str, scale: float) -> str:
        if not self.int8:
            return given
        parts = [self.constant(f"{given}_scale", np.float32(scale)), self.constant(f"{given}_zero", np.int8(0))]
        self.node("QuantizeLinear", [given, *parts], f"{given}_int8")
        return self.node("DequantizeLinear", [f"{given}_int8", *parts], f"{given}_back")

    def _weight(self, name: str, weight: np.ndarray, axis: int) -> str:
        if not self.int8:
            return self.constant(name, weight)
        others = tuple(other for other in range(weight.ndim) if other != axis)
        scale = (np.abs(weight).max(others, keepdims=True) / 127).astype(np.float32)
        rounded = np.clip(np.round(weight / scale), -127, 127).astype(np.int8)
        inputs = [
            self.constant(f"{name}_int8", rounded),
            self.constant(f"{name}_scale", scale.reshape(-1)),
            self.constant(f"{name}_zero", np.zeros(scale.size, np.int8)),
        ]
        return self.node("DequantizeLinear", inputs, f"{name}_back", axis=axis)
