"""Labelled image sets by SPEC: digits, fashion-mnist, cifar10, cifar100, folder:, hf:, wds:. No torch is imported here.

A data set has two sides: `train`, which training, tuning and calibration draw from, and `gate`, its own test or
validation images, which only the reference and the gate read.
"""

from pathlib import Path

from vit_edge.data import folders, huggingface, named, shards
from vit_edge.data.folders import unlabelled, unlabelled_fingerprint
from vit_edge.data.images import ArrayImages, DataSet, EncodedImages, Images, Source
from vit_edge.errors import UserError, unknown

__all__ = [
    "ArrayImages", "DataSet", "EncodedImages", "Images", "Source", "find", "unlabelled", "unlabelled_fingerprint",
]  # fmt: skip

DATA_DIR = Path("~/.cache/vit-edge/data").expanduser()
NAMED = {"digits": named.digits, "fashion-mnist": named.fashion_mnist, "cifar10": named.cifar, "cifar100": named.cifar}
KINDS = ("folder:PATH", "hf:NAME", "wds:SHARDS")


def find(spec: str, data_dir: Path | None = None, *, split_seed: int = 0, skip_bad_images: bool = False) -> Source:
    """The data set that SPEC names; downloads a named set that is neither in `data_dir` nor on the system.

    split_seed decides the halves of a set that has no test images of its own.
    Raises UserError for an unknown name, and for a place that holds no usable data set.
    """
    kind, colon, rest = spec.partition(":")
    if colon and kind in ("folder", "hf", "wds") and not rest:
        raise UserError(f"{spec!r} names no place", f"expected {', '.join(KINDS)}")
    if colon and kind == "folder":
        return folders.source(spec, Path(rest).expanduser(), split_seed, skip_bad_images)
    if colon and kind == "wds":
        return shards.source(spec, rest, split_seed, skip_bad_images)
    if colon and kind == "hf":
        return huggingface.source(spec, rest, data_dir, split_seed, skip_bad_images)
    if skip_bad_images:
        raise UserError(f"--skip-bad-images has no effect on {spec!r}, whose images come in one file", "leave it out")
    if spec not in NAMED:
        raise unknown("data set", spec, [*NAMED, *KINDS])
    return NAMED[spec](spec, data_dir or DATA_DIR, split_seed)
