"""What travels to a device: the target's files, the float ones beside them, the gate's images, and bundle.json.

bundle.json      what the files are, how they were made, SHA-256 and size of every one
bundle.json.sig  where it is signed: Ed25519 over bundle.json's bytes
int8/…           the target's own files: .onnx, or .xml + .bin
float/…          the same student in float for this target, fp16 where that must stand in the graph in float/fp16/
evaluation/…     the gate's images and the reference's logits; may travel apart

Nobody vouches for a bundle: nothing is parsed before its size, its digest and, where one is asked for, its signature
have been checked, and nothing is opened by a runtime before `safety` has looked into it.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vit_edge import evaluation
from vit_edge.errors import UserError
from vit_edge.evaluation import FileEntry
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import Limits
from vit_edge.safety import archive, documents, models, names, signature
from vit_edge.safety.documents import Count, Text
from vit_edge.settings import Settings
from vit_edge.store import digest_and_size, write_json
from vit_edge.target import Target

MANIFEST = "bundle.json"
SIGNATURE = f"{MANIFEST}.sig"
EVALUATION = "evaluation"
MAX_IMAGE_SIZE, MIN_CROP = 4096, 0.05
COPY_AGAIN = "copy the bundle again from the machine that exported it, or export again"
Artefact = Annotated[list[str], Field(min_length=1, max_length=64)]


class ModelInfo(Settings):
    name: Text
    geometry: dict[str, Any] = Field({}, description="what differs from the name's own geometry")
    parameters: Count | None = Field(None, description="null for a model made elsewhere")
    multiply_adds: Count | None = Field(None, description="of one image")


class Manifest(Settings):
    """bundle.json."""

    schema_name: Literal["vit-edge/bundle/1"] = Field("vit-edge/bundle/1", alias="schema")
    target: Target
    model: ModelInfo
    classes: list[Text] = Field(min_length=1, max_length=1_000_000)
    preprocessing: Preprocessing
    input_layout: Literal["uint8-nhwc", "float-nchw"] = "uint8-nhwc"
    int8_files: Artefact = Field(description="the artefact's files, the one to open first")
    reduced_files: Artefact | None = Field(
        None, description="int8 with weights of seven bits, for x86 processors without VNNI"
    )
    float_files: dict[Literal["f32", "fp16", "bf16"], Artefact] = Field(
        description="precision in the graph → files, the one to open first"
    )
    expected_int8: list[Text] | None = Field(None, description="names of the matrix products that must run in int8")
    session_options: dict[str, Text] = Field({}, description="options that the runtime needs beside its defaults")
    limits: Limits = Field(Limits(), description="advisory: the recipe's, for a gate that is given none")
    provenance: dict[str, Any] = {}
    evaluation_sha256: str | None = Field(None, description="digest of evaluation/evaluation.json")
    files: dict[str, FileEntry] = Field({}, max_length=names.MAX_FILES)

    @property
    def artefacts(self) -> list[list[str]]:
        reduced = [self.reduced_files] if self.reduced_files else []
        return [self.int8_files, *reduced, *self.float_files.values()]

    @model_validator(mode="after")
    def _images_have_a_size(self) -> "Manifest":
        given = self.preprocessing
        if given.image_size > MAX_IMAGE_SIZE or given.crop < MIN_CROP or min(given.std) <= 0:
            raise ValueError(
                f"preprocessing: expected image_size up to {MAX_IMAGE_SIZE}, crop of at least {MIN_CROP}, std above 0"
            )
        return self

    @model_validator(mode="after")
    def _names_are_plain(self) -> "Manifest":
        for name in {*self.files, *(name for artefact in self.artefacts for name in artefact)}:
            if not names.is_plain(name):
                raise ValueError(f"{name!r} is no plain file name, it leaves the bundle or is not the same everywhere")
            if name.split("/")[0].lower() in (EVALUATION, MANIFEST, SIGNATURE):
                raise ValueError(f"{name!r} stands where something else belongs")
        if again := names.colliding(self.files):
            raise ValueError(f"{again!r} is listed twice, in upper and lower case")
        return self


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files have been checked. signed_by: the public key whose owner signed it, where one was asked for."""

    folder: Path
    digest: str
    manifest: Manifest
    signed_by: Path | None = None

    @property
    def int8(self) -> list[Path]:
        return [self.folder / name for name in self.manifest.int8_files]

    @property
    def reduced(self) -> list[Path] | None:
        names = self.manifest.reduced_files
        return None if names is None else [self.folder / name for name in names]

    @property
    def floats(self) -> dict[str, list[Path]]:
        return {
            precision: [self.folder / name for name in files] for precision, files in self.manifest.float_files.items()
        }

    @property
    def evaluation_folder(self) -> Path:
        return self.folder / EVALUATION


@dataclass(frozen=True)
class Trust:
    """What a bundle must show before it is read.

    sha256: what bundle.json's SHA-256 must begin with, at least 12 digits; public_key: a PEM file, whose owner must
    have signed bundle.json.
    """

    sha256: str | None = None
    public_key: Path | None = None

    def check(self, content: bytes, signed: bytes | None, shown: Path) -> str:
        """The SHA-256 of bundle.json's `content`. signed: its signature's file, where there is one. Raises UserError."""
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256 is not None and (len(self.sha256) < 12 or not digest.startswith(self.sha256.lower())):
            raise UserError(
                f"the bundle's SHA-256 is {digest}, expected {self.sha256}",
                "get the bundle from where that digest was published; give at least 12 of its digits",
            )
        if self.public_key is not None:
            if signed is None:
                raise UserError(
                    f"{shown} is not signed: it has no {SIGNATURE}", "sign it: vit-edge sign BUNDLE --key KEY"
                )
            signature.verify(content, signed, self.public_key, shown / MANIFEST)
        return digest


def write(folder: Path, manifest: dict[str, Any], evaluation: Path | None) -> None:
    """Completes a bundle: `folder` already holds int8/ and float/; adds the evaluation and bundle.json.

    `manifest` holds Manifest's fields but `files` and `evaluation_sha256`, as plain JSON data.
    The evaluation's files are linked where the file system allows it, else copied.
    """
    digest = None
    if evaluation is not None:
        digest = digest_and_size(evaluation / "evaluation.json")["sha256"]
        shutil.copytree(evaluation, folder / EVALUATION, copy_function=_link_or_copy)
    files = {
        name: digest_and_size(folder / name)
        for name in names.contents(folder)
        if not name.startswith(f"{EVALUATION}/") and name not in (MANIFEST, SIGNATURE)
    }
    values = {"schema": "vit-edge/bundle/1", **manifest, "evaluation_sha256": digest, "files": files}
    write_json(folder / MANIFEST, Manifest.model_validate(values).model_dump(mode="json", by_alias=True))


def read(folder: Path, *, trust: Trust = Trust(), origin: Path | None = None) -> Bundle:
    """The bundle in `folder`, every file checked: none missing, none changed, none added, none outside it.

    origin: the zip that the folder was unpacked from, to name in errors. The evaluation has digests of its own
    (`evaluation.read`) and may be absent. Raises UserError for anything else.
    """
    shown = origin or folder
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
        raise UserError(
            f"{shown} is not a bundle: it holds no {MANIFEST}", "give a folder or zip that `vit-edge export` wrote"
        )
    content = documents.bounded(folder / MANIFEST, shown / MANIFEST, COPY_AGAIN)
    digest = trust.check(content, _signature(folder), shown)
    manifest = documents.parsed(Manifest, content, shown / MANIFEST, COPY_AGAIN)
    _check_files(folder, manifest, shown)
    models.check_options(manifest.target.runtime, manifest.session_options)
    for artefact in manifest.artefacts:
        models.check_artefact(folder, manifest.target.runtime, artefact, manifest.files)
    return Bundle(folder, digest, manifest, trust.public_key)


@contextmanager
def opened(path: Path, trust: Trust = Trust()) -> Iterator[Bundle]:
    """The bundle at `path`, a folder or a zip; a zip is unpacked for as long as the context lasts."""
    if path.is_dir():
        yield read(path, trust=trust)
    elif path.is_file() and zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory(prefix="vit-edge-") as unpacked:
            _unpack(path, Path(unpacked), trust)
            yield read(Path(unpacked), trust=trust, origin=path)
    else:
        found = "a file that is no zip" if path.is_file() else "nothing there"
        raise UserError(f"{path} is not a bundle: {found}", "give a folder or zip that `vit-edge export` wrote")


def pack(folder: Path, destination: Path) -> None:
    """Writes a bundle's folder as one zip, whole or not at all."""
    temporary = destination.with_name(destination.name + ".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in names.contents(folder):
            zipped.write(folder / name, name)
    temporary.replace(destination)


def sign(path: Path, key: Path) -> None:
    """Signs the bundle in a folder or a zip with the private key in a PEM file; in the zip, only the signature is added.

    Raises UserError for a bundle that has been changed, or a zip that is signed already.
    """
    with opened(path) as checked:
        signed = signature.sign((checked.folder / MANIFEST).read_bytes(), key)
        already = (checked.folder / SIGNATURE).exists()
    if path.is_dir():
        (path / SIGNATURE).write_bytes(signed)
        return
    if already:
        raise UserError(f"{path} is signed already", "sign the folder that it was made from, and zip that again")
    temporary = Path(shutil.copyfile(path, path.with_name(path.name + ".tmp")))
    with zipfile.ZipFile(temporary, "a") as zipped:
        place = next(name for name in zipped.namelist() if name.split("/")[-1] == MANIFEST)
        zipped.writestr(place + ".sig", signed)
    temporary.replace(path)


def _unpack(path: Path, folder: Path, trust: Trust) -> None:
    """Unpacks the files that bundle.json, already held to `trust`, lists with the size that it states, and no other."""
    with archive.opened(path, MANIFEST) as zipped:
        content = zipped.read(MANIFEST, documents.MAX_JSON_BYTES)
        if content is None:
            raise UserError(
                f"{path} is not a bundle: it holds no {MANIFEST}", "give a folder or zip that `vit-edge export` wrote"
            )
        signed = zipped.read(SIGNATURE, signature.SIGNATURE_BYTES)
        trust.check(content, signed, path)
        manifest = documents.parsed(Manifest, content, path / MANIFEST, COPY_AGAIN)
        sizes = {MANIFEST: len(content)} | {name: entry.size_bytes for name, entry in manifest.files.items()}
        if signed is not None:
            sizes[SIGNATURE] = len(signed)
        inside = f"{EVALUATION}/{evaluation.MANIFEST}"
        listed = zipped.read(inside, documents.MAX_JSON_BYTES)
        if listed is not None:
            found = evaluation.manifest_of(listed, path / inside, manifest.evaluation_sha256)
            sizes[inside] = len(listed)
            sizes |= {f"{EVALUATION}/{name}": entry.size_bytes for name, entry in found.files.items()}
        zipped.unpack(folder, sizes)


def _signature(folder: Path) -> bytes | None:
    path = folder / SIGNATURE
    if not path.is_file() or path.is_symlink():
        return None
    return documents.bounded(path, path, "sign the bundle again", signature.SIGNATURE_BYTES)


def _check_files(folder: Path, manifest: Manifest, shown: Path) -> None:
    listed = set(manifest.files)
    used = {name for artefact in manifest.artefacts for name in artefact}
    for name in sorted(used - listed):
        raise UserError(f"{shown / MANIFEST} uses {name!r} but lists no SHA-256 of it", COPY_AGAIN)
    may_be = {MANIFEST, SIGNATURE}
    if manifest.evaluation_sha256 is not None:
        may_be |= {f"{EVALUATION}/{name}" for name in evaluation.FILES}
    for name in names.contents(folder):
        if (folder / name).is_symlink():
            raise UserError(f"{shown / name} is a symbolic link; a bundle holds plain files", COPY_AGAIN)
        if name not in listed | may_be:
            raise UserError(
                f"{shown / name} does not belong to the bundle: {MANIFEST} does not list it",
                "remove it, or export again",
            )
    for name, entry in sorted(manifest.files.items()):
        evaluation.check_file(folder / name, entry, shown / name, COPY_AGAIN)


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
        return destination
    except OSError:
        return shutil.copy2(source, destination)
