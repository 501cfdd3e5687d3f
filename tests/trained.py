"""Small classifiers trained on real digits, which have margins to lose, and the same with outliers planted.

N images of SIDE×SIDE pixels, K = 10 classes.
"""

import copy
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from tests import planted
from tests.tiny_model import digits
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer, ViTConfig
from vit_edge.preprocess import Preprocessing

SIDE, TRAINED_ON, EPOCHS, BATCH = 16, 1000, 12, 50
CALIBRATION = 128
VIT_FACTOR, CNN_FACTOR = 300.0, 300.0
GEOMETRY = {"image_size": SIDE, "patch_size": 4, "width": 32, "depth": 2, "heads": 2, "classes": 10}


class Cnn(nn.Module):
    """Two convolutions with a Hardswish after each, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=2)
        self.mix = nn.Conv2d(32, 48, 1)
        self.widen = nn.Conv2d(48, 64, 3, stride=2)
        self.act = nn.Hardswish()
        self.head = nn.Linear(64, 10)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features = self.act(self.widen(self.act(self.mix(self.act(self.stem(images_BCHW))))))
        return self.head(features.mean(dim=(2, 3)))


def images() -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, SIDE, SIDE, 3) and labels int64 (N,): the first TRAINED_ON were trained on."""
    images_NHWC, labels_N = digits()
    return images_NHWC.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2), labels_N


@cache
def trained(kind: str) -> Classifier:
    """A "vit" or a "cnn"; leave it as it is."""
    torch.manual_seed(0)
    backbone = VisionTransformer(ViTConfig(**GEOMETRY)) if kind == "vit" else Cnn()  # type: ignore[arg-type]
    model = Classifier(backbone, Preprocessing(image_size=SIDE, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    pixels_NCHW, labels_N = (torch.from_numpy(part[:TRAINED_ON]) for part in images())
    pixels_NCHW = pixels_NCHW.permute(0, 3, 1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * TRAINED_ON // BATCH)
    model.train()
    for _ in range(EPOCHS):
        for chosen_B in torch.randperm(TRAINED_ON).split(BATCH):
            loss = nn.functional.cross_entropy(model(pixels_NCHW[chosen_B]), labels_N[chosen_B], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@cache
def spoilt(kind: str) -> Classifier:
    """The trained model with outliers planted where no fold reaches, its float answers as good; leave it as it is."""
    images_NHWC, _ = images()
    pixels_NCHW = torch.from_numpy(images_NHWC[:TRAINED_ON]).permute(0, 3, 1, 2)
    model = copy.deepcopy(trained(kind))
    if kind == "vit":
        return planted.planted(planted.thinned(model, pixels_NCHW), pixels_NCHW, VIT_FACTOR)
    assert isinstance(model.backbone, Cnn)
    swell_channels(model.backbone, model.normalise(pixels_NCHW))
    return model


def loud(channel: int = 0, times: float = 3000.0) -> Classifier:
    """The trained CNN with one channel, which nothing after it needs, far larger than all others."""
    model = copy.deepcopy(trained("cnn"))
    cnn = model.backbone
    assert isinstance(cnn, Cnn)
    with torch.no_grad():
        cnn.mix.weight[:, channel] = 0
        for parameter in (cnn.stem.weight, cnn.stem.bias):
            parameter[channel] *= times  # type: ignore[index]
    return model


@torch.no_grad()
def swell_channels(cnn: Cnn, inputs_NCHW: Tensor, count: int = 4) -> None:
    """Among what `mix` reads, `count` channels CNN_FACTOR as large as any, in place.

    As planted.py does with GELU: hardswish(z) = hardswish(-z) + z, and z comes through a spare channel as
    hardswish(slope·z + offset) = slope·z + offset. The spare channels are the ones that matter least.
    """
    before_NCHW = cnn.stem(inputs_NCHW)
    after_NCHW = cnn.act(before_NCHW)
    order = (after_NCHW.std(dim=(0, 2, 3)) * cnn.mix.weight.flatten(1).norm(dim=0)).argsort()
    spare, units = order[:count], order[-count:]
    bounds = 1.5 * before_NCHW.abs().amax(dim=(0, 2, 3))[units]
    slope = CNN_FACTOR * after_NCHW.max() / (2 * bounds)
    offset = slope * bounds + 3
    cnn.stem.weight[spare] = slope[:, None, None, None] * cnn.stem.weight[units]
    cnn.stem.bias[spare] = slope * cnn.stem.bias[units] + offset  # type: ignore[index]
    cnn.mix.weight[:, spare] = cnn.mix.weight[:, units] / slope[:, None, None]
    cnn.mix.bias -= cnn.mix.weight[:, spare, 0, 0] @ offset  # type: ignore[operator]
    cnn.stem.weight[units] *= -1
    cnn.stem.bias[units] *= -1  # type: ignore[index]
