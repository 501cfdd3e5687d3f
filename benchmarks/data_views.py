"""Training views a second in one thread: ours against torchvision's and timm's own transforms, all in one run.

    python benchmarks/data_views.py [--rounds 9] [--views 300]

28 px: Fashion-MNIST from memory, shift by 7 % and flip (digits at 28 px where Fashion-MNIST is not installed).
224 px: scikit-learn's two photographs (640×427, JPEG on disk), random resized crop and flip; then RandAugment too.
Every pipeline ends with a uint8 tensor (3, H, W). Theirs draw from global generators; ours is a function of
(seed, epoch, image) alone, which is in its time. In turn, round by round; the median round counts.
"""

import argparse
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import PIL
import sklearn
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import v2

from vit_edge.data import datasets
from vit_edge.data.folders import FolderImages
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig
from vit_edge.report.console import show_table
from vit_edge.runtimes import machine

View = Callable[[int], torch.Tensor]
MAGNITUDE = 7.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--views", type=int, default=300, help="of 28 px in a round; a tenth of it at 224 px")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{machine.machine()['processor']}, 1 thread; Python {platform.python_version()}, Pillow {PIL.__version__}, "
        f"torchvision {torchvision.__version__}, timm {timm.__version__}, torch {torch.__version__}"
    )
    rows = []
    for name, pipelines, count in (
        ("28 px, shift and flip", small(), options.views),
        ("224 px JPEG, crop and flip", photographs(0.0), options.views // 10),
        ("224 px JPEG, with RandAugment", photographs(MAGNITUDE), options.views // 10),
    ):
        seconds = timed(pipelines, options.rounds, count)
        ours = seconds["vit-edge"]
        rows += [
            (name, peer, f"{1 / value:,.0f}", f"{1e6 * value:,.0f}", f"{value / ours:.2f}")
            for peer, value in seconds.items()
        ]
    show_table(("views", "pipeline", "views/s", "µs", "× ours"), rows)


def timed(pipelines: dict[str, View], rounds: int, count: int) -> dict[str, float]:
    """Seconds of one view: the median of the rounds."""
    random.seed(0)
    torch.manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(rounds + 1):
        for name, view in pipelines.items():
            started = time.thread_time_ns()
            for i in range(count):
                view(number * count + i)
            if number:  # the first round is warm-up
                found[name].append((time.thread_time_ns() - started) / 1e9 / count)
    return {name: median(values) for name, values in found.items()}


def small() -> dict[str, View]:
    try:
        images_NHWC = datasets.find("fashion-mnist").load().train.images_NHWC[:1000]  # type: ignore[union-attr]
    except UserError:
        digits = datasets.find("digits").load().train
        images_NHWC = Preprocessing(image_size=28).prepare_all(digits.image(i) for i in range(len(digits)))
    images = datasets.ArrayImages(images_NHWC, np.zeros(len(images_NHWC)), "28 px")
    augment = AugmentConfig(shift=0.07, scale=0.0, flip=True)
    views = Views(images, np.arange(len(images)), Preprocessing(image_size=28), augment, seed=0)
    theirs = v2.Compose([v2.RandomAffine(0, (0.07, 0.07)), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return {
        "vit-edge": lambda i: views[(i // len(images), i % len(images))][0],
        "torchvision v2": lambda i: theirs(Image.fromarray(images_NHWC[i % len(images)])),
    }


def photographs(magnitude: float) -> dict[str, View]:
    folder = Path(sklearn.__file__).parent / "datasets" / "images"
    files = sorted(folder.glob("*.jpg"))
    images = FolderImages(files, np.zeros(len(files)), folder)
    augment = AugmentConfig(shift=0.0, scale=0.0, crop=0.92, flip=True, rand_augment=magnitude)
    views = Views(images, np.arange(len(files)), Preprocessing(image_size=224), augment, seed=0)
    steps = [v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip()]
    torchvisions = v2.Compose([*steps, *([v2.RandAugment()] if magnitude else []), v2.PILToTensor()])
    timms = create_transform(
        224,
        is_training=True,
        color_jitter=None,
        auto_augment=f"rand-m{magnitude:g}-n2-mstd0.5-inc1" if magnitude else None,
        interpolation="bicubic",
        use_prefetcher=True,
    )

    def opened(i: int) -> Image.Image:
        with Image.open(files[i % len(files)]) as image:
            return image.convert("RGB")

    return {
        "vit-edge": lambda i: views[(i // len(files), i % len(files))][0],
        "torchvision v2": lambda i: torchvisions(opened(i)),
        "timm": lambda i: timms(opened(i)),
    }


if __name__ == "__main__":
    main()
