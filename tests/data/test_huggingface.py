"""Sets of the `datasets` library, written here by the library itself: saved to disk, Parquet, folders; no network."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import require
from vit_edge.data import datasets
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig

CLASSES = ["kestrel", "owl", "wren"]


@pytest.fixture(scope="module")
def hf() -> Any:
    library = require("datasets", "datasets")
    library.disable_progress_bars()
    return library


def table(hf: Any, numbers: range, *, classes: list[str] | None = CLASSES, **columns: list) -> Any:
    """Images whose red is their number, in the column `picture`; their species in `kind`."""
    images = [Image.new("RGB", (20, 14), (i, 0, 99)) for i in numbers]
    kinds = [i % 3 for i in numbers]
    kind = hf.Value("int64") if classes is None else hf.ClassLabel(names=classes)
    features = {"picture": hf.Image(), "kind": kind, **{name: hf.Value("string") for name in columns}}
    return hf.Dataset.from_dict({"picture": images, "kind": kinds, **columns}, features=hf.Features(features))


def find(place: object, tmp_path: Path, **options: Any) -> datasets.Source:
    return datasets.find(f"hf:{place}", tmp_path / "cache", **options)


def colours(images: datasets.Images) -> list[int]:
    return [int(images.image(i)[0, 0, 0]) for i in range(len(images))]


def test_a_set_saved_to_disk(hf: Any, tmp_path: Path) -> None:
    splits = {"train": table(hf, range(30)), "validation": table(hf, range(60, 69)), "test": table(hf, range(9))}
    hf.DatasetDict(splits).save_to_disk(tmp_path / "set with spaces ü")
    source = find(tmp_path / "set with spaces ü", tmp_path)
    assert source.native_size == 14
    data = source.load()
    assert data.classes == CLASSES
    assert colours(data.train) == list(range(30))
    assert data.train.labels_N.tolist() == [i % 3 for i in range(30)]
    assert colours(data.gate) == list(range(60, 69))
    assert data.gate.name(2) == "validation[2]"


def test_one_split_gives_a_fifth_to_the_gate(hf: Any, tmp_path: Path) -> None:
    table(hf, range(20)).save_to_disk(tmp_path / "set")
    data = find(tmp_path / "set", tmp_path).load()
    assert sorted(colours(data.train) + colours(data.gate)) == list(range(20))
    assert len(data.gate) == 4


def test_parquet_files(hf: Any, tmp_path: Path) -> None:
    for split, numbers in (("train", range(12)), ("test", range(30, 36))):
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        table(hf, numbers).to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    data = find(tmp_path / "set", tmp_path).load()
    assert (data.classes, colours(data.train), colours(data.gate)) == (CLASSES, list(range(12)), list(range(30, 36)))


def test_parquet_written_by_others_has_no_image_type(hf: Any, tmp_path: Path) -> None:
    pyarrow = require("pyarrow.parquet", "pyarrow").parquet
    import pyarrow as pa

    def png(i: int) -> bytes:
        file = io.BytesIO()
        Image.new("L", (9, 9), i).save(file, "PNG")
        return file.getvalue()

    (tmp_path / "set").mkdir()
    rows = {"png": [png(i) for i in range(10)], "label": ["b", "a"] * 5, "url": [f"u{i}" for i in range(10)]}
    pyarrow.write_table(pa.table(rows), tmp_path / "set" / "train.parquet")
    data = find(tmp_path / "set", tmp_path).load()
    assert data.classes == ["a", "b"]
    assert sorted(colours(data.train) + colours(data.gate)) == list(range(10))
    both = np.concatenate([data.train.labels_N, data.gate.labels_N])
    assert both.tolist() == [1 - colour % 2 for colour in colours(data.train) + colours(data.gate)]


def test_class_folders_as_the_library_reads_them(hf: Any, tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                path = tmp_path / "set" / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (20, 14), (10 * label + i, 0, 0)).save(path)
    source = find(tmp_path / "set", tmp_path)
    data = source.load()
    assert data.classes == CLASSES
    assert [colour // 10 for colour in colours(data.train)] == data.train.labels_N.tolist()
    assert data.gate.name(0).endswith("test/kestrel/0.png")
    before = source.gate_fingerprint()
    Image.new("RGB", (20, 14), (1, 2, 3)).save(tmp_path / "set" / "test" / "owl" / "1.png")
    assert source.gate_fingerprint() != before
    (tmp_path / "set" / "train" / "owl" / "1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot read the image .*train/owl/1\.png"):
        find(tmp_path / "set", tmp_path).load()
    assert len(find(tmp_path / "set", tmp_path, skip_bad_images=True).load().train) == 11


def test_workers_and_views(hf: Any, tmp_path: Path) -> None:
    table(hf, range(20)).save_to_disk(tmp_path / "set")
    train = find(tmp_path / "set", tmp_path).load().train
    views = Views(train, np.arange(16), Preprocessing(image_size=16), AugmentConfig(), seed=0)
    draws = [(1, position) for position in reversed(range(16))]
    alone, shared = (
        [batch[0] for batch in torch.utils.data.DataLoader(views, 4, sampler=draws, num_workers=workers)]  # type: ignore[arg-type]
        for workers in (0, 2)
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))


def test_columns_are_found_by_their_types_or_named(hf: Any, tmp_path: Path) -> None:
    two = table(hf, range(12)).add_column("coarse", [i % 2 for i in range(12)])
    two.cast_column("coarse", hf.ClassLabel(names=["day", "night"])).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match=r"several columns could be the label, found kind, coarse\n.*two:label=COLUMN"):
        find(tmp_path / "two", tmp_path)
    assert find(f"{tmp_path / 'two'}:label=coarse", tmp_path).load().classes == ["day", "night"]
    with pytest.raises(UserError, match=r"unknown column .*'corase'\ndid you mean 'coarse'"):
        find(f"{tmp_path / 'two'}:label=corase", tmp_path)
    with pytest.raises(UserError, match=r"unknown part of .*'lable'\ndid you mean 'label'"):
        find(f"{tmp_path / 'two'}:lable=coarse", tmp_path)


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(["kind"], "no column holds images, found kind"), (["picture"], "no column holds labels, found picture")],
)
def test_a_set_without_images_or_labels_is_refused(hf: Any, tmp_path: Path, kept: list[str], problem: str) -> None:
    table(hf, range(6)).select_columns(kept).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match=problem):
        find(tmp_path / "set", tmp_path)


def test_plain_numbers_are_classes_and_the_gates_must_be_among_them(hf: Any, tmp_path: Path) -> None:
    splits = {"train": table(hf, range(4), classes=None), "test": table(hf, range(6), classes=None)}
    hf.DatasetDict(splits).save_to_disk(tmp_path / "set")
    assert find(tmp_path / "set", tmp_path).load().classes == ["0", "1", "2"]
    splits["train"] = splits["train"].select([0, 1])
    hf.DatasetDict(splits).save_to_disk(tmp_path / "fewer")
    with pytest.raises(UserError, match="row 2 of test has the kind 2, which is none of the 2 classes"):
        find(tmp_path / "fewer", tmp_path).load()


def test_a_test_split_without_labels_is_told_and_another_can_be_named(hf: Any, tmp_path: Path) -> None:
    hidden = table(hf, range(6)).remove_columns("kind").add_column("kind", [-1] * 6)
    hidden = hidden.cast_column("kind", hf.ClassLabel(names=CLASSES))
    splits = {"train": table(hf, range(9)), "test": hidden, "extra": table(hf, range(40, 46))}
    hf.DatasetDict(splits).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match=r"row 0 of test has the kind -1.*\n.*:gate=SPLIT"):
        find(tmp_path / "set", tmp_path).load()
    assert colours(find(f"{tmp_path / 'set'}:gate=extra", tmp_path).load().gate) == list(range(40, 46))
    with pytest.raises(UserError, match=r"unknown split .*'none'"):
        find(f"{tmp_path / 'set'}:gate=none", tmp_path)


def test_rows_without_an_image_or_a_label_are_named(hf: Any, tmp_path: Path) -> None:
    features = hf.Features({"picture": hf.Image(), "kind": hf.ClassLabel(names=CLASSES)})
    image = Image.new("RGB", (8, 8))
    for name, images, kinds, problem in (
        ("image", [image, None, image, image], [0, 1, 2, 0], "no image in row 1"),
        ("label", [image] * 4, [0, 1, None, 2], "row 2 of train has no kind"),
    ):
        rows = {"picture": images, "kind": kinds}
        hf.DatasetDict(train=hf.Dataset.from_dict(rows, features=features), test=table(hf, range(3))).save_to_disk(
            tmp_path / name
        )
        with pytest.raises(UserError, match=problem):
            find(tmp_path / name, tmp_path).load()


def test_several_splits_and_none_called_train(hf: Any, tmp_path: Path) -> None:
    hf.DatasetDict(a=table(hf, range(6)), b=table(hf, range(6))).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match=r"has no split train, found a, b\n.*:train=SPLIT"):
        find(tmp_path / "set", tmp_path)
    assert len(find(f"{tmp_path / 'set'}:train=a:gate=b", tmp_path).load().gate) == 6


def test_a_directory_without_data_and_a_damaged_one(hf: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"cannot load hf:.*empty"):
        find(tmp_path / "empty", tmp_path)
    table(hf, range(6)).save_to_disk(tmp_path / "set")
    next((tmp_path / "set").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"cannot load hf:.*set"):
        find(tmp_path / "set", tmp_path)


def test_the_training_fingerprint_follows_the_tables(hf: Any, tmp_path: Path) -> None:
    prints = []
    for count in (20, 21):
        (tmp_path / "set").mkdir(exist_ok=True)
        table(hf, range(count)).to_parquet(tmp_path / "set" / "train.parquet")
        source = find(tmp_path / "set", tmp_path)
        prints += [source.train_fingerprint(), source.gate_fingerprint()]
    assert len(set(prints)) == 4
    assert find(tmp_path / "set", tmp_path).train_fingerprint() == prints[2]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'hf:some/set needs the package datasets.*\npip install "vit-edge\[hf\]"'):
        datasets.find("hf:some/set")


def test_a_hub_that_cannot_be_reached_is_the_users_to_mend(hf: Any, tmp_path: Path) -> None:
    program = (
        "from vit_edge.data import datasets\nfrom vit_edge.errors import UserError\n"
        "try:\n    datasets.find('hf:no/such-set:plain')\nexcept UserError as err:\n    print(err)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("cannot load hf:no/such-set: ")
