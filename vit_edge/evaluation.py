"""The gate's images with their labels and the reference's logits: written once per student, shared by its bundles.

    evaluation/evaluation.json   schema, what the reference is, sha256 and size of the arrays
    evaluation/images.npy        uint8 (N, H, W, 3), decoded, resized and cropped, in the split's seeded random order
    evaluation/labels.npy        int64 (N,)
    evaluation/logits.npy        float32 (N, K) of the float student in PyTorch
    evaluation/names.json        N names, for telling a person which image it is

Any prefix of the arrays is a random sample, since their order is a stored permutation.
The SHA-256 of evaluation.json is the digest that bundles know an evaluation by.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing, decode
from vit_edge.settings import Settings
from vit_edge.store import digest_and_size, write_json

MANIFEST = "evaluation.json"
ARRAYS = ("images.npy", "labels.npy", "logits.npy")
NAMES = "names.json"


class FileEntry(Settings):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class Reference(Settings):
    """The float student in PyTorch: where it ran, and how well and how fast."""

    device: str = Field(description="the GPU's or CPU's name")
    kind: Literal["cuda", "cpu", "mps"]
    precision: str = "f32"
    top1: float
    latency_ms: dict[str, float] | None = Field(None, description="p50, p90, p99 and n at batch 1")
    versions: dict[str, str] = {}


class Manifest(Settings):
    schema_name: Literal["vit-edge/evaluation/1"] = Field("vit-edge/evaluation/1", alias="schema")
    n: int = Field(gt=0)
    data: str = Field(description="data set and split")
    classes: list[str]
    reference: Reference
    files: dict[str, FileEntry]


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

    images: its images.npy, when that lies elsewhere (`rebuild_images`). Raises UserError when a file is missing or changed, or when it is not the evaluation with `expected_digest`.
    """
    fix = "copy the evaluation folder again from the machine that wrote it"
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} holds no {MANIFEST}", "give the evaluation folder of the student's reference with --reference"
        )
    digest = digest_and_size(path)["sha256"]
    if expected_digest not in (None, digest):
        raise UserError(
            f"{folder} is another evaluation: SHA-256 {digest[:12]}…, expected {expected_digest[:12]}…",
            "give the one that was written for this student",
        )
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        raise UserError(
            f"{path} is not a vit-edge evaluation: {'.'.join(map(str, first['loc']))}: {first['msg']}", fix
        ) from err
    for name in (*ARRAYS, NAMES):
        entry = manifest.files.get(name)
        path = _array_path(folder, name, images)
        found = digest_and_size(path) if path.is_file() else None
        if entry is None or found != entry.model_dump():
            raise UserError(f"{path} is missing or changed: its SHA-256 is not the recorded one", fix)
    return _loaded(folder, digest, manifest, images, fix)


def rebuild_images(folder: Path, source: Path, preprocessing: Preprocessing, destination: Path) -> None:
    """Writes images.npy anew from the image files in `source`, for an evaluation that travels without it.

    The names of names.json are paths below `source`. Whether the result is the recorded one, `read` checks.
    """
    try:
        names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise UserError(f"{folder} holds no readable {NAMES}", "give the evaluation folder with --reference") from err
    shape = (len(names), preprocessing.image_size, preprocessing.image_size, 3)
    images_NHWC = np.lib.format.open_memmap(destination, "w+", np.uint8, shape)
    for index, name in enumerate(names):
        images_NHWC[index] = preprocessing.prepare(decode(source / name))
    images_NHWC.flush()


def _array_path(folder: Path, name: str, images: Path | None) -> Path:
    return images if images is not None and name == ARRAYS[0] else folder / name


def _loaded(folder: Path, digest: str, manifest: Manifest, images_file: Path | None, fix: str) -> Evaluation:
    paths = (_array_path(folder, name, images_file) for name in ARRAYS)
    try:
        images, labels, logits = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        names: Any = json.loads((folder / NAMES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise UserError(f"{folder} holds an array that cannot be read: {err}", fix) from err
    n, classes = manifest.n, len(manifest.classes)
    fits = (
        images.dtype == np.uint8 and images.ndim == 4 and images.shape[::3] == (n, 3)
        and labels.dtype == np.int64 and labels.shape == (n,) and labels.min() >= 0 and labels.max() < classes
        and logits.dtype == np.float32 and logits.shape == (n, classes)
        and isinstance(names, list) and len(names) == n
    )  # fmt: skip
    if not fits:
        raise UserError(f"{folder}: the arrays' shapes or types do not fit {n} images of {classes} classes", fix)
    return Evaluation(folder, digest, manifest, images, np.asarray(labels), np.asarray(logits), names)
