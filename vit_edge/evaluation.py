"""The gate's images with their labels and the reference's logits: written once per student, shared by its bundles.

    evaluation/evaluation.json   schema, what the reference is, sha256 and size of the arrays
    evaluation/images.npy        uint8 (N, H, W, 3), decoded, resized and cropped, in the split's seeded random order
    evaluation/labels.npy        int64 (N,)
    evaluation/logits.npy        float32 (N, K) of the float student in PyTorch
    evaluation/names.json        N names, for telling a person which image it is

Any prefix of the arrays is a random sample, since their order is a stored permutation.
The SHA-256 of evaluation.json is the digest that bundles know an evaluation by.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, field_validator

from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.safety import arrays, documents, names
from vit_edge.safety.documents import Text
from vit_edge.settings import Settings
from vit_edge.store import digest_and_size, write_json

MANIFEST = "evaluation.json"
ARRAYS = ("images.npy", "labels.npy", "logits.npy")
NAMES = "names.json"
FILES = (MANIFEST, *ARRAYS, NAMES)
MAX_NAMES_BYTES = 1 << 30
COPY_AGAIN = "copy the evaluation folder again from the machine that wrote it"


class FileEntry(Settings):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0, lt=2**53)


def _whole(latency_ms: dict[str, float]) -> dict[str, float]:
    if set(latency_ms) != {"p50", "p90", "p99", "n"}:
        raise ValueError("expected p50, p90, p99 and n")
    return latency_ms


Milliseconds = Annotated[
    dict[str, Annotated[float, Field(gt=0, lt=1e12)]],
    AfterValidator(_whole),
    Field(description="p50, p90, p99 and n at batch 1"),
]


class LowPrecision(Settings):
    """The same student in a lower precision, beside the reference. top1 and agreement: on the first n images."""

    n: int = Field(gt=0)
    top1: float
    agreement: float = Field(description="share of the images that it answers as the reference does")
    latency_ms: Milliseconds


class Reference(Settings):
    """The float student in PyTorch: where it ran, and how well and how fast."""

    device: Text = Field(description="the GPU's or CPU's name")
    kind: Literal["cuda", "cpu", "mps"]
    precision: Text = "f32"
    top1: float
    latency_ms: Milliseconds | None = None
    clock: Literal["cuda events", "wall clock"] = "wall clock"
    beside: dict[Literal["bf16", "fp16"], LowPrecision] = {}
    driver: Text | None = Field(None, description="of the GPU")
    versions: dict[str, str] = {}


class Manifest(Settings):
    schema_name: Literal["vit-edge/evaluation/1"] = Field("vit-edge/evaluation/1", alias="schema")
    n: int = Field(gt=0, lt=10**9)
    data: Text = Field(description="data set and split")
    classes: list[Text] = Field(min_length=1, max_length=1_000_000)
    reference: Reference
    files: dict[str, FileEntry]

    @field_validator("files")
    @classmethod
    def _are_whole(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        if set(files) != set(FILES[1:]):
            raise ValueError(f"expected an entry for each of {', '.join(FILES[1:])} and no other")
        return files


@dataclass(frozen=True)
class Evaluation:
    """N images with labels and reference logits; the images are memory-mapped."""

    folder: Path
    digest: str
    manifest: Manifest
    images_NHWC: np.ndarray
    labels_N: np.ndarray
    logits_NK: np.ndarray
    names: list[str]


def write(
    folder: Path, *, images_NHWC: np.ndarray, labels_N: np.ndarray, logits_NK: np.ndarray, names: list[str],
    classes: list[str], data: str, reference: Reference,
) -> None:  # fmt: skip
    """Writes an evaluation folder."""
    assert images_NHWC.dtype == np.uint8
    assert logits_NK.shape == (len(labels_N), len(classes))
    assert len(images_NHWC) == len(labels_N) == len(names)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = (images_NHWC, labels_N.astype(np.int64), logits_NK.astype(np.float32))
    for name, array in zip(ARRAYS, arrays, strict=True):
        np.save(folder / name, np.ascontiguousarray(array), allow_pickle=False)
    write_json(folder / NAMES, names)
    files = {name: digest_and_size(folder / name) for name in (*ARRAYS, NAMES)}
    manifest = {
        "schema": "vit-edge/evaluation/1",
        "n": len(labels_N),
        "data": data,
        "classes": classes,
        "reference": reference.model_dump(),
        "files": files,
    }
    write_json(folder / MANIFEST, manifest)


def read(folder: Path, expected_digest: str | None = None, images: Path | None = None) -> Evaluation:
    """The evaluation in `folder`, every file checked against its digest.

    images: its images.npy, when that lies elsewhere (`rebuild_images`). Raises UserError when a file is missing or
    changed, or when it is not the evaluation with `expected_digest`.
    """
    content = _content(folder)
    manifest = manifest_of(content, folder / MANIFEST, expected_digest)
    for name in FILES[1:]:
        path = _array_path(folder, name, images)
        check_file(path, manifest.files[name], path, COPY_AGAIN)
    return _loaded(folder, hashlib.sha256(content).hexdigest(), manifest, images)


def find(path: Path) -> Path:
    """The evaluation's folder, from itself, its evaluation.json, its stage or its run."""
    if path.name == MANIFEST and path.is_file():
        return path.parent
    places = (path, path / "evaluation", path / "reference" / "evaluation")
    return next((place for place in places if (place / MANIFEST).is_file()), path)


def of_same_images(folder: Path, other: Path, other_digest: str | None) -> bool:
    """Whether two evaluations have the same images, labels, names and classes; their references may differ.

    Raises UserError when the other is not the one with `other_digest`.
    """
    one = manifest_of(_content(folder), folder / MANIFEST, None)
    two = manifest_of(_content(other), other / MANIFEST, other_digest)
    return one.classes == two.classes and all(one.files[name] == two.files[name] for name in (*ARRAYS[:2], NAMES))


def manifest_of(content: bytes, shown: Path, expected_digest: str | None) -> Manifest:
    """evaluation.json's `content`, which must have the digest; `shown` names it in errors. Raises UserError."""
    digest = hashlib.sha256(content).hexdigest()
    if expected_digest not in (None, digest):
        raise UserError(
            f"{shown} is another evaluation's: SHA-256 {digest[:12]}…, expected {expected_digest[:12]}…",
            "give the evaluation that was written for this student",
        )
    return documents.parsed(Manifest, content, shown, COPY_AGAIN)


def check_file(path: Path, entry: FileEntry, shown: Path, fix: str) -> None:
    """UserError unless the file has the recorded size and digest; `shown` names it."""
    if not path.is_file():
        raise UserError(f"{shown} is missing", fix)
    if (size := path.stat().st_size) != entry.size_bytes:
        raise UserError(f"{shown} has {size} bytes, expected {entry.size_bytes}", fix)
    if (found := digest_and_size(path)["sha256"]) != entry.sha256:
        raise UserError(f"{shown} has been changed: SHA-256 {found[:12]}…, expected {entry.sha256[:12]}…", fix)


def rebuild_images(
    folder: Path, source: Path, preprocessing: Preprocessing, destination: Path, expected_digest: str | None = None
) -> None:
    """Writes images.npy anew from the image files in `source`, for an evaluation that travels without it.

    The names of names.json are paths below `source`. Whether the result is the recorded one, `read` checks.
    """
    from vit_edge.pixels import decode

    manifest = manifest_of(_content(folder), folder / MANIFEST, expected_digest)
    check_file(folder / NAMES, manifest.files[NAMES], folder / NAMES, COPY_AGAIN)
    found, size = _names(folder, manifest), preprocessing.image_size
    for name in found:
        if not names.stays_below(name):
            raise UserError(f"{folder / NAMES} names {name!r}, which does not lie below {source}", COPY_AGAIN)
    expected_bytes, pixels_bytes = manifest.files[ARRAYS[0]].size_bytes, len(found) * size * size * 3
    if not 0 <= expected_bytes - pixels_bytes <= arrays.MAX_HEADER_BYTES:
        raise UserError(
            f"{folder}: {len(found)} images of {size}×{size} do not make images.npy of {expected_bytes} bytes",
            COPY_AGAIN,
        )
    images_NHWC = np.lib.format.open_memmap(destination, "w+", np.uint8, (len(found), size, size, 3))
    for index, name in enumerate(found):
        images_NHWC[index] = preprocessing.prepare(decode(source / name))
    images_NHWC.flush()


def _content(folder: Path) -> bytes:
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} holds no {MANIFEST}", "give the evaluation folder of the student's reference with --reference"
        )
    return documents.bounded(folder / MANIFEST, folder / MANIFEST, COPY_AGAIN)


def _names(folder: Path, manifest: Manifest) -> list[str]:
    """Of names.json, whose digest has been checked."""
    path = folder / NAMES
    found = documents.texts(documents.bounded(path, path, COPY_AGAIN, MAX_NAMES_BYTES), path, COPY_AGAIN)
    if len(found) != manifest.n:
        raise UserError(f"{path} holds {len(found)} names, expected {manifest.n}", COPY_AGAIN)
    return found


def _array_path(folder: Path, name: str, images: Path | None) -> Path:
    return images if images is not None and name == ARRAYS[0] else folder / name


def _loaded(folder: Path, digest: str, manifest: Manifest, images_file: Path | None) -> Evaluation:
    images_path, labels_path, logits_path = (_array_path(folder, name, images_file) for name in ARRAYS)
    n, classes = manifest.n, len(manifest.classes)
    images = arrays.mapped(images_path, np.uint8, (n, None, None, 3), COPY_AGAIN)
    labels_N = np.array(arrays.mapped(labels_path, np.int64, (n,), COPY_AGAIN))
    logits_NK = arrays.mapped(logits_path, np.float32, (n, classes), COPY_AGAIN)
    if labels_N.min() < 0 or labels_N.max() >= classes:
        raise UserError(f"{labels_path} holds labels outside 0 … {classes - 1}", COPY_AGAIN)
    if not np.isfinite(logits_NK).all():
        raise UserError(f"{logits_path} holds logits that are NaN or infinite", COPY_AGAIN)
    return Evaluation(folder, digest, manifest, images, labels_N, logits_NK, _names(folder, manifest))
