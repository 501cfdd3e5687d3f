"""Image folders: train/ and val/ of class folders, one folder of class folders split with a seed, or no classes at all."""

import os
from pathlib import Path

import numpy as np

from vit_edge.data.images import DataSet, EncodedImages, Source, checked, fingerprint, gate_share, native_size
from vit_edge.errors import UserError
from vit_edge.preprocess import image_files

LAYOUT = "expected PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or PATH/CLASS/*.jpg"
VAL_NAMES = ("val", "validation", "test")
NO_LABEL = -1


class FolderImages(EncodedImages):
    """Image files with labels."""

    def __init__(self, files: list[Path], labels_N: np.ndarray, root: Path):
        self.files, self.root = files, root
        self.labels_N = np.asarray(labels_N, dtype=np.int64)

    def name(self, i: int) -> str:
        """The path below the root, with / between its parts."""
        return os.fsencode(self.files[i].relative_to(self.root).as_posix()).decode("utf-8", "replace")

    def encoded(self, i: int) -> Path:
        return self.files[i]

    def subset(self, indices: np.ndarray) -> "FolderImages":
        return FolderImages([self.files[int(i)] for i in indices], self.labels_N[indices], self.root)


def source(spec: str, path: Path, split_seed: int, skip_bad: bool) -> Source:
    """The data set in a folder.

    Raises UserError for no such folder, no images, one class, or a class in val that train lacks.
    """
    _require_folder(path, LAYOUT)
    val = next((path / name for name in VAL_NAMES if (path / name).is_dir()), None)
    if (path / "train").is_dir() and val is not None:
        classes, train, gate = _from_two(path, path / "train", val)
    else:
        classes, train, gate = _from_one(path, split_seed)

    def load() -> DataSet:
        return DataSet(spec, classes, checked(train, classes, skip_bad), checked(gate, classes, skip_bad))

    return Source(spec, native_size(train.files), train.files, gate.files, load)


def unlabelled(path: Path, skip_bad: bool) -> EncodedImages:
    """Every image below a folder, labelled NO_LABEL. Raises UserError for no such folder, no images, an unreadable one."""
    files = _unlabelled_files(path)
    return checked(FolderImages(files, np.full(len(files), NO_LABEL), path), (), skip_bad)


def unlabelled_fingerprint(path: Path) -> str:
    """SHA-256 over the names, sizes and times of the images below a folder."""
    return fingerprint(_unlabelled_files(path))


def _unlabelled_files(path: Path) -> list[Path]:
    expected = "give a folder with images in it, or in folders below it"
    _require_folder(path, expected)
    files = image_files(path)
    if not files:
        raise UserError(f"{path} holds no images", expected)
    return files


def _require_folder(path: Path, expected: str) -> None:
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", expected)


def _from_two(path: Path, train: Path, val: Path) -> tuple[list[str], FolderImages, FolderImages]:
    train_files, val_files = _class_files(train), _class_files(val)
    extra = sorted(set(val_files) - set(train_files))
    if extra:
        raise UserError(
            f"{val} has the class {extra[0]!r}, which {train} lacks",
            f"add {train / extra[0]}, or remove {val / extra[0]}",
        )
    classes = sorted(train_files)
    _refuse_one_class(train, classes)
    return classes, _labelled(train_files, classes, path), _labelled(val_files, classes, path)


def _from_one(path: Path, split_seed: int) -> tuple[list[str], FolderImages, FolderImages]:
    files = _class_files(path)
    classes = sorted(files)
    _refuse_one_class(path, classes)
    return classes, *gate_share(_labelled(files, classes, path), split_seed)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """Class name → its image files."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    for name in names:
        if not name.isascii() and "\ufffd" in os.fsencode(name).decode("utf-8", "replace"):
            raise UserError(f"the name of the class folder {str(folder / name)!r} is not UTF-8", "rename it")
    found = {name: image_files(folder / name) for name in sorted(names)}
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise UserError(f"{folder} holds no images in class folders", LAYOUT)
    return found


def _refuse_one_class(folder: Path, classes: list[str]) -> None:
    if len(classes) == 1:
        raise UserError(f"{folder} holds one class, {classes[0]!r}; a classifier needs at least two", LAYOUT)


def _labelled(files: dict[str, list[Path]], classes: list[str], root: Path) -> FolderImages:
    counts = [len(files.get(name, ())) for name in classes]
    in_order = [file for name in classes for file in files.get(name, ())]
    return FolderImages(in_order, np.repeat(np.arange(len(classes)), counts), root)
