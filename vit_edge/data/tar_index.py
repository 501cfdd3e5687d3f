"""Where the samples of WebDataset shards are: every tar header is read once, then any image by (shard, offset, size).

A shard is a plain tar. Members that share a key (their path up to the first dot of the file's name) are one sample: an
image (.jpg, .png, …) and its label, a number or a name in .cls, or {"label": …} in .json. N samples.
"""

import json
import re
import tarfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from vit_edge.errors import UserError
from vit_edge.preprocess import IMAGE_SUFFIXES
from vit_edge.progress import progress

IMAGES = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
UNPACK = "unpack it to a plain .tar (gunzip, unzstd, …): images are compressed already"
COPY = "copy or write the shard again, or leave it out"


@dataclass(frozen=True)
class TarIndex:
    """Arrays, not objects: N may be millions. `keys` holds the keys' UTF-8 one after the other, label_N indexes `labels`."""

    shards: list[Path]
    keys: bytes
    labels: list[str]
    shard_N: np.ndarray
    offset_N: np.ndarray
    size_N: np.ndarray
    key_end_N: np.ndarray
    label_N: np.ndarray

    def shard(self, row: int) -> Path:
        return self.shards[self.shard_N[row]]

    def key(self, row: int) -> str:
        start = self.key_end_N[row - 1] if row else 0
        return self.keys[start : self.key_end_N[row]].decode()

    def read(self, row: int) -> bytes:
        """The image as it is encoded, from a file that is opened for it: processes share no position."""
        shard, size = self.shard(row), int(self.size_N[row])
        try:
            with shard.open("rb") as file:
                file.seek(int(self.offset_N[row]))
                content = file.read(size)
        except OSError as err:
            raise UserError(f"cannot read {self.key(row)} of {shard}: {err.strerror}", COPY) from err
        if len(content) < size:
            raise UserError(f"{shard} has become shorter: {self.key(row)} has {len(content)} of {size} bytes", COPY)
        return content


@dataclass
class _Sample:
    key: str
    image: tuple[int, int] | None = None  # offset, size
    cls: str | None = None
    json: str | None = None

    @property
    def label(self) -> str | None:
        return self.json if self.cls is None else self.cls


def index(shards: list[Path]) -> TarIndex:
    """Raises UserError that names the shard, and the key, of what is compressed, truncated, or without image or label."""
    shard_N, offset_N, size_N, key_end_N, label_N = (array(kind) for kind in "iqqqi")
    keys, codes = bytearray(), dict[str, int]()
    with progress("indexing shards", len(shards), unit="shards") as advance:
        for number, shard in enumerate(shards):
            for sample in _samples(shard):
                assert sample.image is not None
                assert sample.label is not None
                shard_N.append(number)
                offset_N.append(sample.image[0])
                size_N.append(sample.image[1])
                keys += sample.key.encode(errors="replace")
                key_end_N.append(len(keys))
                label_N.append(codes.setdefault(sample.label, len(codes)))
            advance()
    arrays = [np.asarray(values) for values in (shard_N, offset_N, size_N, key_end_N, label_N)]
    return TarIndex(shards, bytes(keys), list(codes), *arrays)


def first_images(shard: Path, count: int) -> list[bytes]:
    """The first `count` images as they are encoded."""
    images = (place for place in _members(shard) if place.suffix in IMAGES)
    return [place.content() for place in islice(images, count)]


@dataclass(frozen=True)
class _Member:
    key: str
    suffix: str
    offset: int
    size: int
    file: IO[bytes]

    def content(self) -> bytes:
        self.file.seek(self.offset)
        return self.file.read(self.size)


def _samples(shard: Path) -> Iterator[_Sample]:
    samples: dict[str, _Sample] = {}
    for member in _members(shard):
        sample = samples.setdefault(member.key, _Sample(member.key))
        if member.suffix in IMAGES:
            if sample.image is not None:
                raise UserError(f"{shard}: the sample {member.key} has two images", "keep one of them")
            sample.image = (member.offset, member.size)
        elif member.suffix == "cls":
            sample.cls = _label_of(member.content().decode(errors="replace"))
        elif member.suffix == "json":
            sample.json = _label_in(member, shard)
    for sample in samples.values():
        if sample.image is None and sample.label is not None:
            raise UserError(
                f"{shard}: the sample {sample.key} has a label and no image", f"expected one of .{', .'.join(IMAGES)}"
            )
        if sample.image is not None and not sample.label:
            raise UserError(
                f"{shard}: the sample {sample.key} has no label",
                'expected a number or a name in .cls, or {"label": …} in .json',
            )
        if sample.image is not None:
            yield sample


def _label_in(member: _Member, shard: Path) -> str | None:
    """The label in a sample's .json; None where that has none."""
    problem, fix = f"{shard}: {member.key}.json", 'expected {"label": a number or a name}'
    try:
        found = json.loads(member.content())
    except ValueError as err:
        raise UserError(f"{problem} is not valid JSON: {err}", fix) from err
    label = found.get("label") if isinstance(found, dict) else None
    if label is not None and (isinstance(label, bool) or not isinstance(label, int | str)):
        raise UserError(f"{problem} has the label {label!r}", fix)
    return None if label is None else _label_of(str(label))


def _label_of(text: str) -> str:
    """Without spaces around it, and a number in its shortest form."""
    text = text.strip()
    return str(int(text)) if NUMBER.fullmatch(text) else text


def _members(shard: Path) -> Iterator[_Member]:
    """The regular files of a shard that belong to samples. Raises UserError unless they are all there, to the end mark."""
    last = "the first member"
    try:
        with shard.open("rb") as file:
            if file.read(4).startswith(COMPRESSED):
                raise UserError(f"{shard} is compressed, so that no image can be read without those before it", UNPACK)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in iter(tar.next, None):
                    tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every header
                    last = member.name
                    folder, slash, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    if member.isreg() and stem and not stem.startswith("__"):
                        yield _Member(folder + slash + stem, suffix.lower(), member.offset_data, member.size, file)
                _require_end_mark(file, tar.offset)
    except (OSError, tarfile.TarError) as err:
        raise UserError(f"{shard} is truncated or damaged after {last}: {err}", COPY) from err


def _require_end_mark(file: IO[bytes], offset: int) -> None:
    """tarfile takes a damaged header, or the end of a truncated file, for the end of the archive."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or not block:
        raise tarfile.ReadError("no valid header" if block else "the mark of the archive's end is missing")
