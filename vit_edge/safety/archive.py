"""A zip from outside: its list of files is judged before anything is unpacked, and nothing is unpacked that is not asked for."""

import io
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from vit_edge.errors import UserError
from vit_edge.safety import names

MAX_PIECE_BYTES = 4 << 20
# zlib packs nothing better than 1,032 : 1; images of one colour reach some hundreds.
MAX_RATIO = 1000
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
PIECE_BYTES = 1 << 20
AGAIN = "zip the bundle's folder again, or get it again from its maker"
# What zipfile raises for what is no zip, on purpose and by accident.
BROKEN = (OSError, EOFError, RuntimeError, ValueError, OverflowError, struct.error, zlib.error, zipfile.BadZipFile)


class Archive:
    """The files of an open zip by their plain names; one folder around them all, as file managers make, is left out."""

    def __init__(self, path: Path, zipped: zipfile.ZipFile, landmark: str):
        self._path, self._zipped = path, zipped
        entries = [
            one for one in zipped.infolist() if not one.filename.endswith("/") and not names.is_junk(one.filename)
        ]
        top = _top([one.filename for one in entries], landmark)
        self._entries = {one.filename[len(top) :]: one for one in entries}
        for entry in entries:
            self._judge(entry, top)
        if again := names.colliding(one.filename for one in entries):
            raise UserError(f"{path} holds {again!r} twice", AGAIN)

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a file of at most `limit` bytes; null when it is not there."""
        if name not in self._entries:
            return None
        if self._entries[name].file_size > limit:
            raise UserError(f"{self._path}: {name} is longer than {limit} bytes", AGAIN)
        content = io.BytesIO()
        with translated(self._path), self._zipped.open(self._entries[name]) as file:
            _copy(file, content, self._entries[name].file_size)
        return content.getvalue()

    def unpack(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Writes every file below `folder`. sizes: name → bytes of what may be there; all else is refused.

        Nothing is written unless the sizes are those that the zip states, in a ratio that packing can reach, and fit on the disk.
        """
        for name, entry in self._entries.items():
            if name not in sizes:
                raise UserError(f"{self._path}: {name} does not belong to the bundle", AGAIN)
            if entry.file_size != sizes[name]:
                raise UserError(f"{self._path}: {name} has {entry.file_size} bytes, expected {sizes[name]}", AGAIN)
            if entry.file_size > MAX_RATIO * max(entry.compress_size, 1 << 10):
                raise UserError(f"{self._path}: {name} is packed over {MAX_RATIO} : 1, as no bundle's file is", AGAIN)
        total, free = sum(entry.file_size for entry in self._entries.values()), shutil.disk_usage(folder).free
        if total > free:
            raise UserError(
                f"{self._path} unpacks to {total / 1e6:.0f} MB, {folder.parent} has {free / 1e6:.0f} MB free",
                "unpack it where there is room and give the folder, or set TMPDIR to a larger disk",
            )
        with translated(self._path):
            for name, entry in self._entries.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with self._zipped.open(entry) as source, (folder / name).open("xb") as written:
                    _copy(source, written, sizes[name])

    def _judge(self, entry: zipfile.ZipInfo, top: str) -> None:
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not entry.filename.startswith(top) or not names.is_plain(entry.filename[len(top) :]):
            raise UserError(f"{self._path} holds {entry.filename!r}, which is no file's name in a bundle", AGAIN)
        if kind not in (0, stat.S_IFREG):
            raise UserError(
                f"{self._path}: {entry.filename!r} is a link or a device; a bundle holds plain files", AGAIN
            )
        if entry.flag_bits & 1:
            raise UserError(f"{self._path}: {entry.filename!r} is encrypted", "zip it without a password")
        if entry.compress_type not in METHODS:
            raise UserError(f"{self._path}: {entry.filename!r} is packed in a way other than deflate", AGAIN)


@contextmanager
def opened(path: Path, landmark: str) -> Iterator[Archive]:
    """The zip at `path`; its bundle is where the file called `landmark` lies: at the top, or in the only folder there."""
    with translated(path):
        file = _InPieces(path)
    with file:
        with translated(path):
            zipped = zipfile.ZipFile(file)
        yield Archive(path, zipped, landmark)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    try:
        yield
    except BROKEN as err:
        raise UserError(f"{path} cannot be unpacked: {err}", AGAIN) from err


def _top(files: list[str], landmark: str) -> str:
    """The folder that holds the bundle, with its slash; empty where that is the zip's own top."""
    if landmark in files:
        return ""
    tops = [name[: -len(landmark)] for name in files if PurePosixPath(name).parts[1:] == (landmark,)]
    return tops[0] if len(tops) == 1 else ""


class _InPieces(io.FileIO):
    """A file that is never read in large pieces: zipfile takes a zip's whole list of files in one, however long it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_PIECE_BYTES:
            raise ValueError("its list of files is longer than that of any bundle")
        return super().read(MAX_PIECE_BYTES if size is None or size < 0 else size) or b""


def _copy(source: IO[bytes], written: IO[bytes], size_bytes: int) -> None:
    left = size_bytes
    while piece := source.read(PIECE_BYTES):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"more than the stated {size_bytes} bytes come out")
        written.write(piece)
