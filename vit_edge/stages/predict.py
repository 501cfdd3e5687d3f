"""Classifies image files with a bundle's int8 model, prepared exactly as the gate's images were."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vit_edge import bundle
from vit_edge.bundle import Trust
from vit_edge.runtimes import registry
from vit_edge.stages.artefacts import check_logits, graph_input, open_sessions


def predict_images(
    bundle_path: Path, images: Sequence[Path], top: int, trust: Trust = Trust()
) -> list[dict[str, float]]:
    """For each image its `top` likeliest classes, likeliest first: class name → softmax probability."""
    from vit_edge.pixels import decode

    with bundle.opened(bundle_path, trust) as opened, ExitStack() as stack:
        prepared = opened.manifest.preprocessing.prepare_all(decode(path) for path in images)
        runtime = registry.load(opened.manifest.target.runtime)
        [int8] = open_sessions(stack, opened, runtime, prepared[:1], floats=False)
        logits_BK = int8.session.run(graph_input(opened)(prepared))
        check_logits(logits_BK, (len(images), len(opened.manifest.classes)), int8.name)
    return [_named(logits_K, opened.manifest.classes, top) for logits_K in logits_BK]


def _named(logits_K: np.ndarray, classes: Sequence[str], top: int) -> dict[str, float]:
    exponentials_K = np.exp(logits_K.astype(np.float64) - logits_K.max())
    shares_K = exponentials_K / exponentials_K.sum()
    return {classes[index]: float(shares_K[index]) for index in np.argsort(-shares_K, kind="stable")[:top]}
