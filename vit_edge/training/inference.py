"""A classifier's logits on many images. N images, B batch, K classes."""

import numpy as np
import torch
from torch import nn

from vit_edge import memory

BATCH = 128


@memory.kept()
@torch.inference_mode()
def logits(model: nn.Module, images_NHWC: np.ndarray, device: torch.device) -> np.ndarray:
    """float32 (N, K) of uint8 (N, H, W, 3)."""
    was_training = model.training
    model.eval()
    parts = []
    for start in range(0, len(images_NHWC), BATCH):
        batch = torch.from_numpy(np.ascontiguousarray(images_NHWC[start : start + BATCH])).to(device)
        parts.append(model(batch.permute(0, 3, 1, 2)).float().cpu().numpy())
    model.train(was_training)
    return np.concatenate(parts)


def top1(model: nn.Module, images_NHWC: np.ndarray, labels_N: np.ndarray, device: torch.device) -> float:
    """Share of the images whose largest logit is their label's."""
    return float((logits(model, images_NHWC, device).argmax(axis=1) == labels_N).mean())
