import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vit_edge import bundle
from vit_edge.errors import UserError


@pytest.fixture
def copy(ort_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / bundle.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_reads_what_was_written(ort_bundle: Path) -> None:
    opened = bundle.read(ort_bundle)
    assert opened.manifest.model.name == "tiny"
    assert [path.name for path in opened.int8] == ["model.onnx"]
    assert list(opened.floats) == ["f32"]


def test_a_changed_byte_is_found(copy: Path) -> None:
    path = copy / "int8" / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="has been changed"):
        bundle.read(copy)


def test_a_missing_or_longer_file_is_found(copy: Path) -> None:
    path = copy / "int8" / "model.onnx"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="bytes, expected"):
        bundle.read(copy)
    path.unlink()
    with pytest.raises(UserError, match=r"model\.onnx is missing"):
        bundle.read(copy)


def test_a_file_that_does_not_belong_is_refused(copy: Path) -> None:
    (copy / "int8" / "engine.plan").write_bytes(b"executable")
    with pytest.raises(UserError, match="does not belong"):
        bundle.read(copy)


def test_a_link_is_refused(copy: Path) -> None:
    (copy / "int8" / "link").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="symbolic link"):
        bundle.read(copy)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "int8/../../outside", "C:\\outside"])
def test_a_manifest_that_leaves_the_bundle_is_refused(copy: Path, name: str) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].update({name: {"sha256": "0" * 64, "size_bytes": 1}}))
    with pytest.raises(UserError, match="leaves the bundle"):
        bundle.read(copy)


def test_an_artefact_without_a_digest_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].pop("int8/model.onnx"))
    with pytest.raises(UserError, match="no SHA-256"):
        bundle.read(copy)


def test_an_unknown_schema_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(schema="vit-edge/bundle/99"))
    with pytest.raises(UserError, match="not valid"):
        bundle.read(copy)


def test_a_zip_is_the_same_bundle(ort_bundle: Path, tmp_path: Path) -> None:
    archive = tmp_path / "bundle.zip"
    bundle.pack(ort_bundle, archive)
    with bundle.opened(archive) as opened:
        assert opened.digest == bundle.read(ort_bundle).digest
        unpacked = opened.folder
    assert not unpacked.exists()


@pytest.mark.parametrize("name", ["../outside.txt", "/outside.txt"])
def test_a_zip_that_leaves_the_bundle_is_refused(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr(name, "x")
    with pytest.raises(UserError, match="no file's name in a bundle"), bundle.opened(archive):
        pass
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_what_is_no_bundle_is_the_users_mistake(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bundle.zip"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="not a bundle"), bundle.opened(path):
        pass


def test_a_truncated_zip_is_the_users_mistake(ort_bundle: Path, tmp_path: Path) -> None:
    archive = tmp_path / "bundle.zip"
    bundle.pack(ort_bundle, archive)
    content = bytearray(archive.read_bytes())
    content[100:200] = bytes(100)
    archive.write_bytes(content)
    with pytest.raises(UserError, match="cannot be unpacked"), bundle.opened(archive):
        pass
