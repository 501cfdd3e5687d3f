"""Data sets by name: digits, fashion-mnist, cifar10, cifar100; looked for on this machine, or downloaded."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from vit_edge.data.images import ArrayImages, DataSet, Source
from vit_edge.errors import UserError

SYSTEM_DIRS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "gate": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def digits(spec: str, data_dir: Path, split_seed: int) -> Source:
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


def fashion_mnist(spec: str, data_dir: Path, split_seed: int) -> Source:
    folder = _idx_folder(spec, data_dir)
    files = {side: [_idx_file(folder, name) for name in names] for side, names in IDX_FILES.items()}

    def load() -> DataSet:
        sides = [
            ArrayImages(_rgb(_read_idx(files[side][0])), _read_idx(files[side][1]), f"fashion-mnist/{side}")
            for side in ("train", "gate")
        ]
        return DataSet(spec, FASHION_CLASSES, *sides)

    return Source(spec, 28, files["train"], files["gate"], load)


def cifar(spec: str, data_dir: Path, split_seed: int) -> Source:
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
