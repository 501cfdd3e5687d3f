"""Labelled images: in memory, or encoded and decoded when they are asked for; and where a SPEC's images are.

N images of H×W pixels with C = 3 channels.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from typing_extensions import Self

from vit_edge.errors import UserError
from vit_edge.pixels import open_rgb
from vit_edge.progress import progress, say
from vit_edge.store import canonical_json, digest_and_size

GATE_SHARE = 0.2
MOST_NATIVE_SIZE = 224
SAMPLE = 16
CHECKED_AT_ONCE = 4096


class ArrayImages:
    """Images held in memory: uint8 (N, H, W, 3)."""

    def __init__(self, images_NHWC: np.ndarray, labels_N: np.ndarray, name: str):
        self.images_NHWC = images_NHWC
        self.labels_N = labels_N.astype(np.int64)
        self.set_name = name

    def __len__(self) -> int:
        return len(self.labels_N)

    def name(self, i: int) -> str:
        return f"{self.set_name}/{i}"

    def image(self, i: int) -> np.ndarray:
        """uint8 (H, W, 3)."""
        return self.images_NHWC[i]

    def picture(self, i: int) -> Image.Image:
        """The same as an RGB image of Pillow's."""
        return Image.fromarray(self.images_NHWC[i])


class EncodedImages(ABC):
    """Image files, or their contents in larger files, with int64 labels (N,); each is decoded when it is asked for."""

    labels_N: np.ndarray

    def __len__(self) -> int:
        return len(self.labels_N)

    @abstractmethod
    def name(self, i: int) -> str:
        """What a person finds the image by."""

    @abstractmethod
    def encoded(self, i: int) -> Path | bytes:
        """The image's file, or its content. Raises UserError when it cannot be read."""

    @abstractmethod
    def subset(self, indices: np.ndarray) -> Self:
        """The images at `indices`, in that order."""

    def image(self, i: int) -> np.ndarray:
        """uint8 (H, W, 3). Raises UserError that names an unreadable image."""
        return np.asarray(self.picture(i))

    def picture(self, i: int) -> Image.Image:
        """The same as an RGB image of Pillow's."""
        return open_rgb(self.encoded(i), self.name(i))


Images = ArrayImages | EncodedImages
E = TypeVar("E", bound=EncodedImages)


@dataclass(frozen=True)
class DataSet:
    spec: str
    classes: list[str]
    train: Images
    gate: Images


@dataclass(frozen=True)
class Source:
    """Where a SPEC's images are, before any is read. `native_size` is the side of its images in pixels."""

    spec: str
    native_size: int
    train_files: list[Path]
    gate_files: list[Path]
    load: Callable[[], DataSet]

    def train_fingerprint(self) -> str:
        return fingerprint(self.train_files)

    def gate_fingerprint(self) -> str:
        """SHA-256 over names and contents."""
        digest = hashlib.sha256()
        for path in self.gate_files:
            digest.update(canonical_json([_name_as_text(Path(path.name)), _content(path)]))
        return digest.hexdigest()


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over names, sizes and times: fast at ImageNet's size."""
    facts = [(_name_as_text(path), *_size_and_time(path)) for path in files]
    return hashlib.sha256(canonical_json(facts)).hexdigest()


def gate_share(images: E, split_seed: int) -> tuple[E, E]:
    """train and gate of a set that has no gate of its own: a fifth of the images, drawn with the seed, is the gate's."""
    order = np.random.default_rng(split_seed).permutation(len(images))
    cut = max(1, round(len(images) * GATE_SHARE))
    return images.subset(np.sort(order[cut:])), images.subset(np.sort(order[:cut]))


def native_size(images: Sequence[Path | bytes]) -> int:
    """The median shorter side of a sample of encoded images, at most MOST_NATIVE_SIZE."""
    sides = []
    for source in images[:: max(1, len(images) // SAMPLE)]:
        try:
            with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
                sides.append(min(image.size))
        except Exception:  # an unreadable image is found, and told of, by `checked`
            continue
    return min(MOST_NATIVE_SIZE, int(np.median(sides))) if sides else MOST_NATIVE_SIZE


def checked(images: EncodedImages, classes: Sequence[str], skip_bad: bool) -> EncodedImages:
    """Every image read once: UserError names the first unreadable one, or they are left out and counted."""
    bad: list[tuple[int, str]] = []
    with ThreadPoolExecutor() as pool, progress("checking images", len(images), unit="images") as advance:
        for start in range(0, len(images), CHECKED_AT_ONCE):
            part = range(start, min(start + CHECKED_AT_ONCE, len(images)))
            for i, problem in zip(part, pool.map(lambda i: _problem(images, i), part), strict=True):
                advance()
                if problem is not None:
                    bad.append((i, problem))
            if bad and not skip_bad:
                break
    if not bad:
        return images
    if not skip_bad:
        raise UserError(bad[0][1], "replace it, or leave such images out with --skip-bad-images")
    say(f"left out {len(bad)} unreadable of {len(images)} images, the first: {bad[0][1]}")
    kept = images.subset(np.delete(np.arange(len(images)), [i for i, _ in bad]))
    lost = sorted(set(images.labels_N.tolist()) - set(kept.labels_N.tolist()))
    if lost:
        which = f" of the class {classes[lost[0]]!r}" if classes else ""
        raise UserError(f"no image{which} can be read, the first: {bad[0][1]}", "replace its images")
    return kept


def _problem(images: EncodedImages, i: int) -> str | None:
    """Why Pillow cannot decode the whole image; a JPEG is decoded at an eighth of its size, which reads every byte."""
    try:
        source = images.encoded(i)
        with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
    except UserError as err:
        return err.problem
    except Exception as err:  # a decoder of Pillow's may raise anything on a broken file
        reason = (str(err) or type(err).__name__).replace(str(source), "it").splitlines()[0]
        return f"cannot read the image {images.name(i)}: {reason}"
    return None


def _name_as_text(path: Path) -> str:
    """One to one, for names in any encoding."""
    return os.fsencode(path).decode("latin-1")


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        facts = path.stat()
    except OSError:  # a broken link is found, and told of, by `checked`
        return -1, -1
    return facts.st_size, facts.st_mtime_ns


def _content(path: Path) -> str:
    try:
        return str(digest_and_size(path)["sha256"])
    except OSError:
        return "unreadable"
