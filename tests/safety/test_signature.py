import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.conftest import missing
from vit_edge import bundle
from vit_edge.bundle import Trust
from vit_edge.errors import UserError
from vit_edge.safety import signature


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of key.pem and pub.pem, made as the README says, and another pair."""
    if not shutil.which("openssl"):
        missing("openssl", "openssl is not installed")
    folder = tmp_path_factory.mktemp("keys")
    for private, public in (("key.pem", "pub.pem"), ("other.pem", "other-pub.pem")):
        openssl("genpkey", "-algorithm", "ed25519", "-out", folder / private)
        openssl("pkey", "-in", folder / private, "-pubout", "-out", folder / public)
    return folder


@pytest.fixture
def signed(ort_bundle: Path, keys: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))
    bundle.sign(folder, keys / "key.pem")
    return folder


def test_a_signed_bundle_is_read_as_folder_and_as_zip(signed: Path, keys: Path, tmp_path: Path) -> None:
    trust = Trust(public_key=keys / "pub.pem")
    assert bundle.read(signed, trust=trust).signed_by == keys / "pub.pem"
    bundle.pack(signed, tmp_path / "b.zip")
    with bundle.opened(tmp_path / "b.zip", trust) as opened:
        assert opened.signed_by == keys / "pub.pem"


def test_a_zip_is_signed_in_place_with_or_without_a_folder_around_it(
    ort_bundle: Path, keys: Path, tmp_path: Path
) -> None:
    for top in ("", "my bundle/"):
        path = tmp_path / "b.zip"
        with zipfile.ZipFile(path, "w") as zipped:
            for file in ort_bundle.rglob("*.*"):
                zipped.write(file, top + file.relative_to(ort_bundle).as_posix())
        bundle.sign(path, keys / "key.pem")
        with bundle.opened(path, Trust(public_key=keys / "pub.pem")):
            pass
        with pytest.raises(UserError, match="signed already"):
            bundle.sign(path, keys / "key.pem")


def test_openssl_verifies_the_signature(signed: Path, keys: Path) -> None:
    openssl(
        "pkeyutl", "-verify", "-pubin", "-inkey", keys / "pub.pem", "-rawin",
        "-in", signed / bundle.MANIFEST, "-sigfile", signed / bundle.SIGNATURE,
    )  # fmt: skip


def test_another_key_or_a_changed_bundle_or_no_signature_is_refused(signed: Path, keys: Path) -> None:
    with pytest.raises(UserError, match="not signed by the owner"):
        bundle.read(signed, trust=Trust(public_key=keys / "other-pub.pem"))
    manifest = signed / bundle.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"tiny"', b'"tony"'))
    with pytest.raises(UserError, match="not signed by the owner"):
        bundle.read(signed, trust=Trust(public_key=keys / "pub.pem"))
    assert bundle.read(signed).manifest.model.name == "tony", "nothing was asked of it"
    (signed / bundle.SIGNATURE).unlink()
    with pytest.raises(UserError, match="is not signed"):
        bundle.read(signed, trust=Trust(public_key=keys / "pub.pem"))


@pytest.mark.parametrize("name", ["key.pem", "rsa.pem", "empty.pem", "missing.pem"])
def test_a_file_that_is_no_public_key_is_the_users_mistake(signed: Path, keys: Path, name: str) -> None:
    (keys / "empty.pem").touch()
    if name == "rsa.pem":
        openssl("genrsa", "-out", keys / "private.pem", "2048")
        openssl("rsa", "-in", keys / "private.pem", "-pubout", "-out", keys / name)
    with pytest.raises(UserError, match=name):
        bundle.read(signed, trust=Trust(public_key=keys / name))


def test_a_file_that_is_no_private_key_is_the_users_mistake(ort_bundle: Path, keys: Path, tmp_path: Path) -> None:
    openssl("genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:x", "-out", tmp_path / "locked.pem")
    with pytest.raises(UserError, match="encrypted with a password"):
        signature.sign(b"x", tmp_path / "locked.pem")
    with pytest.raises(UserError, match="no private key"):
        signature.sign(b"x", keys / "pub.pem")
