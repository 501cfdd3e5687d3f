"""Features of a student and its teacher on the same places. B batch, h×w map, N = h·w places, D width."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_edge.errors import UserError
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer
from vit_edge.training.distillation import Output


def last_features(classifier: Classifier, pixels_BCHW: Tensor) -> tuple[Output, Tensor]:
    """Logits, and the map (B, D, h, w) before the head: a CNN's, or the patch tokens of a ViT laid out again."""
    backbone: Any = classifier.backbone
    features = backbone.forward_features(classifier.normalise(pixels_BCHW))
    return backbone.forward_head(features), _as_map(backbone, features)


def feature_shape(classifier: Classifier) -> tuple[int, int]:
    """Width and side of the map that `last_features` gives. UserError where the model has no such map."""
    side = classifier.image_size
    was_training = classifier.training
    try:
        with torch.no_grad():
            device = classifier.mean.device
            _, map_BDhw = last_features(classifier.eval(), torch.zeros(1, 3, side, side, device=device))
    except (AttributeError, ValueError, NotImplementedError) as err:
        raise UserError(f"this model gives no feature map to compare: {err}", "set distillation.features to 0") from err
    finally:
        classifier.train(was_training)
    return map_BDhw.shape[1], map_BDhw.shape[2]


class FeatureStudent(nn.Module):
    """A student with a linear layer from its features to the teacher's width, which is thrown away after training.

    In training → (logits, features (B, N, D')); in evaluation → logits.
    """

    def __init__(self, classifier: Classifier, width: int, grid: int | None):
        """width: the teacher's. grid: side of the map on which both are compared, None: their mean alone."""
        super().__init__()
        self.classifier = classifier
        self.grid = grid
        self.projection = nn.Linear(feature_shape(classifier)[0], width)

    def forward(self, pixels_BCHW: Tensor) -> Output | tuple[Output, Tensor]:
        if not self.training:
            return self.classifier(pixels_BCHW)
        output, map_BDhw = last_features(self.classifier, pixels_BCHW)
        return output, self.projection(places(map_BDhw, self.grid))


def places(map_BDhw: Tensor, grid: int | None) -> Tensor:
    """A feature map averaged to grid × grid places, or to one: (B, N, D)."""
    return F.adaptive_avg_pool2d(map_BDhw, grid or 1).flatten(2).transpose(1, 2)


def _as_map(backbone: Any, features: Tensor) -> Tensor:
    if features.dim() == 3:
        prefix = (
            backbone.config.prefix_tokens if isinstance(backbone, VisionTransformer) else backbone.num_prefix_tokens
        )
        patches_BND = features[:, prefix:]
        side = round(patches_BND.shape[1] ** 0.5)
        if side * side != patches_BND.shape[1]:
            raise ValueError(f"its {patches_BND.shape[1]} tokens are no square map")
        return patches_BND.transpose(1, 2).unflatten(2, (side, side))
    if features.dim() != 4:
        raise ValueError(f"its features have {features.dim()} dimensions, expected a map or tokens")
    return features.permute(0, 3, 1, 2) if getattr(backbone, "output_fmt", "NCHW") == "NHWC" else features
