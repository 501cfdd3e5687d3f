import shutil
import stat
import zipfile
from pathlib import Path

import pytest

from vit_edge import bundle
from vit_edge.errors import UserError
from vit_edge.safety import archive


@pytest.fixture
def zipped(ort_bundle: Path, tmp_path: Path) -> Path:
    bundle.pack(ort_bundle, tmp_path / "bundle.zip")
    return tmp_path / "bundle.zip"


def rezip(path: Path, top: str = "", extra: dict[str, bytes] | None = None) -> Path:
    """The zip again, below a folder `top`, with more entries."""
    again = path.with_name("again.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(top + entry.filename, old.read(entry))
        for name, content in (extra or {}).items():
            new.writestr(name, content)
    return again


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught, bundle.opened(path):
        pass
    return caught.value.problem


def test_a_zip_of_the_folder_itself_is_the_same_bundle(ort_bundle: Path, zipped: Path) -> None:
    junk = {"__MACOSX/my bundle (1)/._bundle.json": b"x", "my bundle (1)/.DS_Store": b"x", "my bundle (1)/int8/": b""}
    with bundle.opened(rezip(zipped, "my bundle (1)/", junk)) as opened:
        assert opened.digest == bundle.read(ort_bundle).digest


@pytest.mark.parametrize("name", ["top/bundle.json", "int8/engine.plan", "evaluation/more.npy"])
def test_what_the_bundle_does_not_list_is_not_unpacked(zipped: Path, name: str) -> None:
    assert f"{name} does not belong" in refused(rezip(zipped, extra={name: b"x"}))


@pytest.mark.parametrize(
    "name", ["../x", "/x", "C:/x", "a\\..\\x", "int8//x", "./x", "NUL", "com1.txt", "x.", "x ", "é", "a:b", "int8/..", "\x1b[2J"]
)  # fmt: skip
def test_a_name_that_is_not_plain_is_refused(zipped: Path, name: str) -> None:
    assert "no file's name in a bundle" in refused(rezip(zipped, extra={name: b"x"}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["int8/model.onnx", "INT8/Model.onnx"])
def test_a_name_that_is_there_twice_is_refused(zipped: Path, name: str) -> None:
    assert "twice" in refused(rezip(zipped, extra={name: b"x"}))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_a_link_or_device_is_refused(zipped: Path, kind: int) -> None:
    entry = zipfile.ZipInfo("int8/link")
    entry.external_attr = (kind | 0o777) << 16
    with zipfile.ZipFile(zipped, "a") as file:
        file.writestr(entry, "/etc/passwd")
    assert "a link or a device" in refused(zipped)


def test_a_file_that_is_longer_than_listed_is_not_unpacked(zipped: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(zipped) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            is_bomb = entry.filename == "int8/model.onnx"
            new.writestr(entry.filename, bytes(30_000_000) if is_bomb else old.read(entry))
    assert "int8/model.onnx has 30000000 bytes, expected" in refused(bomb)


def test_a_ratio_that_only_a_bomb_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", bytes(50_000_000))
    with archive.opened(path, "a") as opened, pytest.raises(UserError, match="packed over"):
        opened.unpack(tmp_path, {"a": 50_000_000})
    assert not (tmp_path / "a").exists()


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", b"x")
        for entry in file.infolist():
            entry.file_size = entry.compress_size = shutil.disk_usage(tmp_path).free + 1
    with archive.opened(path, "a") as opened, pytest.raises(UserError, match="MB free"):
        opened.unpack(tmp_path, {"a": shutil.disk_usage(tmp_path).free + 1})


def test_a_list_of_files_that_no_bundle_has_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(40_000):
            file.writestr(f"{number:0100}", b"")
    assert "list of files is longer" in refused(path)


def test_what_is_packed_or_locked_in_another_way_is_refused(zipped: Path, tmp_path: Path) -> None:
    path = tmp_path / "lzma.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("bundle.json", b"{}")
    assert "other than deflate" in refused(path)
    content = bytearray(zipped.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 8] |= 1
    zipped.write_bytes(content)
    assert "is encrypted" in refused(zipped)


def test_errors_name_the_zip_and_no_temporary_folder(ort_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))
    content = bytearray((copy / "int8" / "model.onnx").read_bytes())
    content[50] ^= 1
    (copy / "int8" / "model.onnx").write_bytes(content)
    bundle.pack(copy, tmp_path / "changed.zip")
    assert refused(tmp_path / "changed.zip").startswith(f"{tmp_path / 'changed.zip'}/int8/model.onnx has been changed")
