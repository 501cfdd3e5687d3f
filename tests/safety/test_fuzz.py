"""Whatever is changed in a bundle: a gate ends in a report or in two lines for the user, within seconds.

And where a signature is asked for, nothing passes but what was signed.
"""

import json
import random
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeBundle, require
from tests.safety import mutations
from tests.tiny_model import TinyModel, digits
from vit_edge import bundle, evaluation
from vit_edge.bundle import Trust
from vit_edge.errors import UserError
from vit_edge.evaluation import Reference
from vit_edge.report import console, html, junit, markdown
from vit_edge.report.schema import Report
from vit_edge.safety import names
from vit_edge.stages.gate import gate_bundle
from vit_edge.target import Protocol

IMAGES = 24
MAX_SECONDS = 10
QUICK = Protocol(warmup=1, seconds=0.01, min_queries=1, max_queries=8)
Files = dict[str, bytes]


def contents(folder: Path) -> Files:
    return {name: (folder / name).read_bytes() for name in names.contents(folder)}


@pytest.fixture(scope="module")
def small_evaluation(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    images_NHWC, labels_N = (part[:IMAGES] for part in digits())
    evaluation.write(
        folder, images_NHWC=images_NHWC, labels_N=labels_N, logits_NK=tiny.logits(images_NHWC),
        names=[f"{number}.png" for number in range(IMAGES)], classes=[str(digit) for digit in range(10)], data="digits",
        reference=Reference(device="numpy", kind="cpu", top1=0.9, latency_ms={"p50": 1.0, "p90": 1.1, "p99": 1.2, "n": 9}),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def whole(make_bundle: MakeBundle, small_evaluation: Path) -> dict[str, Files]:
    """Runtime → the files of a sound bundle."""
    found = {}
    for name in ("onnxruntime", "openvino"):
        require(name, name)
        folder = make_bundle(name, with_evaluation=False, target_fields={"protocol": QUICK}, expected_int8=["head"])
        manifest = json.loads((folder / "bundle.json").read_text())
        files = contents(folder)
        files |= {f"evaluation/{one}": content for one, content in contents(small_evaluation).items()}
        manifest["evaluation_sha256"] = ""
        found[name] = mutations.sealed(files | {"bundle.json": json.dumps(manifest).encode()})
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private and its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder, private = tmp_path_factory.mktemp("keys"), Ed25519PrivateKey.generate()
    encoding = serialization.Encoding.PEM
    pem = private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    public = private.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "pub.pem").write_bytes(public)
    return folder / "key.pem", folder / "pub.pem"


def attempt(path: Path) -> str:
    """Gates a bundle and writes every kind of report; "refused" or the verdict. Anything but UserError is a bug of ours."""
    begun = time.perf_counter()
    try:
        report = gate_bundle(path, seconds=0.01).report
    except UserError:
        ended = "refused"
    else:
        ended = report.verdict
        assert Report.model_validate_json(report.to_json()).bundle_sha256 == report.bundle_sha256
        ET.fromstring(junit.of_report(report))
        markdown.of_report(report).encode()
        html.page(reports=[report]).encode()
        console.show_report(report)
    assert time.perf_counter() - begun < MAX_SECONDS
    return ended


def is_signed(path: Path, public_key: Path, original: Files) -> bool:
    """Whether the bundle passes as signed; then its files must be the original's."""
    try:
        with bundle.opened(path, Trust(public_key=public_key)) as opened:
            evaluation.read(opened.evaluation_folder, opened.manifest.evaluation_sha256)
            found = contents(opened.folder)
    except UserError:
        return False
    assert {name: found[name] for name in original} == original, "a changed bundle passed as signed"
    return True


# What is changed, how, whether digests are made to match, and how often.
KINDS: dict[str, tuple[str, str, Callable[[bytes, random.Random], bytes], bool, int]] = {
    "bundle.json, bytes": ("onnxruntime", "bundle.json", mutations.of_bytes, False, 300),
    "bundle.json, values": ("onnxruntime", "bundle.json", mutations.of_json, False, 500),
    "bundle.json, values, OpenVINO": ("openvino", "bundle.json", mutations.of_json, False, 150),
    "evaluation.json": ("onnxruntime", "evaluation/evaluation.json", mutations.of_json, False, 100),
    "images": ("onnxruntime", "evaluation/images.npy", mutations.of_bytes, True, 100),
    "labels": ("onnxruntime", "evaluation/labels.npy", mutations.of_bytes, True, 100),
    "logits": ("onnxruntime", "evaluation/logits.npy", mutations.of_bytes, True, 100),
    "names": ("onnxruntime", "evaluation/names.json", mutations.of_json, True, 100),
    "ONNX int8": ("onnxruntime", "int8/model.onnx", mutations.of_bytes, True, 300),
    "ONNX int8, fields": ("onnxruntime", "int8/model.onnx", mutations.of_onnx, True, 300),
    "OpenVINO graph, elements": ("openvino", "int8/model.xml", mutations.of_xml, True, 120),
    "ONNX float": ("onnxruntime", "float/model.onnx", mutations.of_bytes, True, 100),
    "OpenVINO graph": ("openvino", "int8/model.xml", mutations.of_bytes, True, 180),
    "OpenVINO weights": ("openvino", "int8/model.bin", mutations.of_bytes, True, 50),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_folder(kind: str, whole: dict[str, Files], keys: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, name, change, seal, count = KINDS[kind]
    folder, files = tmp_path / "bundle", whole[runtime]
    mutations.write(folder, files)
    assert attempt(folder) != "refused"
    bundle.sign(folder, keys[0])
    assert is_signed(folder, keys[1], files)
    rng = random.Random(kind)
    for _ in range(count):
        changed = mutations.changed(files, name, lambda content: change(content, rng), seal)
        mutations.write(folder, changed)
        attempt(folder)
        assert changed == files or not is_signed(folder, keys[1], files)


def test_a_changed_zip(whole: dict[str, Files], keys: tuple[Path, Path], tmp_path: Path) -> None:
    folder, files = tmp_path / "bundle", whole["onnxruntime"]
    mutations.write(folder, files)
    bundle.sign(folder, keys[0])
    bundle.pack(folder, tmp_path / "whole.zip")
    content, path, rng = (tmp_path / "whole.zip").read_bytes(), tmp_path / "changed.zip", random.Random(0)
    assert is_signed(tmp_path / "whole.zip", keys[1], files)
    lists = content.index(b"PK\1\2")
    for number in range(500):
        head, tail = (content[:lists], content[lists:]) if number % 2 else (content, b"")
        path.write_bytes(head + mutations.of_bytes(tail, rng) if tail else mutations.of_bytes(head, rng))
        attempt(path)
        is_signed(path, keys[1], files)
