"""WebDataset shards on this machine's disks: train and gate told apart by name, classes from classes.txt or the labels."""

import glob
import os
import re
from itertools import product
from pathlib import Path

import numpy as np

from vit_edge.data import tar_index
from vit_edge.data.images import SAMPLE, DataSet, EncodedImages, Source, checked, gate_share, native_size
from vit_edge.data.tar_index import NUMBER, UNPACK, TarIndex
from vit_edge.errors import UserError
from vit_edge.progress import say

EXPECTED = "give a folder of .tar files, or a pattern such as 'wds:/data/{train,val}-{000..003}.tar'"
REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
SIDES = {"val": r"val|valid|validation|eval", "test": r"test"}
CLASS_LIST = "classes.txt"


class ShardImages(EncodedImages):
    """Rows of an index, with labels."""

    def __init__(self, index: TarIndex, rows_N: np.ndarray, labels_N: np.ndarray):
        self.index, self.rows_N, self.labels_N = index, rows_N, labels_N

    def name(self, i: int) -> str:
        row = int(self.rows_N[i])
        return f"{self.index.shard(row).name}/{self.index.key(row)}"

    def encoded(self, i: int) -> bytes:
        return self.index.read(int(self.rows_N[i]))

    def subset(self, indices: np.ndarray) -> "ShardImages":
        return ShardImages(self.index, self.rows_N[indices], self.labels_N[indices])


def source(spec: str, places: str, split_seed: int, skip_bad: bool) -> Source:
    """The data set in a folder of shards, or in patterns with {000..146}, {a,b}, * and ? (several: joined by ::).

    Shards of the gate have val, validation or test in their name or folder. Without any, a fifth of the images, drawn
    with the seed, is the gate's. Raises UserError for remote, compressed, missing or broken shards, and for bad labels.
    """
    root, shards = _found(places)
    train_shards, gate_shards = _told_apart(root, shards)

    def load() -> DataSet:
        index, listed = tar_index.index(train_shards), _class_list(root)
        classes = _in_order(index.labels) if listed is None else listed
        if len(classes) < 2:
            raise UserError(
                f"{root} holds {len(classes)} classes: {', '.join(classes)}", "a classifier needs at least two"
            )
        train = _labelled(index, classes, listed is not None)
        if gate_shards:
            gate = _labelled(tar_index.index(gate_shards), classes, listed is not None)
        else:
            train, gate = gate_share(train, split_seed)
        return DataSet(spec, classes, checked(train, classes, skip_bad), checked(gate, classes, skip_bad))

    size = native_size(tar_index.first_images(train_shards[0], SAMPLE))
    return Source(spec, size, train_shards, gate_shards or train_shards, load)


def _labelled(index: TarIndex, classes: list[str], listed: bool) -> ShardImages:
    """listed: the classes come from classes.txt, where a label that is a number counts its lines from 0."""
    numbers = {name: number for number, name in enumerate(classes)}

    def number(label: str) -> int:
        if listed and NUMBER.fullmatch(label):
            return int(label) if 0 <= int(label) < len(classes) else -1
        return numbers.get(label, -1)

    labels_N = np.array([number(label) for label in index.labels], dtype=np.int64)[index.label_N]
    if (labels_N < 0).any():
        row = int(np.argmax(labels_N < 0))
        label = index.labels[index.label_N[row]]
        expected = (
            f"0 to {len(classes) - 1}, or a name in {CLASS_LIST}" if listed else "one of the training shards' labels"
        )
        raise UserError(
            f"{index.shard(row)}: the sample {index.key(row)} has the label {label!r}, expected {expected}",
            f"mend the label, or {'complete ' + CLASS_LIST if listed else f'list every class in {CLASS_LIST} beside the shards'}",
        )
    return ShardImages(index, np.arange(len(labels_N)), labels_N)


def _in_order(labels: list[str]) -> list[str]:
    return sorted(labels, key=int) if all(NUMBER.fullmatch(label) for label in labels) else sorted(labels)


def _class_list(root: Path) -> list[str] | None:
    """The lines of classes.txt beside the shards; None when there is none."""
    path = root / CLASS_LIST
    if not path.is_file():
        return None
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"cannot read {path}: {err}", "write one class a line, in UTF-8") from err
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise UserError(f"{path} names the class {twice!r} twice", "name each class once")
    return names


def _found(places: str) -> tuple[Path, list[Path]]:
    """The shards, in order, and the folder that they are in or below."""
    if REMOTE.search(places):
        raise UserError(
            f"wds:{places}: expected shards on this machine, found an address", f"copy them here, then {EXPECTED}"
        )
    folder = Path(places).expanduser()
    if folder.is_dir():
        root, shards = folder, _tars_below(folder)
    else:
        shards = [shard for part in places.split("::") for place in _expanded(part) for shard in _matching(place)]
        root = Path(os.path.commonpath([shard.parent for shard in shards]))
    packed = next((shard for shard in shards if COMPRESSED.search(shard.name)), None)
    if packed is not None:
        raise UserError(f"{packed} is compressed, so that no image can be read without those before it", UNPACK)
    return root, shards


def _tars_below(folder: Path) -> list[Path]:
    files = sorted(Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names)
    shards = [
        file
        for file in files
        if not file.name.startswith(".") and (file.suffix == ".tar" or COMPRESSED.search(file.name))
    ]
    if not shards:
        raise UserError(f"{folder} holds no .tar files", EXPECTED)
    return shards


def _matching(place: str) -> list[Path]:
    path = Path(place).expanduser()
    if path.is_dir():
        return _tars_below(path)
    if path.is_file():
        return [path]
    found = sorted(Path(match) for match in glob.glob(str(path)) if Path(match).is_file())
    if not found:
        raise UserError(f"there is no shard {path}", EXPECTED)
    return found


def _expanded(pattern: str) -> list[str]:
    """Every reading of a pattern with {a,b} and {000..146}: a number is padded as the pattern's first is."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if span is None:
        return inside.split(",")
    first, last = span.groups()
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _told_apart(root: Path, shards: list[Path]) -> tuple[list[Path], list[Path]]:
    """The training shards, and the gate's: those of val, or else those of test."""
    sides: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for shard in shards:
        name = shard.relative_to(root).as_posix().lower()
        words = (side for side, pattern in SIDES.items() if re.search(rf"(?<![a-z])({pattern})(?![a-z])", name))
        sides[next(words, "train")].append(shard)
    if not sides["train"]:
        raise UserError(f"{root} holds no training shards: each name says val or test", EXPECTED)
    if sides["val"] and sides["test"]:
        say(f"left out {len(sides['test'])} shards of test, the first: {sides['test'][0]}; the gate's are those of val")
    return sides["train"], sides["val"] or sides["test"]
