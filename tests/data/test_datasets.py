"""Data sets by SPEC: the real ones, and what is refused."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.conftest import missing
from vit_edge.data import datasets, named
from vit_edge.errors import UserError

FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def fashion_mnist() -> None:
    if not FASHION.is_dir():
        missing("fashion-mnist", "Fashion-MNIST is not installed: apt install dataset-fashion-mnist")


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            colour = (10 * i % 256, hash_free(name), 99)
            Image.new("RGB", (20, 14), colour).save(root / name / f"{i}.png")
    return root


def names(images: datasets.Images) -> list[str]:
    return [images.name(i) for i in range(len(images))]


def hash_free(name: str) -> int:
    return sum(name.encode()) % 256


def test_the_digits_are_scikit_learns_halved_without_overlap() -> None:
    data = datasets.find("digits").load()
    assert (len(data.train), len(data.gate)) == (899, 898)
    real = load_digits()
    both = np.concatenate([data.train.images_NHWC, data.gate.images_NHWC])[..., 0]
    expected = np.round(real.images * 255 / 16).astype(np.uint8)
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in expected)
    assert np.array_equal(
        np.bincount(np.concatenate([data.train.labels_N, data.gate.labels_N])), np.bincount(real.target)
    )


def test_the_halves_depend_on_the_seed_alone() -> None:
    first, again, other = (datasets.find("digits", split_seed=seed).load().gate.images_NHWC for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.usefixtures("fashion_mnist")
def test_fashion_mnist_is_read_where_debian_puts_it(tmp_path: Path) -> None:
    data = datasets.find("fashion-mnist", tmp_path).load()
    assert (len(data.train), len(data.gate), len(data.classes)) == (60_000, 10_000, 10)
    assert data.gate.image(0).shape == (28, 28, 3)
    assert (np.bincount(data.gate.labels_N) == 1000).all()


def test_a_broken_idx_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for both in named.IDX_FILES.values():
        for name in both:
            (folder / f"{name}.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05abc"))
    with pytest.raises(UserError, match=r"cannot read .*idx3"):
        datasets.find("fashion-mnist", tmp_path).load()


def test_an_unknown_data_set_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown data set 'fashion_mnist'\ndid you mean 'fashion-mnist'"):
        datasets.find("fashion_mnist")


def test_skipping_bad_images_without_image_files_is_refused() -> None:
    with pytest.raises(UserError, match="no effect"):
        datasets.find("digits", skip_bad_images=True)


def test_the_training_fingerprint_follows_the_files_and_the_gates_their_content(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "train", {"a": 3, "b": 3}).parent
    class_folders(tmp_path / "val", {"a": 2, "b": 2})
    before = datasets.find(f"folder:{root}")
    train, gate = before.train_fingerprint(), before.gate_fingerprint()
    os.utime(root / "val" / "a" / "0.png", ns=(1, 1))
    assert datasets.find(f"folder:{root}").gate_fingerprint() == gate
    Image.new("RGB", (20, 14), (1, 2, 3)).save(root / "val" / "a" / "0.png")
    assert datasets.find(f"folder:{root}").gate_fingerprint() != gate
    os.utime(root / "train" / "a" / "0.png", ns=(1, 1))
    assert datasets.find(f"folder:{root}").train_fingerprint() != train


class TestFolders:
    def test_train_and_val(self, tmp_path: Path) -> None:
        class_folders(tmp_path / "train", {"b": 3, "a": 4})
        class_folders(tmp_path / "val", {"a": 2})
        data = datasets.find(f"folder:{tmp_path}").load()
        assert data.classes == ["a", "b"]
        assert data.train.labels_N.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert names(data.gate) == ["val/a/0.png", "val/a/1.png"]
        assert data.train.image(4).shape == (14, 20, 3)

    def test_one_folder_is_split_with_the_seed(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 10, "b": 10})
        data = datasets.find(f"folder:{tmp_path}").load()
        assert (len(data.train), len(data.gate)) == (16, 4)
        assert not set(names(data.train)) & set(names(data.gate))

    @pytest.mark.parametrize(
        ("train", "val", "problem"),
        [
            ({}, None, "no images in class folders"),
            ({"a": 3}, None, "one class, 'a'"),
            ({"a": 3, "b": 3}, {"a": 1, "c": 1}, "the class 'c', which .*train lacks"),
            ({"a": 3}, {"a": 1}, "one class, 'a'"),
        ],
    )
    def test_what_is_no_data_set_is_refused(self, tmp_path: Path, train: dict, val: dict | None, problem: str) -> None:
        class_folders(tmp_path if val is None else tmp_path / "train", train)
        (tmp_path / "train").mkdir(exist_ok=True) if val is not None else None
        class_folders(tmp_path / "val", val or {})
        with pytest.raises(UserError, match=problem):
            datasets.find(f"folder:{tmp_path}").load()

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="there is no folder"):
            datasets.find(f"folder:{tmp_path / 'none'}")

    def test_an_unreadable_image_is_named_or_left_out_and_counted(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class_folders(tmp_path / "train", {"a": 3, "b": 3})
        class_folders(tmp_path / "val", {"a": 2, "b": 2})
        whole = (tmp_path / "train" / "b" / "1.png").read_bytes()
        (tmp_path / "train" / "b" / "1.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=r"train/b/1\.png.*\n.*--skip-bad-images"):
            datasets.find(f"folder:{tmp_path}").load()
        kept = datasets.find(f"folder:{tmp_path}", skip_bad_images=True).load()
        assert len(kept.train) == 5
        assert "left out 1 unreadable of 6 images" in capsys.readouterr().err

    def test_links_are_followed_loops_and_hidden_files_are_not(self, tmp_path: Path) -> None:
        real = class_folders(tmp_path / "elsewhere", {"a b": 4, "ä": 4})
        root = tmp_path / "set"
        root.mkdir()
        (root / "a b").symlink_to(real / "a b", target_is_directory=True)
        (root / "ä" / "deep").mkdir(parents=True)
        (root / "ä" / "deep" / "linked").symlink_to(real / "ä", target_is_directory=True)
        (root / "ä" / "deep" / "back").symlink_to(root / "ä", target_is_directory=True)
        (root / "ä" / "._1.png").write_bytes(b"of the Finder")
        (root / ".cache").mkdir()
        Image.new("RGB", (4, 4)).save(root / ".cache" / "1.png")
        data = datasets.find(f"folder:{root}").load()
        assert data.classes == ["a b", "ä"]
        expected = [f"a b/{i}.png" for i in range(4)] + [f"ä/deep/linked/{i}.png" for i in range(4)]
        assert sorted(names(data.train) + names(data.gate)) == expected

    def test_a_broken_link_is_an_unreadable_image(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 5, "b": 5})
        (tmp_path / "b" / "9.png").symlink_to(tmp_path / "gone.png")
        source = datasets.find(f"folder:{tmp_path}")
        assert source.train_fingerprint() != source.gate_fingerprint()
        with pytest.raises(UserError, match=r"cannot read the image b/9\.png"):
            source.load()

    def test_a_huge_image_is_named(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 5, "b": 5})
        Image.new("1", (14_000, 13_000)).save(tmp_path / "b" / "bomb.png")
        with pytest.raises(UserError, match=r"cannot read the image b/bomb\.png: Image size \(182000000 pixels\)"):
            datasets.find(f"folder:{tmp_path}").load()

    def test_small_images_are_not_enlarged_by_default(self, tmp_path: Path) -> None:
        class_folders(tmp_path, {"a": 5, "b": 5})
        assert datasets.find(f"folder:{tmp_path}").native_size == 14
        Image.new("RGB", (500, 400)).save(tmp_path / "large.png")
        for file in tmp_path.glob("*/*.png"):
            file.write_bytes((tmp_path / "large.png").read_bytes())
        assert datasets.find(f"folder:{tmp_path}").native_size == 224
