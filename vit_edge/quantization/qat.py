"""Quantization-aware distillation: the best post-training model is trained on until it answers as float does.

What is trained is the deployed graph itself, through fake quantization that torchao's PT2E flow puts into it: weights
and biases of its products and the int8 steps, from where post-training quantization left them. A batch norm after a
convolution has been folded into it with its final statistics (export/fold.py), so none is left to train: the statistics
of a few int8 batches would move weights that the fold then moves off the grid they were trained for (Krishnamoorthi
2018, "Quantizing deep convolutional networks for efficient inference", freezes them for the same reason).

B batch, C = 3 channels, H×W image, N images, K classes.
"""

import copy
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

from vit_edge import metrics
from vit_edge.errors import UserError
from vit_edge.models.classifier import Classifier, classifier_in
from vit_edge.preprocess import Preprocessing
from vit_edge.progress import say
from vit_edge.quantization import calibration, layerwise, outputs, rounding
from vit_edge.quantization.choice import Chosen, judged
from vit_edge.quantization.learned_step import LearnedStep, LearningQuantizer
from vit_edge.quantization.lessons import Lessons
from vit_edge.quantization.products import Product, parameter, products, set_parameter, tidy
from vit_edge.quantization.ranges import STEPS, Range, Statistics
from vit_edge.quantization.simulation import Simulation, logits
from vit_edge.quantization.steps import Steps
from vit_edge.recipe import QatConfig
from vit_edge.target import ways
from vit_edge.training import inference
from vit_edge.training.distillation import label_loss
from vit_edge.training.loop import Report, fit
from vit_edge.training.setup import accelerator_on

STEP = "log_factor"
"""The end of the name of what a learned step is made of."""
USUAL, SMALLEST = 0.1, 1e-3
"""Root mean square of weights that the rate is meant for, and the least share of the rate, for a bias of zeros say."""


def distil(
    chosen: Chosen, lessons: Lessons, calibration_NHWC: np.ndarray, config: QatConfig, folder: Path,
    share_with_outputs: float = 0.0,
) -> tuple[Chosen, dict[str, Any]]:  # fmt: skip
    """Trains what post-training quantization chose, in `folder`; returns the better on the tune split, and metrics.

    share_with_outputs: of the targets, whose outputs of convolutions are uint8 as well (outputs.py): as often they are so in
    training. A checkpoint that is in the folder is continued. `chosen` and the float student stay as they are.
    Raises UserError without images to judge on, and as `fit` does when the training diverges.
    """
    if not len(lessons.tune_N):
        raise UserError(
            "quantization-aware training is judged on the tune split, and that has no image",
            "raise data.tune_fraction above 0",
        )
    accelerator = accelerator_on(lessons.device)
    lessons.student.to(accelerator.device)
    prepared = _prepared(chosen, share_with_outputs)
    result, _ = fit(
        Classifier(Deployed(prepared), _as_they_are(lessons.student.preprocessing)),
        lessons.views,
        lambda model, batch: lessons.loss(model, batch, config),
        config,
        augment=lessons.augment,
        classes=lessons.classes,
        seed=lessons.seed,
        folder=folder,
        label="qat",
        report=_report(lessons, accelerator.device),
        accelerator=accelerator,
    )
    learned = classifier_in(result).backbone
    assert isinstance(learned, Deployed)
    trained = _read(chosen, learned.graph_module.cpu(), calibration_NHWC)
    return _better(chosen, trained, lessons, share_with_outputs)


class Deployed(nn.Module):
    """A graph of uint8 images (B, H, W, 3) as a classifier's backbone: float pixels (B, 3, H, W) in [0, 255], rounded.

    It computes the same in training as in evaluation: dropout and batch norm are out of it.
    """

    def __init__(self, graph_module: GraphModule):
        super().__init__()
        self.graph_module = graph_module

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return self.graph_module(pixels_BCHW.round().to(torch.uint8).permute(0, 2, 3, 1))

    def train(self, mode: bool = True) -> "Deployed":
        for module in self.modules():
            if isinstance(module, LearnedStep):
                module.training = mode
        self.training = mode
        return self

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Each tensor at a rate that is the same share of it: normalisation and equalization stand in the weights, whose
        sizes differ a hundredfold, and Adam's updates are as large for a small one as for a large one."""
        return [
            {
                "params": [tensor],
                "weight_decay": weight_decay if tensor.ndim > 1 else 0.0,
                "lr_scale": 1.0 if name.endswith(STEP) else _size(tensor),
            }
            for name, tensor in self.named_parameters()
            if tensor.requires_grad
        ]


def _size(tensor: Tensor) -> float:
    return max(float(tensor.detach().square().mean().sqrt()) / USUAL, SMALLEST)


def _as_they_are(preprocessing: Preprocessing) -> Preprocessing:
    """The same side, and no normalisation: that is inside the deployed graph."""
    return preprocessing.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3})


def _prepared(chosen: Chosen, share_with_outputs: float) -> GraphModule:
    """What was chosen with fake quantization that learns; parameters that are not to be trained are frozen."""
    outcome = chosen.outcome
    graph = copy.deepcopy(chosen.on_grid)
    trained = {str(node.target) for product in products(graph) for node in _parameters_of(product)}
    exact = [name for name, method in outcome.methods.items() if method == "exact"]
    writing = outputs.written(graph, chosen.float_layers) if share_with_outputs else {}
    convs = {node.name: bounds for node, bounds in writing.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantizer = LearningQuantizer(
            outcome.ranges, chosen.float_layers, outcome.scales, outcome.symmetric, exact, convs, share_with_outputs
        )
        prepared = prepare_qat_pt2e(graph, quantizer)
    for name, tensor in prepared.named_parameters():
        tensor.requires_grad_(name in trained or name.endswith(STEP))
    return prepared


def _parameters_of(product: Product) -> list[Node]:
    """The weight and the bias of a product with weights."""
    arguments = product.node.args[1:3] if product.kind in ("linear", "conv") else ()
    return [node for node in arguments if isinstance(node, Node) and node.op == "get_attr"]


def _report(lessons: Lessons, device: torch.device) -> Report:
    """Of the tune split: top-1, and KL from the float student."""
    float_NK = inference.logits(lessons.student, lessons.tune_NHWC, device)
    return lambda model: _judged(float_NK, inference.logits(model, lessons.tune_NHWC, device), lessons.tune_N)


def _judged(float_NK: np.ndarray, int8_NK: np.ndarray, labels_N: np.ndarray) -> dict[str, float]:
    return {
        "tune_top1": metrics.top1(int8_NK.argmax(1), labels_N),
        "tune_agreement": metrics.agreement(float_NK.argmax(1), int8_NK.argmax(1)),
        "tune_kl": metrics.mean_kl(float_NK, int8_NK),
    }


@torch.no_grad()
def _read(chosen: Chosen, prepared: GraphModule, images_NHWC: np.ndarray) -> Chosen:
    """What was learned, as a choice like that of post-training: weights, scales, and the ranges of the trained graph."""
    floats = copy.deepcopy(chosen.on_grid)
    learned = prepared.state_dict()
    floats.load_state_dict({name: learned[name] for name in floats.state_dict()})
    on_grid = copy.deepcopy(floats)
    scales, steps = _steps(prepared, on_grid, chosen.outcome.scales)
    for product in products(on_grid):
        if product.name in scales:
            weight = parameter(on_grid, product.weight)
            assert weight is not None
            set_parameter(on_grid, product.node, 1, rounding.nearest(weight, scales[product.name]))
    tidy(on_grid)
    observed = calibration.observe(on_grid, images_NHWC)
    seen = {node.name: found for node, found in observed.statistics.items()}
    limits = chosen.options.limits  # outputs of convolutions that learn none keep theirs
    ranges = {name: found.at(limits[name]) if name in limits else found.range("mse") for name, found in seen.items()}
    ranges |= {name: _range(seen[name], learned) for name, learned in steps.items()}
    methods = {name: "learned" if name in steps else method for name, method in chosen.outcome.methods.items()}
    outcome = layerwise.Outcome(ranges, methods, scales, symmetric=chosen.outcome.symmetric)
    return judged(replace(chosen, floats=floats, on_grid=on_grid, outcome=outcome, observed=observed))


def _steps(
    prepared: GraphModule, graph_module: GraphModule, int8: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Steps]]:
    """Learned scales of weights (O,) by product, and steps of inputs and outputs by node."""
    nodes = {node.name: node for node in prepared.graph.nodes}
    scales, steps = {}, {}
    for product in products(graph_module):
        if product.name not in int8:
            continue
        activation, weight = (_module(prepared, argument) for argument in nodes[product.node.name].args[:2])
        assert isinstance(weight, LearnedStep)
        scales[product.name] = weight.step.detach()
        if isinstance(activation, LearnedStep):
            steps[product.inputs[0].name] = activation.steps
        for reader in nodes[product.node.name].users:
            output = _module(prepared, reader) if reader.op == "call_module" else None
            if isinstance(output, LearnedStep):
                steps[product.node.name] = output.steps
    return scales, steps


def _range(statistics: Statistics, steps: Steps) -> Range:
    """The range whose steps these are, over what was seen."""
    if steps.lowest < 0:
        return statistics.at(steps.scale * STEPS)
    low, high = (steps.scale * (end - steps.zero_point) for end in (steps.lowest, steps.highest))
    return replace(statistics.at(max(-low, high)), low=low, high=high)


def _module(graph_module: GraphModule, node: Any) -> nn.Module:
    return graph_module.get_submodule(str(node.target))


def _better(
    chosen: Chosen, trained: Chosen, lessons: Lessons, share_with_outputs: float
) -> tuple[Chosen, dict[str, Any]]:
    """The trained model where it answers no worse than the one that it began as, with outputs in uint8 and without as
    targets have them; says which."""
    labels_N, images_NHWC = lessons.tune_N, lessons.tune_NHWC
    float_NK = inference.logits(lessons.student.cpu(), images_NHWC, torch.device("cpu"))
    kept, told = True, list[dict[str, Any]]()
    for with_outputs in ways(share_with_outputs):
        before_NK, after_NK = (
            logits(Simulation(one.on_grid, one.outcome, one.float_layers, with_outputs).run, images_NHWC)
            for one in (chosen, trained)
        )
        before, after = (_judged(float_NK, int8_NK, labels_N) for int8_NK in (before_NK, after_NK))
        kept = kept and _no_worse(before_NK, after_NK, labels_N)
        told.append({**after, "before": before})
    found = min(told, key=lambda way: way["tune_top1"] - way["before"]["tune_top1"])
    before = found["before"]
    say(
        f"int8: quantization-aware training {'kept' if kept else 'not kept'}: top-1 {found['tune_top1']:.4f} on the tune "
        f"split, {before['tune_top1']:.4f} before it (KL from float {found['tune_kl']:.3g}, {before['tune_kl']:.3g} before)"
    )
    return (trained if kept else chosen), {"kept": kept, **found}


def _no_worse(before_NK: np.ndarray, after_NK: np.ndarray, labels_N: np.ndarray) -> bool:
    """Top-1 is not lower; or it is by no more than chance explains (95 %, one-sided), and the labels have become likelier."""
    drop = metrics.paired_drop(before_NK.argmax(1) == labels_N, after_NK.argmax(1) == labels_N)
    losses = [
        float(label_loss(torch.from_numpy(one_NK), torch.from_numpy(labels_N), 0)) for one_NK in (before_NK, after_NK)
    ]
    return drop.points <= 0 or (drop.lower95 <= 0 and losses[1] < losses[0])
