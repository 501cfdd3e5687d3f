"""What travels to a device: the target's files, the float ones beside them, the gate's images, and bundle.json.

bundle.json    what the files are, how they were made, SHA-256 and size of every one
int8/…         the target's own files: .onnx, or .xml + .bin
float/…        the same student in float for this target
evaluation/…   the gate's images and the reference's logits; may travel apart
"""

import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, ValidationError

from vit_edge.errors import UserError
from vit_edge.evaluation import FileEntry
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import Limits
from vit_edge.settings import Settings
from vit_edge.store import digest_and_size, write_json
from vit_edge.target import Target

MANIFEST = "bundle.json"
MAX_MANIFEST_BYTES = 16 << 20
COPY_AGAIN = "copy the bundle again from the machine that exported it, or export again"


class ModelInfo(Settings):
    name: str
    geometry: dict[str, Any] = Field({}, description="what differs from the name's own geometry")
    parameters: int
    multiply_adds: int | None = Field(None, description="of one image")


class Manifest(Settings):
    """bundle.json."""

    schema_name: Literal["vit-edge/bundle/1"] = Field("vit-edge/bundle/1", alias="schema")
    target: Target
    model: ModelInfo
    classes: list[str]
    preprocessing: Preprocessing
    input_layout: Literal["uint8-nhwc", "float-nchw"] = "uint8-nhwc"
    int8_files: list[str] = Field(description="the artefact's files, the one to open first")
    float_files: dict[str, list[str]] = Field(
        description="precision in the graph (f32, fp16) → files, the one to open first"
    )
    expected_int8: list[str] | None = Field(None, description="names of the matrix products that must run in int8")
    session_options: dict[str, str] = Field({}, description="options that the runtime needs beside its defaults")
    limits: Limits = Field(Limits(), description="advisory: the recipe's, for a gate that is given none")
    provenance: dict[str, Any] = {}
    evaluation_sha256: str | None = Field(None, description="digest of evaluation/evaluation.json")
    files: dict[str, FileEntry] = {}


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files have been checked."""

    folder: Path
    digest: str
    manifest: Manifest

    @property
    def int8(self) -> list[Path]:
        return [self.folder / name for name in self.manifest.int8_files]

    @property
    def floats(self) -> dict[str, list[Path]]:
        return {
            precision: [self.folder / name for name in names] for precision, names in self.manifest.float_files.items()
        }

    @property
    def evaluation_folder(self) -> Path:
        return self.folder / "evaluation"


def write(folder: Path, manifest: dict[str, Any], evaluation: Path | None) -> None:
    """Completes a bundle: `folder` already holds int8/ and float/; adds the evaluation and bundle.json.

    `manifest` holds Manifest's fields but `files` and `evaluation_sha256`, as plain JSON data.
    The evaluation's files are linked where the file system allows it, else copied.
    """
    digest = None
    if evaluation is not None:
        digest = digest_and_size(evaluation / "evaluation.json")["sha256"]
        shutil.copytree(evaluation, folder / "evaluation", copy_function=_link_or_copy)
    files = {name: digest_and_size(folder / name) for name in _contents(folder) if not name.startswith("evaluation/")}
    values = {"schema": "vit-edge/bundle/1", **manifest, "evaluation_sha256": digest, "files": files}
    write_json(folder / MANIFEST, Manifest.model_validate(values).model_dump(mode="json", by_alias=True))


def read(folder: Path) -> Bundle:
    """The bundle in `folder`, every file checked: none missing, none changed, none added, none outside it.

    The evaluation has digests of its own (`evaluation.read`) and may be absent.
    Raises UserError for anything else.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} is not a bundle: it holds no {MANIFEST}", "give a folder or zip that `vit-edge export` wrote"
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes, expected at most {MAX_MANIFEST_BYTES}", COPY_AGAIN)
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        raise UserError(
            f"{path} is not valid: {'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}", COPY_AGAIN
        ) from err
    _check_files(folder, manifest)
    return Bundle(folder, digest_and_size(path)["sha256"], manifest)


@contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """The bundle at `path`, a folder or a zip; a zip is unpacked for as long as the context lasts."""
    if path.is_dir():
        yield read(path)
    elif path.is_file() and zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory(prefix="vit-edge-") as unpacked:
            _unzip(path, Path(unpacked))
            yield read(Path(unpacked))
    else:
        found = "a file that is no zip" if path.is_file() else "nothing there"
        raise UserError(f"{path} is not a bundle: {found}", "give a folder or zip that `vit-edge export` wrote")


def pack(folder: Path, archive: Path) -> None:
    """Writes a bundle's folder as one zip, whole or not at all."""
    temporary = archive.with_name(archive.name + ".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in _contents(folder):
            zipped.write(folder / name, name)
    temporary.replace(archive)


def _check_files(folder: Path, manifest: Manifest) -> None:
    listed = set(manifest.files)
    used = {*manifest.int8_files, *(name for names in manifest.float_files.values() for name in names)}
    for name in sorted(listed | used):
        if not _stays_inside(name):
            raise UserError(f"{folder / MANIFEST} names the file {name!r}, which leaves the bundle", COPY_AGAIN)
    for name in sorted(used - listed):
        raise UserError(f"{folder / MANIFEST} uses {name!r} but lists no SHA-256 of it", COPY_AGAIN)
    for name in _contents(folder):
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a symbolic link; a bundle holds plain files", COPY_AGAIN)
        if name not in listed and name != MANIFEST and not name.startswith("evaluation/"):
            raise UserError(
                f"{folder / name} does not belong to the bundle: {MANIFEST} does not list it",
                "remove it, or export again",
            )
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the bundle", COPY_AGAIN)
        found = digest_and_size(path)
        if found["size_bytes"] != entry.size_bytes:
            raise UserError(f"{path} has {found['size_bytes']} bytes, expected {entry.size_bytes}", COPY_AGAIN)
        if found["sha256"] != entry.sha256:
            raise UserError(
                f"{path} has been changed: SHA-256 {found['sha256'][:12]}…, expected {entry.sha256[:12]}…", COPY_AGAIN
            )


def _unzip(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                is_link = stat.S_ISLNK(entry.external_attr >> 16)
                if is_link or not _stays_inside(entry.filename.rstrip("/")):
                    raise UserError(f"{archive} holds {entry.filename!r}, which leaves the bundle", COPY_AGAIN)
            zipped.extractall(folder)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as err:
        raise UserError(f"{archive} cannot be unpacked: {err}", COPY_AGAIN) from err


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name
    )


def _contents(folder: Path) -> list[str]:
    """Paths, with slashes, of everything in `folder` that is no folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
        return destination
    except OSError:
        return shutil.copy2(source, destination)
