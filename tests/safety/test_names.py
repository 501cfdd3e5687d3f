from pathlib import Path

import pytest

from vit_edge.safety import names


@pytest.mark.parametrize("name", ["model.onnx", "int8/model.onnx.data", "a+b-c_d.1", "a/b/c/d"])
def test_plain_names(name: str) -> None:
    assert names.is_plain(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        "a\\b",
        "C:a",
        "nul",
        "LPT1.txt",
        "a.",
        ".a",
        "a b",
        "ä",
        "a\n",
        "a" * 200,
        "/".join("a" * 20),
    ],
)
def test_names_that_are_not_the_same_everywhere(name: str) -> None:
    assert not names.is_plain(name)


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("a b/ä (1).jpg", True),
        ("../a", False),
        ("a/../../b", False),
        ("/a", False),
        ("C:\\a", False),
        ("a\\..\\..\\b", False),
        ("\\\\host\\a", False),
        ("", False),
    ],
)
def test_image_names_stay_below_their_folder(name: str, stays: bool) -> None:
    assert names.stays_below(name) is stays


def test_contents_lists_links_and_does_not_follow_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / ".DS_Store").touch()
    assert names.contents(tmp_path) == ["a/file", "loop"]
