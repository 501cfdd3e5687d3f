"""Labelled image sets by SPEC: digits, fashion-mnist, cifar10, cifar100, folder:PATH. No torch is imported here.

A data set has two sides: `train`, which training, tuning and calibration draw from, and `gate`, its own test or
validation images, which only the reference and the gate read. N images of H×W pixels with C = 3 channels.
"""

import gzip
import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vit_edge.data.folders import FolderImages, folder_set
from vit_edge.errors import UserError, unknown
from vit_edge.store import canonical_json

DATA_DIR = Path("~/.cache/vit-edge/data").expanduser()
SYSTEM_DIRS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "gate": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


class ArrayImages:
    """Images held in memory: uint8 (N, H, W, 3)."""

    def __init__(self, images_NHWC: np.ndarray, labels_N: np.ndarray, name: str):
        self.images_NHWC = images_NHWC
        self.labels_N = labels_N.astype(np.int64)
        self.names = [f"{name}/{i}" for i in range(len(labels_N))]

    def __len__(self) -> int:
        return len(self.labels_N)

    def image(self, i: int) -> np.ndarray:
        """uint8 (H, W, 3)."""
        return self.images_NHWC[i]


Images = ArrayImages | FolderImages


@dataclass(frozen=True)
class DataSet:
    spec: str
    classes: list[str]
    train: Images
    gate: Images


@dataclass(frozen=True)
class Source:
    """Where a SPEC's images are, before any is read. `native_size` is the side of its images in pixels."""

    spec: str
    native_size: int
    train_files: list[Path]
    gate_files: list[Path]
    load: Callable[[], DataSet]

    def train_fingerprint(self) -> str:
        """SHA-256 over names, sizes and times: fast at ImageNet's size."""
        facts = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in self.train_files]
        return hashlib.sha256(canonical_json(facts)).hexdigest()

    def gate_fingerprint(self) -> str:
        """SHA-256 over names and contents."""
        digest = hashlib.sha256()
        for path in self.gate_files:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()


def find(spec: str, data_dir: Path | None = None, *, split_seed: int = 0, skip_bad_images: bool = False) -> Source:
    """The data set that SPEC names; downloads a named set that is neither in `data_dir` nor on the system.

    split_seed decides the halves of a set that has no test images of its own.
    Raises UserError for an unknown name and for a folder that holds no usable data set.
    """
    kind, _, rest = spec.partition(":")
    if kind == "folder":
        return _folder(spec, Path(rest).expanduser(), split_seed, skip_bad_images)
    if skip_bad_images:
        raise UserError(f"--skip-bad-images has no effect on {spec!r}, whose images come in one file", "leave it out")
    named = {"digits": _digits, "fashion-mnist": _fashion_mnist, "cifar10": _cifar, "cifar100": _cifar}
    if spec not in named:
        raise unknown("data set", spec, [*named, "folder:PATH"])
    return named[spec](spec, data_dir or DATA_DIR, split_seed)


def _digits(spec: str, data_dir: Path, split_seed: int) -> Source:
    """The 1,797 8×8 digits of scikit-learn, halved by a seeded permutation."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("the digits come with scikit-learn, which is not installed", 'pip install "vit-edge[train]"')
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"

    def load() -> DataSet:
        table = np.loadtxt(file, delimiter=",")
        grey_NHW = np.round(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        order = np.random.default_rng(split_seed).permutation(len(table))
        half = (len(table) + 1) // 2
        sides = [
            ArrayImages(_rgb(grey_NHW[part]), table[part, -1], f"digits/{side}")
            for side, part in (("train", order[:half]), ("gate", order[half:]))
        ]
        return DataSet(spec, [str(digit) for digit in range(10)], *sides)

    return Source(spec, 8, [file], [file], load)


def _fashion_mnist(spec: str, data_dir: Path, split_seed: int) -> Source:
    folder = _idx_folder(spec, data_dir)
    files = {side: [_idx_file(folder, name) for name in names] for side, names in IDX_FILES.items()}

    def load() -> DataSet:
        sides = [
            ArrayImages(_rgb(_read_idx(files[side][0])), _read_idx(files[side][1]), f"fashion-mnist/{side}")
            for side in ("train", "gate")
        ]
        return DataSet(spec, FASHION_CLASSES, *sides)

    return Source(spec, 28, files["train"], files["gate"], load)


def _cifar(spec: str, data_dir: Path, split_seed: int) -> Source:
    folder = data_dir / spec
    inner = folder / ("cifar-10-batches-py" if spec == "cifar10" else "cifar-100-python")
    if not inner.is_dir():
        _download(spec, folder)
    train = sorted(inner.glob("data_batch_*")) if spec == "cifar10" else [inner / "train"]
    gate = [inner / ("test_batch" if spec == "cifar10" else "test")]

    def load() -> DataSet:
        from torchvision import datasets

        reader = datasets.CIFAR10 if spec == "cifar10" else datasets.CIFAR100
        train_set, test_set = (reader(str(folder), train=side) for side in (True, False))
        sides = [
            ArrayImages(read.data, np.asarray(read.targets), f"{spec}/{side}")
            for side, read in (("train", train_set), ("gate", test_set))
        ]
        return DataSet(spec, list(train_set.classes), *sides)

    return Source(spec, 32, train, gate, load)


def _folder(spec: str, path: Path, split_seed: int, skip_bad_images: bool) -> Source:
    found = folder_set(path, split_seed, skip_bad_images)
    load = lambda: DataSet(spec, found.classes, found.train.checked(), found.gate.checked())  # noqa: E731
    return Source(spec, 224, found.train.files, found.gate.files, load)


def _idx_folder(spec: str, data_dir: Path) -> Path:
    for folder in (data_dir / spec, *(system / spec for system in SYSTEM_DIRS)):
        if any(folder.glob("train-images-idx3-ubyte*")):
            return folder
    _download(spec, data_dir / spec)
    return data_dir / spec / "FashionMNIST" / "raw"


def _idx_file(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise UserError(f"{folder} holds no {name} or {name}.gz", "delete the folder and download the set again")


def _read_idx(path: Path) -> np.ndarray:
    """An IDX file of uint8: two zero bytes, type 8, the number of dimensions, each as big-endian int32, the data."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            raw = file.read()
        if raw[:3] != b"\x00\x00\x08":
            raise ValueError("it does not begin as an IDX file of bytes")
        shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError) as err:
        raise UserError(f"cannot read {path}: {err}", "delete the file and download the set again") from err


def _download(spec: str, folder: Path) -> None:
    """Fetches a named set into `folder` with torchvision's own downloader, which checks its MD5."""
    from torchvision import datasets

    reader = {"fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[spec]
    try:
        reader(str(folder), download=True)
    except (OSError, RuntimeError) as err:
        where = " or ".join(str(system / spec) for system in (folder.parent, *SYSTEM_DIRS[:1]))
        package = " (Debian: apt install dataset-fashion-mnist)" if spec == "fashion-mnist" else ""
        raise UserError(
            f"{spec} is not on this machine and cannot be downloaded: {err}", f"put its files into {where}{package}"
        ) from err


def _rgb(grey_NHW: np.ndarray) -> np.ndarray:
    return np.repeat(grey_NHW[..., None], 3, axis=-1)
