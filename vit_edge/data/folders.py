"""Image folders: train/ and val/ of class folders, or one folder of class folders that is split with a seed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vit_edge.errors import UserError
from vit_edge.preprocess import decode, image_files
from vit_edge.progress import progress, say

LAYOUT = "expected PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or PATH/CLASS/*.jpg"
GATE_SHARE = 0.2
VAL_NAMES = ("val", "validation", "test")


class FolderImages:
    """Image files with labels; each is decoded when it is asked for."""

    def __init__(self, files: list[Path], labels: list[int], root: Path, skip_bad: bool):
        self.files = files
        self.labels_N = np.asarray(labels, dtype=np.int64)
        self.names = [file.relative_to(root).as_posix() for file in files]
        self.root, self.skip_bad = root, skip_bad

    def __len__(self) -> int:
        return len(self.files)

    def image(self, i: int) -> np.ndarray:
        """uint8 (H, W, 3). Raises UserError that names an unreadable file."""
        return decode(self.files[i])

    def checked(self) -> "FolderImages":
        """Every file opened once: UserError names the first unreadable one, or they are left out and counted."""
        with ThreadPoolExecutor() as pool, progress("checking images", len(self), unit="images") as advance:
            bad = []
            for file, readable in zip(self.files, pool.map(_is_readable, self.files), strict=True):
                advance()
                if not readable:
                    bad.append(file)
        if not bad:
            return self
        if not self.skip_bad:
            raise UserError(
                f"cannot read the image {bad[0]}", "replace it, or leave such images out with --skip-bad-images"
            )
        say(f"left out {len(bad)} unreadable of {len(self)} images, the first: {bad[0]}")
        unreadable = set(bad)
        kept = [i for i, file in enumerate(self.files) if file not in unreadable]
        left = FolderImages([self.files[i] for i in kept], [int(self.labels_N[i]) for i in kept], self.root, True)
        lost = sorted(set(self.labels_N.tolist()) - set(left.labels_N.tolist()))
        if lost:
            first = self.files[int(np.argmax(self.labels_N == lost[0]))].parent
            raise UserError(f"no image of {first} can be read", "replace its images, or remove the class")
        return left


@dataclass(frozen=True)
class FolderSet:
    classes: list[str]
    train: FolderImages
    gate: FolderImages


def folder_set(path: Path, split_seed: int, skip_bad: bool) -> FolderSet:
    """The data set in a folder.

    Raises UserError for no such folder, no images, one class, or a class in val that train lacks.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", LAYOUT)
    val = next((path / name for name in VAL_NAMES if (path / name).is_dir()), None)
    if (path / "train").is_dir() and val is not None:
        return _from_two(path, path / "train", val, skip_bad)
    return _from_one(path, split_seed, skip_bad)


def _from_two(path: Path, train: Path, val: Path, skip_bad: bool) -> FolderSet:
    train_files, val_files = _class_files(train), _class_files(val)
    extra = sorted(set(val_files) - set(train_files))
    if extra:
        raise UserError(
            f"{val} has the class {extra[0]!r}, which {train} lacks",
            f"add {train / extra[0]}, or remove {val / extra[0]}",
        )
    classes = sorted(train_files)
    _refuse_one_class(train, classes)
    sides = [_labelled(files, classes, path, skip_bad) for files in (train_files, val_files)]
    return FolderSet(classes, *sides)


def _from_one(path: Path, split_seed: int, skip_bad: bool) -> FolderSet:
    """A fifth of the images, drawn with the seed, becomes the gate's."""
    files = _class_files(path)
    classes = sorted(files)
    _refuse_one_class(path, classes)
    everything = _labelled(files, classes, path, skip_bad)
    order = np.random.default_rng(split_seed).permutation(len(everything))
    cut = max(1, round(len(everything) * GATE_SHARE))
    sides = [
        FolderImages([everything.files[i] for i in part], [int(everything.labels_N[i]) for i in part], path, skip_bad)
        for part in (np.sort(order[cut:]), np.sort(order[:cut]))
    ]
    return FolderSet(classes, *sides)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """Class name → its image files."""
    found = {entry.name: image_files(entry) for entry in sorted(folder.iterdir()) if entry.is_dir()}
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise UserError(f"{folder} holds no images in class folders", LAYOUT)
    return found


def _refuse_one_class(folder: Path, classes: list[str]) -> None:
    if len(classes) == 1:
        raise UserError(f"{folder} holds one class, {classes[0]!r}; a classifier needs at least two", LAYOUT)


def _labelled(files: dict[str, list[Path]], classes: list[str], root: Path, skip_bad: bool) -> FolderImages:
    pairs = [(file, classes.index(name)) for name in sorted(files) for file in files[name]]
    return FolderImages([file for file, _ in pairs], [label for _, label in pairs], root, skip_bad)


def _is_readable(file: Path) -> bool:
    """Whether Pillow decodes the whole file; a JPEG is decoded at an eighth of its size, which reads every byte."""
    try:
        with Image.open(file) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
    except Exception:  # a decoder of Pillow's may raise anything on a broken file
        return False
    return True
