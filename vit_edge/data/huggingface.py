"""Sets of the Hugging Face `datasets` library: from the hub, or from a local directory that the library reads.

SPEC: hf:NAME or hf:DIRECTORY, and behind it any of :CONFIG, :image=COLUMN, :label=COLUMN, :train=SPLIT, :gate=SPLIT.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_edge.data.images import SAMPLE, DataSet, EncodedImages, Source, checked, gate_share, native_size
from vit_edge.errors import UserError, unknown

GATE_SPLITS = ("validation", "val", "valid", "test")
OPTIONS = ("image", "label", "train", "gate")


@dataclass(frozen=True)
class Address:
    """A SPEC taken apart. `place` is a name on the hub, or a directory."""

    place: str
    config: str | None
    options: Mapping[str, str]

    def __str__(self) -> str:
        return f"hf:{self.place}"


class TableImages(EncodedImages):
    """Rows of a table whose column `image` holds {"bytes", "path"}, of which one is enough."""

    def __init__(self, rows: Any, image: str, labels_N: np.ndarray, split: str):
        self.rows, self.image_column, self.labels_N, self.split = rows, image, labels_N, split

    def name(self, i: int) -> str:
        found = self.rows[i][self.image_column] or {}
        return found.get("path") or f"{self.split}[{i}]"

    def encoded(self, i: int) -> Path | bytes:
        found = self.rows[i][self.image_column] or {}
        if found.get("bytes") is not None:
            return bytes(found["bytes"])
        if not found.get("path"):
            raise UserError(f"the {self.split} split has no image in row {i}", "remove the row")
        return Path(found["path"])

    def subset(self, indices: np.ndarray) -> "TableImages":
        return TableImages(self.rows.select(indices), self.image_column, self.labels_N[indices], self.split)


def source(spec: str, rest: str, data_dir: Path | None, split_seed: int, skip_bad: bool) -> Source:
    """The set at an address; one from the hub is downloaded, into `data_dir` or the library's own cache.

    Splits: train, and validation or test; of a set with one split a fifth, drawn with the seed, is the gate's.
    Raises UserError where there is no such set, column or split, where several could be meant, and for bad labels.
    """
    address = _address(rest)
    splits = _splits(address, data_dir)
    train, gate = _sides(address, splits)
    image, label = _columns(address, splits[train].features)
    rows = {name: _rows(address, splits, name, image, label) for name in {train, gate}}

    def load() -> DataSet:
        labels = {name: _labels(address, rows[name], name, label) for name in rows}
        classes = getattr(rows[train].features[label], "names", None) or sorted(set(labels[train]))
        if len(classes) < 2:
            raise UserError(f"{address}: {label!r} holds {len(classes)} classes", "a classifier needs at least two")
        images = {
            name: TableImages(rows[name], image, _numbered(address, name, label, labels[name], classes), name)
            for name in rows
        }
        sides = gate_share(images[train], split_seed) if train == gate else (images[train], images[gate])
        names = [str(name) for name in classes]
        return DataSet(spec, names, *(checked(side, names, skip_bad) for side in sides))

    files = {name: _files(rows[name], image) for name in rows}
    return Source(spec, _native_size(rows[train], image), files[train], files[gate], load)


def _address(rest: str) -> Address:
    if Path(rest).expanduser().is_dir():
        return Address(str(Path(rest).expanduser()), None, {})
    place, *parts = rest.split(":")
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    for name in options:
        if name not in OPTIONS:
            raise unknown(f"part of hf:{rest}", name, OPTIONS)
    configs = [part for part in parts if "=" not in part]
    if not place or len(configs) > 1:
        raise UserError(
            f"cannot read hf:{rest}", "expected hf:NAME, then any of :CONFIG, :image=, :label=, :train=, :gate="
        )
    folder = Path(place).expanduser()
    return Address(str(folder) if folder.is_dir() else place, configs[0] if configs else None, options)


def _splits(address: Address, data_dir: Path | None) -> dict[str, Any]:
    """Split name → table."""
    try:
        import datasets
    except ImportError as err:
        raise UserError(f"{address} needs the package datasets: {err}", 'pip install "vit-edge[hf]"') from err
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = Path(address.place)
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    if saved and address.config is not None:
        raise UserError(f"{address} was saved to disk and has no configurations", f"leave :{address.config} out")
    cache = str(data_dir / "huggingface") if data_dir else None
    try:
        if saved:
            found = datasets.load_from_disk(address.place, keep_in_memory=False)
        else:
            found = datasets.load_dataset(address.place, address.config, cache_dir=cache, keep_in_memory=False)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as err:
        reason = " ".join(str(err.__cause__ or err).split())
        fix = (
            "look at what is in the directory"
            if folder.is_dir()
            else "check the name and the connection, or give a local directory"
        )
        raise UserError(f"cannot load {address}: {reason}", fix) from err
    return dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}


def _sides(address: Address, splits: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the training and the gate's split; the same one twice where a share of it becomes the gate's."""
    for side in ("train", "gate"):
        if address.options.get(side, "") not in ("", *splits):
            raise unknown(f"split of {address}", address.options[side], splits)
    train = address.options.get("train") or ("train" if "train" in splits else next(iter(splits)))
    if "train" not in (*address.options, *splits) and len(splits) > 1:
        raise UserError(f"{address} has no split train, found {', '.join(splits)}", "name one behind it: :train=SPLIT")
    others = (name for name in GATE_SPLITS if name in splits and name != train)
    return train, address.options.get("gate") or next(others, train)


def _columns(address: Address, features: Mapping[str, Any]) -> tuple[str, str]:
    """The columns of images and of labels, found by their types."""
    import datasets

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    raw = [name for name, kind in features.items() if _holds_bytes(kind)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    plain = [name for name, kind in features.items() if _is_plain(kind)]
    image = _column(address, features, "image", images or raw)
    return image, _column(
        address, features, "label", labels or [name for name in plain if name in ("label", "labels")] or plain
    )


def _column(address: Address, features: Mapping[str, Any], role: str, candidates: list[str]) -> str:
    asked = address.options.get(role)
    if asked is not None:
        if asked not in features:
            raise unknown(f"column of {address}", asked, features)
        return asked
    if len(candidates) != 1:
        found = ", ".join(candidates or features)
        problem = f"several columns could be the {role}" if candidates else f"no column holds {role}s"
        raise UserError(f"{address}: {problem}, found {found}", f"name it behind the set: {address}:{role}=COLUMN")
    return candidates[0]


def _holds_bytes(kind: Any) -> bool:
    """A column written without the library's own image type."""
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    return getattr(kind, "dtype", None) in ("binary", "large_binary")


def _is_plain(kind: Any) -> bool:
    return str(getattr(kind, "dtype", "")).removeprefix("u").startswith(("int", "string", "large_string"))


def _rows(address: Address, splits: Mapping[str, Any], split: str, image: str, label: str) -> Any:
    """The table with these two columns, its images as they are encoded."""
    import datasets

    table = splits[split]
    for column in (image, label):
        if column not in table.features:
            raise UserError(
                f"{address}: the split {split} has no column {column!r}, found {', '.join(table.features)}",
                "name another split behind the set: :train=SPLIT or :gate=SPLIT",
            )
    try:
        return table.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    except (TypeError, ValueError, RuntimeError) as err:
        reason = " ".join(str(err).split())
        raise UserError(
            f"{address}: the column {image!r} holds no images: {reason}", "name another with :image=COLUMN"
        ) from err


def _labels(address: Address, rows: Any, split: str, label: str) -> list[Any]:
    labels = rows.select_columns([label]).with_format("arrow")[:].column(label).to_pylist()
    if None in labels:
        raise UserError(f"{address}: row {labels.index(None)} of {split} has no {label}", "remove the row")
    return labels


def _numbered(address: Address, split: str, label: str, labels: list[Any], classes: list[Any]) -> np.ndarray:
    """int64 (N,): a column of class labels holds numbers already, of another one the values are the classes."""
    if labels and isinstance(classes[0], str) and not isinstance(labels[0], str):
        numbers = {number: number for number in range(len(classes))}
    else:
        numbers = {value: number for number, value in enumerate(classes)}
    labels_N = np.array([numbers.get(value, -1) for value in labels], dtype=np.int64)
    if (labels_N < 0).any():
        row = int(np.argmax(labels_N < 0))
        raise UserError(
            f"{address}: row {row} of {split} has the {label} {labels[row]!r}, which is none of the {len(classes)} classes",
            "name another split behind the set: :train=SPLIT or :gate=SPLIT",
        )
    return labels_N


def _files(rows: Any, image: str) -> list[Path]:
    """The table's own files, and those of images that it only names."""
    named = [
        Path(path)
        for chunk in rows.data.column(image).chunks
        if chunk.field("bytes").null_count
        for path in chunk.field("path").to_pylist()
        if path
    ]
    return [Path(file["filename"]) for file in rows.cache_files] + named


def _native_size(rows: Any, image: str) -> int:
    positions: Iterable[int] = range(0, len(rows), max(1, len(rows) // SAMPLE))
    images = TableImages(rows, image, np.zeros(len(rows)), "")
    return native_size([images.encoded(i) for i in positions])
