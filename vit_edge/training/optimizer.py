"""The optimiser and its rate: which parameters decay, how the rate of each layer and step is found."""

from typing import Any

from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from vit_edge.errors import UserError, unknown
from vit_edge.models.classifier import classifier_in
from vit_edge.recipe import TrainingConfig

FUSED = ("adam", "adamw")
"""timm's names of PyTorch's own optimisers that update all parameters in one kernel."""


def make(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The optimiser of `config` over the parameters of `model`. UserError for a name that timm does not know."""
    known = [str(name) for name in list_optimizers()]
    if config.optimizer not in known:
        raise unknown("optimizer", config.optimizer, known)
    options: dict[str, Any] = {"fused": True} if config.optimizer in FUSED else {}
    try:
        return create_optimizer_v2(
            parameter_groups(model, config), opt=config.optimizer, lr=config.learning_rate, **options
        )
    except (ImportError, AssertionError, RuntimeError, TypeError, ValueError) as err:
        reason = " ".join(str(err).split()) or type(err).__name__
        raise UserError(f"the optimizer {config.optimizer} cannot be used: {reason}", "use adamw") from err


def parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict[str, Any]]:
    """Decay for matrices and kernels; none for biases and norms, nor for what the backbone names, as a ViT its tokens
    and positions. With layer_decay below 1 a group for each layer of the backbone, whose `lr_scale` falls towards the
    input. A backbone may group its parameters itself. What stands beside it, such as a projection, has the full rate.
    """
    backbone: Any = classifier_in(model).backbone
    spared = backbone.no_weight_decay() if hasattr(backbone, "no_weight_decay") else ()
    if config.layer_decay < 1:
        if not hasattr(backbone, "group_matcher"):
            raise UserError("layer_decay has no effect on this model: its layers are in no order", "leave it out")
        groups = param_groups_layer_decay(
            backbone, config.weight_decay, no_weight_decay_list=spared, layer_decay=config.layer_decay
        )
    elif hasattr(backbone, "parameter_groups"):
        groups = backbone.parameter_groups(config.weight_decay)
    else:
        groups = param_groups_weight_decay(backbone, config.weight_decay, no_weight_decay_list=spared)
    inside = {id(parameter) for parameter in backbone.parameters()}
    beside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    if beside:
        groups.append({"params": beside, "weight_decay": config.weight_decay})
    return groups


def schedule(optimizer: Any, config: TrainingConfig, steps_per_epoch: int) -> CosineLRScheduler:
    """Linear warm-up from a hundredth of the peak rate, then a cosine down to it again."""
    steps = config.epochs * steps_per_epoch
    return CosineLRScheduler(
        optimizer,
        t_initial=max(2, steps),
        lr_min=config.learning_rate / 100,
        warmup_t=min(round(config.warmup_epochs * steps_per_epoch), steps // 2),
        warmup_lr_init=config.learning_rate / 100,
        t_in_epochs=False,
    )
