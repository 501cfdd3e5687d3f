"""WebDataset shards: made with Python's tarfile in the usual layout, read in any order; what is broken is named."""

import gzip
import io
import json
import pickle
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_edge.data import datasets, tar_index
from vit_edge.data.shards import ShardImages
from vit_edge.data.views import Views
from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig

Members = list[tuple[str, bytes]]


def png(i: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 14), (i % 256, i // 256, 99)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, members: Members, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(numbers: range, classes: int = 3) -> Members:
    return [
        member for i in numbers for member in ((f"{i:06d}.png", png(i)), (f"{i:06d}.cls", f"{i % classes}\n".encode()))
    ]


def two_sides(folder: Path) -> Path:
    for shard in range(3):
        write(folder / f"train-{shard:03d}.tar", samples(range(10 * shard, 10 * shard + 10)))
    write(folder / "val-000.tar", samples(range(100, 109)))
    return folder


def colours(images: datasets.Images) -> list[int]:
    return [int(images.image(i)[0, 0, 0]) for i in range(len(images))]


def test_a_folder_of_shards_is_read_in_order(tmp_path: Path) -> None:
    source = datasets.find(f"wds:{two_sides(tmp_path)}")
    assert source.native_size == 14
    data = source.load()
    assert data.classes == ["0", "1", "2"]
    assert colours(data.train) == list(range(30))
    assert data.train.labels_N.tolist() == [i % 3 for i in range(30)]
    assert colours(data.gate) == list(range(100, 109))
    assert data.gate.name(3) == "val-000.tar/000103"


@pytest.mark.parametrize(
    "places", ["{train,val}-{000..002}.tar", "*.tar", "train-*.tar::val-000.tar", "train-00{0,1,2}.tar::val-???.tar"]
)
def test_patterns(tmp_path: Path, places: str) -> None:
    two_sides(tmp_path / "a b·ü")
    for shard in ("001", "002"):
        write(tmp_path / "a b·ü" / f"val-{shard}.tar", samples(range(3)))
    spec = "::".join(str(tmp_path / "a b·ü" / part) for part in places.split("::"))
    data = datasets.find(f"wds:{spec}").load()
    assert colours(data.train) == list(range(30))
    assert len(data.gate) in (9, 15)


def test_folders_named_train_and_test_wherever_the_set_is(tmp_path: Path) -> None:
    root = tmp_path / "test" / "val"
    write(root / "train" / "0.tar", samples(range(9)))
    write(root / "test" / "0.tar", samples(range(50, 56)))
    data = datasets.find(f"wds:{root}").load()
    assert (len(data.train), colours(data.gate)) == (9, list(range(50, 56)))


def test_without_shards_for_the_gate_a_fifth_is_drawn_with_the_seed(tmp_path: Path) -> None:
    write(tmp_path / "part-0.tar", samples(range(20)))
    first, other = (datasets.find(f"wds:{tmp_path}", split_seed=seed).load() for seed in (0, 1))
    assert sorted(colours(first.train) + colours(first.gate)) == list(range(20))
    assert len(first.gate) == 4
    assert colours(first.gate) != colours(other.gate)


def test_test_shards_are_left_out_where_there_are_val_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(two_sides(tmp_path) / "test-000.tar", samples(range(200, 203)))
    data = datasets.find(f"wds:{tmp_path}").load()
    assert (len(data.train), colours(data.gate)) == (30, list(range(100, 109)))
    assert "left out 1 shards of test" in capsys.readouterr().err


def test_labels_by_name_in_json_with_other_members_beside_them(tmp_path: Path) -> None:
    def named(i: int) -> Members:
        label = json.dumps({"label": ["kestrel", "Äsche"][i % 2], "width": 20}).encode()
        return [(f"./dir.v1/{i}.JSON", label), (f"./dir.v1/{i}.txt", b"a caption"), (f"./dir.v1/{i}.png", png(i))]

    members = [("__meta__.json", b"{}"), ("README", b"x"), *(member for i in range(6) for member in named(i))]
    write(tmp_path / "train.tar", members, format=tarfile.PAX_FORMAT)
    write(tmp_path / "val.tar", named(7))
    data = datasets.find(f"wds:{tmp_path}").load()
    assert data.classes == ["kestrel", "Äsche"]
    assert data.train.labels_N.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.train.name(2) == "train.tar/./dir.v1/2"


def test_long_names_and_images_before_all_labels(tmp_path: Path) -> None:
    keys = [f"{'folder/' * 30}größe-{i}" for i in range(4)]
    members = [(f"{key}.png", png(i)) for i, key in enumerate(keys)]
    members += [(f"{key}.cls", b"%d" % (i % 2)) for i, key in enumerate(keys)]
    for layout in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        index = tar_index.index([write(tmp_path / "a.tar", members, format=layout)])
        assert [index.key(row) for row in range(4)] == keys
        assert [index.read(row) for row in range(4)] == [png(i) for i in range(4)]


def test_a_list_of_classes_gives_their_order_and_names(tmp_path: Path) -> None:
    two_sides(tmp_path)
    (tmp_path / "classes.txt").write_text("zebra\nant\nmole\nowl\n", encoding="utf-8")
    data = datasets.find(f"wds:{tmp_path}").load()
    assert data.classes == ["zebra", "ant", "mole", "owl"]
    assert data.train.labels_N.tolist() == [i % 3 for i in range(30)]


def test_images_are_read_in_any_order_and_after_pickling(tmp_path: Path) -> None:
    train = pickle.loads(pickle.dumps(datasets.find(f"wds:{two_sides(tmp_path)}").load().train))
    assert isinstance(train, ShardImages)
    order = random.Random(0).sample(range(30), 30)
    assert [int(train.image(i)[0, 0, 0]) for i in order] == order


def test_loader_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    train = datasets.find(f"wds:{two_sides(tmp_path)}").load().train
    views = Views(train, np.arange(30), Preprocessing(image_size=16), AugmentConfig(), seed=0)
    draws = [(1, position) for position in reversed(range(30))]
    alone, shared = (
        list(torch.utils.data.DataLoader(views, 5, sampler=draws, num_workers=workers))  # type: ignore[arg-type]
        for workers in (0, 2)
    )
    assert all(
        torch.equal(a, b) for one, other in zip(alone, shared, strict=True) for a, b in zip(one, other, strict=True)
    )


def broken(members: Members, number: int, **changed: bytes | None) -> Members:
    """The samples with a part of one left out or replaced."""
    key = f"{number:06d}"
    kept = [(name, changed.get(name[7:], content) if name.startswith(key) else content) for name, content in members]
    return [(name, content) for name, content in kept if content is not None]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"cls": None}, r"train-001\.tar: the sample 000014 has no label"),
        ({"cls": b" "}, r"train-001\.tar: the sample 000014 has no label"),
        ({"png": None}, r"train-001\.tar: the sample 000014 has a label and no image"),
        ({"png": b"no image"}, r"cannot read the image train-001\.tar/000014"),
    ],
)
def test_a_broken_sample_is_named_with_its_shard(tmp_path: Path, changed: dict, problem: str) -> None:
    write(two_sides(tmp_path) / "train-001.tar", broken(samples(range(10, 20)), 14, **changed))
    with pytest.raises(UserError, match=problem):
        datasets.find(f"wds:{tmp_path}").load()


def test_unreadable_images_can_be_left_out(tmp_path: Path) -> None:
    write(two_sides(tmp_path) / "train-001.tar", broken(samples(range(10, 20)), 14, png=b"no image"))
    data = datasets.find(f"wds:{tmp_path}", skip_bad_images=True).load()
    assert colours(data.train) == [i for i in range(30) if i != 14]


@pytest.mark.parametrize(
    ("label", "problem"),
    [(b"7", "the label '7', expected 0 to 2, or a name"), (b"-1", "the label '-1'"), (b"owl", "the label 'owl'")],
)
def test_a_label_out_of_range_is_named(tmp_path: Path, label: bytes, problem: str) -> None:
    write(two_sides(tmp_path) / "train-001.tar", broken(samples(range(10, 20)), 14, cls=label))
    (tmp_path / "classes.txt").write_text("a\nb\nc\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"train-001\.tar: the sample 000014 has {problem}"):
        datasets.find(f"wds:{tmp_path}").load()


def test_a_gate_label_that_no_training_shard_has_is_named(tmp_path: Path) -> None:
    write(two_sides(tmp_path) / "val-000.tar", [("x.png", png(0)), ("x.cls", b"9")])
    with pytest.raises(UserError, match=r"val-000\.tar: the sample x has the label '9'.*\n.*classes\.txt"):
        datasets.find(f"wds:{tmp_path}").load()


@pytest.mark.parametrize("label", ["[1]", "true", "1.5"])
def test_a_json_label_of_another_kind_is_refused(tmp_path: Path, label: str) -> None:
    write(tmp_path / "train.tar", [*samples(range(6)), ("x.png", png(0)), ("x.json", f'{{"label": {label}}}'.encode())])
    with pytest.raises(UserError, match=r"train\.tar: x\.json has the label"):
        datasets.find(f"wds:{tmp_path}").load()


def damaged(content: bytes, damage: str) -> bytes:
    if damage == "truncated":
        return content[: len(content) * 2 // 3]
    if damage == "cut after a member":
        return content[: 4 * 1024]
    if damage == "a header overwritten":
        return content[: 8 * 1024] + b"x" * 512 + content[8 * 1024 + 512 :]
    return {"empty": b"", "html": b"<html>" + b"not found " * 200}[damage]


@pytest.mark.parametrize("damage", ["truncated", "cut after a member", "a header overwritten", "empty", "html"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    shard = two_sides(tmp_path) / "train-001.tar"
    shard.write_bytes(damaged(shard.read_bytes(), damage))
    with pytest.raises(UserError, match=r"train-001\.tar is truncated or damaged after"):
        datasets.find(f"wds:{tmp_path}").load()


def test_a_shard_that_shrinks_while_it_is_used_is_named(tmp_path: Path) -> None:
    train = datasets.find(f"wds:{two_sides(tmp_path)}").load().train
    (tmp_path / "train-002.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-002\.tar has become shorter"):
        train.image(25)


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ("https://example.org/{{000..100}}.tar", "found an address"),
        ("pipe:cat x.tar", "found an address"),
        ("s3://bucket/x.tar", "found an address"),
        ("{folder}/none-{{0..3}}.tar", "there is no shard .*none-0"),
        ("{folder}/x*.tar", "there is no shard"),
        ("{folder}/val-000.tar", "no training shards"),
        ("{folder}/empty", "holds no .tar files"),
        ("", "names no place"),
    ],
)
def test_what_is_no_local_shard_is_refused(tmp_path: Path, places: str, problem: str) -> None:
    two_sides(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=problem):
        datasets.find(f"wds:{places.format(folder=tmp_path)}")


def test_compressed_shards_are_refused_by_name_and_by_content(tmp_path: Path) -> None:
    plain = write(tmp_path / "train-0.tar", samples(range(6))).read_bytes()
    (tmp_path / "train-1.tar").write_bytes(gzip.compress(plain))
    with pytest.raises(UserError, match=r"train-1\.tar is compressed.*\nunpack"):
        datasets.find(f"wds:{tmp_path}").load()
    (tmp_path / "train-1.tar").rename(tmp_path / "train-1.tar.gz")
    with pytest.raises(UserError, match=r"train-1\.tar\.gz is compressed"):
        datasets.find(f"wds:{tmp_path}")


def test_one_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.tar", samples(range(6), classes=1))
    with pytest.raises(UserError, match="holds 1 classes: 0"):
        datasets.find(f"wds:{tmp_path}").load()


def test_the_fingerprints_follow_the_shards(tmp_path: Path) -> None:
    before = datasets.find(f"wds:{two_sides(tmp_path)}")
    train, gate = before.train_fingerprint(), before.gate_fingerprint()
    write(tmp_path / "train-001.tar", samples(range(40, 50)))
    write(tmp_path / "val-000.tar", samples(range(110, 119)))
    after = datasets.find(f"wds:{tmp_path}")
    assert after.train_fingerprint() != train
    assert after.gate_fingerprint() != gate
