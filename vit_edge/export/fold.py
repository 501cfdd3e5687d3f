"""Exact rewrites of a trained classifier into the graph that is quantized and exported.

B batch, C = 3 channels, H×W image, K classes, O and I output and input channels of a convolution.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from vit_edge.export.served_vit import ServedViT
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer
from vit_edge.quantization.products import parameter

aten = torch.ops.aten
MAX_BATCH = 4096


def deployable(classifier: Classifier) -> GraphModule:
    """uint8 images (B, H, W, 3) → float32 logits (B, K), as an exported graph on the CPU; the classifier is not changed.

    Normalisation is inside: in the weights of an unpadded patch projection, explicit before any other first layer.
    """
    served = Served(copy.deepcopy(classifier).cpu().float().eval())
    side = classifier.preprocessing.image_size
    return folded(exported(served, torch.zeros(2, side, side, 3, dtype=torch.uint8)))


class Served(nn.Module):
    """Pixels minus 128, normalised, through the backbone. The classifier is used up."""

    def __init__(self, classifier: Classifier):
        super().__init__()
        mean_C, std_C = classifier.mean.flatten(), classifier.std.flatten()
        self.scale_C11 = nn.Parameter((1 / std_C)[:, None, None])
        self.shift_C11 = nn.Parameter(((128 - mean_C) / std_C)[:, None, None])
        backbone = classifier.backbone
        self.backbone = ServedViT(backbone) if isinstance(backbone, VisionTransformer) else explicit_attention(backbone)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        centred_BCHW = images_BHWC.to(torch.float32).permute(0, 3, 1, 2) - 128.0
        return self.backbone(centred_BCHW * self.scale_C11 + self.shift_C11)


def explicit_attention(backbone: nn.Module) -> nn.Module:
    """Turns fused attention off wherever a module has timm's switch for it."""
    for module in backbone.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return backbone


def exported(module: nn.Module, example: Tensor) -> GraphModule:
    """The module as a graph of ATen operators with a free batch size; `example` has at least two images."""
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    return program.module(check_guards=False)


def folded(graph_module: GraphModule) -> GraphModule:
    """Applies every rewrite of the graph, in place."""
    rewrites: tuple[Callable[[GraphModule, Node], None], ...] = (
        drop_dropout,
        plain_mean,
        fold_batch_norm,
        fold_normalisation,
    )
    with torch.no_grad():
        for rewrite in rewrites:
            for node in list(graph_module.graph.nodes):
                rewrite(graph_module, node)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def drop_dropout(_: GraphModule, node: Node) -> None:
    """Dropout and copies do nothing in evaluation."""
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.dropout_.default):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def plain_mean(graph_module: GraphModule, node: Node) -> None:
    """Adaptive pooling to one position is a mean, which every runtime has; the exporter would gather by index."""
    if node.target == aten.adaptive_avg_pool2d.default and tuple(node.args[1]) == (1, 1):  # type: ignore[arg-type]
        with graph_module.graph.inserting_before(node):
            mean = graph_module.graph.call_function(aten.mean.dim, (node.args[0], [-1, -2], True))
        mean.meta = dict(node.meta)
        node.replace_all_uses_with(mean)


def fold_batch_norm(graph_module: GraphModule, node: Node) -> None:
    """A batch norm after a convolution, into its weight and bias (Jacob et al. 2018, §3.2)."""
    if node.target != aten.batch_norm.default:
        return
    conv, weight, bias, mean, var, _, _, epsilon = node.args[:8]
    if not (isinstance(conv, Node) and conv.target in (aten.conv2d.default, aten.conv2d.padding)):
        return
    if len(conv.users) > 1 or not _is_own_weight(conv.args[1]):
        return
    tensors = [parameter(graph_module, argument) for argument in (conv.args[1], _bias(conv), mean, var, weight, bias)]
    new_weight, new_bias = fuse_conv_bn_weights(*tensors[:4], epsilon, *tensors[4:])  # type: ignore[arg-type]
    _set_weight(graph_module, conv, new_weight, new_bias)
    node.replace_all_uses_with(conv)


def fold_normalisation(graph_module: GraphModule, conv: Node) -> None:
    """conv(x·s + t; W, b) = conv(x; W·s, b + ΣW·t) for one s and t a channel, when no border is padded."""
    if conv.target != aten.conv2d.default or any(_argument(conv, 4, [0, 0])):
        return
    add = conv.args[0]
    if not (_is_call(add, aten.add.Tensor) and _is_call(add.args[0], aten.mul.Tensor)):  # type: ignore[union-attr]
        return
    mul = add.args[0]  # type: ignore[union-attr]
    if len(add.users) > 1 or len(mul.users) > 1 or _argument(conv, 6, 1) != 1:  # type: ignore[union-attr]
        return
    scale, shift = parameter(graph_module, mul.args[1]), parameter(graph_module, add.args[1])  # type: ignore[union-attr]
    if scale is None or shift is None or scale.shape[1:] != (1, 1) or shift.shape[1:] != (1, 1):
        return
    weight_OIHW, bias = parameter(graph_module, conv.args[1]), parameter(graph_module, _bias(conv))
    assert weight_OIHW is not None
    moved_O = (weight_OIHW.double() * shift.double()).sum(dim=(1, 2, 3)).float()
    _set_weight(graph_module, conv, weight_OIHW * scale, moved_O if bias is None else bias + moved_O)
    conv.update_arg(0, mul.args[0])  # type: ignore[union-attr]


def _is_call(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target == target


def _is_own_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "get_attr" and len(node.users) == 1


def _argument(node: Node, index: int, default: object) -> object:
    return node.args[index] if len(node.args) > index else default


def _bias(conv: Node) -> object:
    return _argument(conv, 2, None)


def _set_weight(graph_module: GraphModule, conv: Node, weight: Tensor, bias: Tensor) -> None:
    """Gives the convolution a new weight and bias, beside the weight that it has."""
    owner, _, name = str(conv.args[1].target).rpartition(".")  # type: ignore[union-attr]
    module = graph_module.get_submodule(owner)
    setattr(module, name, nn.Parameter(weight.detach()))
    setattr(module, f"{name}_bias", nn.Parameter(bias.detach()))
    with graph_module.graph.inserting_before(conv):
        node = graph_module.graph.get_attr(f"{owner}.{name}_bias" if owner else f"{name}_bias")
    node.meta = {"val": bias.detach()}
    conv.update_arg(2, node) if len(conv.args) > 2 else setattr(conv, "args", (*conv.args, node))
