"""Small classifiers with weights that are neither zero nor one anywhere, and images, for quantization and export."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from vit_edge.export import onnx
from vit_edge.export.fold import deployable
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import ConvStem, VisionTransformer, ViTConfig
from vit_edge.preprocess import Preprocessing
from vit_edge.quantization import calibration, quantizer
from vit_edge.quantization.products import Product, products
from vit_edge.quantization.ranges import Range

SIDE = 32
VIT = {"image_size": SIDE, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 10}


class SmallCnn(nn.Module):
    """A padded stem, a depthwise convolution, a residual connection, three kinds of ReLU, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, 16, stride=2, activation=nn.ReLU())
        self.depthwise = conv_block(16, 16, groups=16, activation=nn.ReLU6())
        self.project = conv_block(16, 16, size=1, activation=nn.Identity())
        self.expand = conv_block(16, 32, size=1, activation=nn.Hardswish())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = self.stem(images_BCHW)
        features = features + self.project(self.depthwise(features))
        return self.head(self.pool(self.expand(features)))


def conv_block(
    inputs: int, outputs: int, *, size: int = 3, stride: int = 1, groups: int = 1, activation: nn.Module
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation)


def classifier(backbone: nn.Module, side: int = SIDE) -> Classifier:
    """With every weight, norm and statistic moved away from its initial value, and ImageNet's normalisation."""
    generator = torch.Generator().manual_seed(0)
    for _, tensor in sorted(backbone.state_dict().items()):
        if tensor.is_floating_point():
            tensor.add_(
                0.2 * torch.rand(tensor.shape, generator=generator) * (tensor.std() if tensor.numel() > 1 else 1)
            )
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            module.weight.data += 0.3 * torch.rand(module.weight.shape, generator=generator)
            module.bias.data += 0.3 * torch.rand(module.bias.shape, generator=generator)
        if isinstance(module, nn.BatchNorm2d):
            module.running_var += torch.rand(module.running_var.shape, generator=generator)  # type: ignore[union-attr,operator]
    return Classifier(backbone, preprocessing(side)).eval()


def preprocessing(side: int) -> Preprocessing:
    return Preprocessing(image_size=side, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def vit(**changes: Any) -> Classifier:
    torch.manual_seed(0)
    stem = ConvStem((8, 16)) if changes.pop("stem", False) else None
    return classifier(VisionTransformer(ViTConfig(**(VIT | changes)), stem))


def cnn() -> Classifier:
    torch.manual_seed(0)
    return classifier(SmallCnn())


def images(n: int, side: int = SIDE, seed: int = 0) -> np.ndarray:
    """uint8 (n, side, side, 3): random colours with random shading."""
    random = np.random.default_rng(seed)
    colour = random.uniform(0, 200, (n, 1, 1, 3))
    shade = random.uniform(0.2, 1.3, (n, side // 4, side // 4, 3)).repeat(4, axis=1).repeat(4, axis=2)
    return (colour * shade + random.uniform(0, 20, (n, side, side, 3))).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Built:
    """A classifier on its whole way: exported, calibrated, converted, and both of its ONNX graphs."""

    classifier: Classifier
    products: list[Product]
    by_node: dict[str, Range]
    quantized: GraphModule
    floats: ir.Model
    canonical: ir.Model
    by_value: dict[str, Range]


@cache
def built(kind: str) -> Built:
    """Of "vit", "cnn", or "hybrid", a ViT behind a convolutional stem."""
    return build(cnn() if kind == "cnn" else vit(stem=kind == "hybrid"))


def build(model: Classifier) -> Built:
    graph, side = deployable(model), model.image_size
    found = products(graph)
    ranges = calibrate(graph, images(32, side), minimum_images=8)
    floats = onnx.to_onnx(graph, side)
    quantized = quantizer.quantize(graph, torch.from_numpy(images(2, side)), ranges)
    canonical = onnx.to_onnx(quantized, side)
    return Built(model, found, ranges, quantized, floats, canonical, onnx.ranges_by_value(canonical, found, ranges))


def calibrate(
    graph: GraphModule, images_NHWC: np.ndarray, *, minimum_images: int, method: str = "mse"
) -> dict[str, Range]:
    """Ranges by node name as the int8 stage takes them: checked, observed, each by one method."""
    calibration.check_images(images_NHWC, minimum_images)
    calibration.check_weights(graph)
    return {
        node.name: found.range(method) for node, found in calibration.observe(graph, images_NHWC).statistics.items()
    }


@torch.no_grad()
def logits_of(module: nn.Module, images_NHWC: np.ndarray) -> np.ndarray:
    """Of a classifier or of its exported graph."""
    pixels = torch.from_numpy(images_NHWC)
    return module(pixels.permute(0, 3, 1, 2) if isinstance(module, Classifier) else pixels).numpy()


def run_onnx(model: ir.Model, images_NHWC: np.ndarray, *, optimised: bool = True) -> np.ndarray:
    return session(model, optimised=optimised).run(None, {"images": images_NHWC})[0]


def session(model: ir.Model, *, optimised: bool = True) -> onnxruntime.InferenceSession:
    """ONNX Runtime with default options, or with all its optimisations off."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference in standard deviations of the expected."""
    return float(np.abs(found - expected).max() / expected.std())
