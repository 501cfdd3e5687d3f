"""Exact rewrites of a trained classifier into the graph that is quantized and exported.

B batch, C = 3 channels, H×W image, K classes, O and I output and input channels of a convolution.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.utils.fusion import fuse_conv_bn_weights

from vit_edge.errors import UserError
from vit_edge.export.served_vit import ServedViT
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer
from vit_edge.quantization.products import WEIGHTED, parameter

aten = torch.ops.aten
MAX_BATCH = 4096
CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)


def deployable(classifier: Classifier) -> GraphModule:
    """uint8 images (B, H, W, 3) → float32 logits (B, K), as an exported graph on the CPU; the classifier is not changed.

    Normalisation is inside: in the weights of an unpadded patch projection, explicit before any other first layer.
    """
    served = Served(copy.deepcopy(classifier).cpu().float().eval())
    side = classifier.preprocessing.image_size
    return folded(exported(served, torch.zeros(2, side, side, 3, dtype=torch.uint8)))


class Served(nn.Module):
    """uint8 images (B, H, W, 3) → logits (B, K): pixels minus 128, normalised, through the backbone."""

    def __init__(self, classifier: Classifier):
        """The classifier is used up."""
        super().__init__()
        mean_C, std_C = classifier.mean.flatten(), classifier.std.flatten()
        scale_C, shift_C = 1 / std_C, (128 - mean_C) / std_C
        self.scale_C11 = nn.Parameter(scale_C[:, None, None])
        self.shift_C11 = nn.Parameter(shift_C[:, None, None])
        self.backbone = classifier.backbone
        if isinstance(self.backbone, VisionTransformer):
            self.backbone = ServedViT(self.backbone, scale_C, shift_C)
        else:
            explicit_attention(self.backbone)
            merge_branches(self.backbone)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        if isinstance(self.backbone, ServedViT):
            return self.backbone(images_BHWC.to(torch.float32) - 128.0)
        # Cast first: TensorRT takes uint8 into nothing else. Centred last: OpenVINO's convolution is int8 when nothing
        # stands between the subtraction and the quantizing.
        centred_BCHW = images_BHWC.to(torch.float32).permute(0, 3, 1, 2) - 128.0
        return self.backbone(centred_BCHW * self.scale_C11 + self.shift_C11)


def explicit_attention(backbone: nn.Module) -> None:
    """Turns fused attention off wherever a module has timm's switch for it."""
    modules: Iterable[Any] = backbone.modules()
    for module in modules:
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def merge_branches(backbone: nn.Module) -> None:
    """Convolutions that were parallel in training as one (Ding et al. 2021, RepVGG), wherever a timm model knows how."""
    from timm.models import reparameterize_model

    reparameterize_model(backbone, inplace=True)


def exported(module: nn.Module, example: Tensor) -> GraphModule:
    """The module as a graph of ATen operators with a free batch size; `example` has at least two images."""
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    try:
        with torch.no_grad():
            program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    except Exception as err:  # what it raises for code that it cannot follow has no common type
        raise not_exportable(err) from err
    return program.module(check_guards=False)


def not_exportable(err: Exception) -> UserError:
    """The error for an architecture that torch.export or its ONNX exporter cannot take: its own reason in a line."""
    reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
    return UserError(
        f"this architecture cannot be exported: {reason}",
        "choose another student; `vit-edge models` lists what is proven",
    )


def folded(graph_module: GraphModule) -> GraphModule:
    """Applies every rewrite of the graph, in place."""
    rewrites: tuple[Callable[[GraphModule, Node], None], ...] = (
        drop_dropout,
        plain_mean,
        bake_weight,
        fold_batch_norm,
        fold_normalisation,
    )
    with torch.no_grad():
        for rewrite in rewrites:
            for node in list(graph_module.graph.nodes):
                rewrite(graph_module, node)
    graph_module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def drop_dropout(_: GraphModule, node: Node) -> None:
    """Dropout does nothing in evaluation."""
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.dropout_.default):
        _replace(node, node.all_input_nodes[0])


def plain_mean(graph_module: GraphModule, node: Node) -> None:
    """Adaptive pooling to one position is a mean, which every runtime has; the exporter would gather by index."""
    if node.target != aten.adaptive_avg_pool2d.default or node.args[1] not in ([1, 1], (1, 1)):
        return
    with graph_module.graph.inserting_before(node):
        mean = graph_module.graph.call_function(aten.mean.dim, (node.args[0], [-1, -2], True))
    mean.meta = dict(node.meta)
    _replace(node, mean)


def bake_weight(graph_module: GraphModule, node: Node) -> None:
    """A weight that is computed from parameters alone, a standardised one say, as a constant."""
    if (
        node.target not in WEIGHTED
        or not _is_constant(node.args[1])
        or parameter(graph_module, node.args[1]) is not None
    ):
        return
    name = f"{node.name}_weight"
    graph_module.register_parameter(name, nn.Parameter(_evaluated(graph_module, node.args[1]), requires_grad=False))
    with graph_module.graph.inserting_before(node):
        node.update_arg(1, graph_module.graph.get_attr(name))


def fold_batch_norm(graph_module: GraphModule, node: Node) -> None:
    """A batch norm after a convolution, into its weight and bias (Jacob et al. 2018, §3.2)."""
    if node.target != aten.batch_norm.default:
        return
    conv, *norm = node.args[:5]
    if not (isinstance(conv, Node) and conv.target in CONVOLUTIONS and len(conv.users) == 1):
        return
    weight, bias = (parameter(graph_module, argument) for argument in (_argument(conv, 1), _argument(conv, 2)))
    gamma, beta, mean, variance = (parameter(graph_module, argument) for argument in norm)
    if weight is None or mean is None or variance is None:
        return
    epsilon: Any = node.args[7]
    new = fuse_conv_bn_weights(weight, bias, mean, variance, epsilon, gamma, beta)
    _set_weight(graph_module, conv, *new)
    _replace(node, conv)


def fold_normalisation(graph_module: GraphModule, conv: Node) -> None:
    """conv(x·s + t; W, b) = conv(x; W·s, b + ΣW·t) for one s and t a channel, when no border is padded."""
    if (
        conv.target != aten.conv2d.default
        or _argument(conv, 4) not in (None, [0, 0])
        or _argument(conv, 6) not in (None, 1)
    ):
        return
    add: Any = conv.args[0]
    mul = _only_source(add, aten.add.Tensor)
    pixels = _only_source(mul, aten.mul.Tensor)
    if pixels is None:
        return
    scale_I11, shift_I11 = parameter(graph_module, mul.args[1]), parameter(graph_module, add.args[1])
    weight_OIHW, bias_O = parameter(graph_module, conv.args[1]), parameter(graph_module, _argument(conv, 2))
    if weight_OIHW is None or not _is_per_channel(scale_I11) or not _is_per_channel(shift_I11):
        return
    moved_O = (weight_OIHW.double() * shift_I11).sum(dim=(1, 2, 3)).float()
    _set_weight(graph_module, conv, weight_OIHW * scale_I11, moved_O if bias_O is None else bias_O + moved_O)
    conv.update_arg(0, pixels)


def _is_per_channel(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.shape[1:] == (1, 1)


def _only_source(node: Any, target: object) -> Any:
    """The first argument of a call of `target` that one node alone reads; None for any other node."""
    if isinstance(node, Node) and node.target == target and len(node.users) == 1:
        return node.args[0]
    return None


def _replace(node: Node, other: Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _is_constant(node: object) -> bool:
    """Whether the node hangs on parameters alone."""
    if not isinstance(node, Node) or node.op not in ("get_attr", "call_function"):
        return False
    return all(_is_constant(source) for source in node.all_input_nodes)


def _evaluated(graph_module: GraphModule, node: object) -> Tensor:
    """The value of a node that hangs on parameters alone."""
    assert isinstance(node, Node)
    if node.op == "get_attr":
        value = parameter(graph_module, node)
        assert value is not None
        return value
    assert callable(node.target)
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: _evaluated(graph_module, source))
    return node.target(*args, **kwargs)


def _argument(node: Node, index: int) -> Any:
    """An argument, or None where it is left at its default."""
    return node.args[index] if len(node.args) > index else None


def _set_weight(graph_module: GraphModule, conv: Node, weight: Tensor, bias: Tensor) -> None:
    """Gives the convolution a weight and bias of its own."""
    names = (f"{conv.name}_folded_weight", f"{conv.name}_folded_bias")
    for name, tensor in zip(names, (weight, bias), strict=True):
        graph_module.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
    with graph_module.graph.inserting_before(conv):
        nodes = [graph_module.graph.get_attr(name) for name in names]
    conv.args = (conv.args[0], *nodes, *conv.args[3:])
