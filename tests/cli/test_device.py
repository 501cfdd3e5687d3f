"""The device's commands as a user runs them: in a process of their own, by their exit code and streams."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import MakeBundle, missing, require
from tests.tiny_model import TinyModel, digits

FORBIDDEN = "torch torchvision timm torchao onnx onnxscript onnx_ir accelerate safetensors sklearn"
WITHOUT_TRAINING = (
    "import sys\n"
    f"for name in {FORBIDDEN!r}.split(): sys.modules[name] = None\n"
    "from vit_edge.cli.main import main\n"
    "main()\n"
)
LOOSE = ("--max-drop", "5", "--min-relative-top1", "0.9")


def vit_edge(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command where nothing of the training side can be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TRAINING, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def two_lines(done: subprocess.CompletedProcess[str]) -> bool:
    lines = done.stderr.splitlines()
    return done.returncode == 2 and len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("fix: ")


def test_a_passing_gate_exits_0_and_writes_its_reports(openvino_bundle: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / "out" / f"gate.{kind}" for kind in ("json", "junit", "markdown", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    done = vit_edge("gate", openvino_bundle, *LOOSE, *options)
    assert done.returncode == 0, done.stderr
    assert "timing int8, f32" in done.stderr
    assert done.stdout.startswith("PASS")
    assert json.loads(files["json"].read_text())["verdict"] == "pass"
    assert ET.parse(files["junit"]).getroot().tag == "testsuites"


def test_a_failing_gate_exits_1(ort_bundle: Path) -> None:
    done = vit_edge("gate", ort_bundle, *LOOSE, "--max-p90-ms", "0.000001", "--json", "-")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["verdict"], report["blame"]) == ("fail", "latency")


def test_an_undecided_gate_exits_3_or_what_it_is_told(ort_bundle: Path) -> None:
    done = vit_edge("gate", ort_bundle, "--max-drop", "0.5")
    assert done.returncode == 3
    assert "images would decide" in " ".join(done.stdout.split())
    assert vit_edge("gate", ort_bundle, "--max-drop", "0.5", "--undecided", "pass").returncode == 0


def test_a_changed_byte_is_two_lines_and_exit_2(ort_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))
    path = copy / "int8" / "model.onnx"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    done = vit_edge("gate", copy)
    assert two_lines(done), done.stderr
    assert "model.onnx has been changed" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [("gate", "nowhere"), ("predict", "nowhere", "x.png"), ("bench", "nowhere")])
def test_a_bundle_that_is_not_there_is_two_lines_and_exit_2(arguments: tuple[str, ...]) -> None:
    assert two_lines(vit_edge(*arguments))


def test_a_runtime_that_is_not_installed_is_exit_2_with_the_pip_command(openvino_bundle: Path) -> None:
    program = "import sys\nsys.modules['openvino'] = None\n" + WITHOUT_TRAINING
    done = subprocess.run(
        [sys.executable, "-c", program, "gate", str(openvino_bundle)], capture_output=True, text=True, timeout=60
    )
    assert two_lines(done), done.stderr
    assert 'pip install "vit-edge[openvino]"' in done.stderr


def test_a_limit_that_is_none_is_the_users_mistake(ort_bundle: Path) -> None:
    done = vit_edge("gate", ort_bundle, "--min-speedup", "0")
    assert two_lines(done), done.stderr
    assert "min_speedup" in done.stderr


def test_two_ways_to_say_how_long_to_measure_are_the_users_mistake(ort_bundle: Path) -> None:
    assert two_lines(vit_edge("gate", ort_bundle, "--official", "--seconds", "1"))


def test_a_report_that_cannot_be_written_is_the_users_mistake(ort_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert two_lines(vit_edge("gate", ort_bundle, *LOOSE, "--json", tmp_path / "file" / "gate.json"))


def test_predict(ort_bundle: Path, tmp_path: Path) -> None:
    images_NHWC, labels_N = digits()
    Image.fromarray(images_NHWC[0]).save(tmp_path / "digit.png")
    done = vit_edge("predict", ort_bundle, tmp_path / "digit.png", "--json")
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert next(iter(found["classes"])) == str(labels_N[0])
    assert len(found["classes"]) == 5
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert two_lines(vit_edge("predict", ort_bundle, tmp_path / "bad.png"))


@pytest.mark.parametrize("name", ["ort_bundle", "openvino_bundle"])
def test_the_printed_program_runs_without_vit_edge(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(name)
    done = vit_edge("predict", folder, "--snippet")
    assert done.returncode == 0, done.stderr
    assert "vit_edge" not in done.stdout
    images_NHWC, labels_N = digits()
    Image.fromarray(images_NHWC[0]).save(tmp_path / "digit.png")
    program = [sys.executable, "-c", done.stdout, str(tmp_path / "digit.png")]
    ran = subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=60)
    assert ran.stdout == f"{labels_N[0]}\n", ran.stderr


def test_bench(ort_bundle: Path, openvino_bundle: Path) -> None:
    done = vit_edge("bench", ort_bundle, openvino_bundle, "--seconds", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["target"] for row in rows} == {"onnxruntime", "openvino"}


def test_doctor_names_what_is_here_and_what_is_missing() -> None:
    done = vit_edge("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [probe["runtime"] for probe in found["runtimes"]] == ["onnxruntime", "openvino", "tensorrt"]
    assert all(probe["problem"] is None or probe["fix"] for probe in found["runtimes"])
    assert vit_edge("doctor").stdout.startswith("python ")


def test_targets_lists_every_profile_that_ships() -> None:
    done = vit_edge("targets", "--json")
    names = {profile["name"] for profile in json.loads(done.stdout)}
    shipped = {path.stem for path in (Path(__file__).parents[2] / "targets").glob("*.yaml")}
    assert names == shipped | {"onnxruntime", "openvino", "tensorrt"}


def test_a_target_that_cannot_run_here_exits_3(make_bundle: MakeBundle) -> None:
    from vit_edge.runtimes import cuda

    require("tensorrt_rtx_bindings", "tensorrt")
    if cuda.missing_gpu() is None:
        pytest.skip("a GPU is here: the gate measures")
    done = vit_edge("gate", make_bundle("tensorrt"))
    assert done.returncode == 3
    assert done.stdout.startswith("UNMEASURED")


def test_a_bundle_is_signed_and_only_its_makers_key_lets_it_in(ort_bundle: Path, tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        missing("openssl", "openssl is not installed")
    for name in ("key", "other"):
        make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem"]
        subprocess.run(make, check=True, capture_output=True)
        export = ["openssl", "pkey", "-in", tmp_path / f"{name}.pem", "-pubout", "-out", tmp_path / f"{name}-pub.pem"]
        subprocess.run(export, check=True, capture_output=True)
    folder = Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))
    required = ("--require-signature", tmp_path / "key-pub.pem")
    assert two_lines(vit_edge("gate", folder, *required))
    signing = vit_edge("sign", folder, "--key", tmp_path / "key.pem")
    assert signing.returncode == 0, signing.stderr
    done = vit_edge("gate", folder, *LOOSE, "--seconds", "0.05", *required)
    assert done.returncode == 0, done.stderr
    assert "signed by the owner of" in " ".join(done.stdout.split())
    assert two_lines(vit_edge("gate", folder, "--require-signature", tmp_path / "other-pub.pem"))
    assert two_lines(vit_edge("bench", folder, "--require-signature", tmp_path / "other-pub.pem"))
    assert two_lines(vit_edge("predict", folder, "x.png", "--require-signature", tmp_path / "other-pub.pem"))
    assert two_lines(vit_edge("predict", folder, "--snippet", "--require-signature", tmp_path / "other-pub.pem"))


def test_what_a_bundle_says_cannot_steer_the_terminal(ort_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ort_bundle, tmp_path / "bundle"))
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["\x1b]0;title\x07\x1b[2J"] = 1
    (folder / "bundle.json").write_text(json.dumps(manifest))
    done = vit_edge("gate", folder)
    assert two_lines(done), done.stderr
    assert "\x1b" not in done.stderr


def test_a_gate_is_compared_with_an_earlier_one(ort_bundle: Path, openvino_bundle: Path, tmp_path: Path) -> None:
    assert vit_edge("gate", ort_bundle, *LOOSE, "--json", tmp_path / "old.json").returncode == 0
    done = vit_edge("gate", openvino_bundle, *LOOSE, "--baseline", tmp_path / "old.json")
    assert done.returncode == 0, done.stderr
    assert "pass       regression" in done.stdout
    assert "latency is not compared, runtime name is 'openvino'" in " ".join(done.stdout.split())
    slow = ("--max-slowdown", "1.2")
    assert vit_edge("gate", openvino_bundle, *LOOSE, *slow, "--baseline", tmp_path / "old.json").returncode == 3
    assert two_lines(vit_edge("gate", ort_bundle, *slow))
    assert two_lines(vit_edge("gate", ort_bundle, "--baseline", tmp_path / "missing.json"))


def test_a_preset_sets_the_limits_and_an_unknown_one_is_two_lines(ort_bundle: Path) -> None:
    done = vit_edge("gate", ort_bundle, "--preset", "mobile-98", "--seconds", "0.05", "--json", "-")
    limits = {one["name"]: (one["value"], one["origin"]) for one in json.loads(done.stdout)["limits"]}
    assert limits["min_relative_top1"] == (0.98, "preset mobile-98")
    assert limits["max_drop_points"] == (None, "preset mobile-98")
    assert two_lines(vit_edge("gate", ort_bundle, "--preset", "mobile98"))


def test_report_shows_many_gates(ort_bundle: Path, openvino_bundle: Path, tmp_path: Path) -> None:
    for name, bundle in (("ort", ort_bundle), ("openvino", openvino_bundle)):
        assert (
            vit_edge("gate", bundle, *LOOSE, "--seconds", "0.05", "--json", tmp_path / f"{name}.json").returncode == 0
        )
    files = sorted(tmp_path.glob("*.json"))
    done = vit_edge("report", *files, "--html", tmp_path / "all.html", "--markdown", tmp_path / "all.md")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert all(name in done.stdout for name in ("onnxruntime", "openvino", "accuracy", "pass"))
    assert (tmp_path / "all.md").read_text().count("\n| ") == 4
    assert (tmp_path / "all.html").read_text().count("<section") == 2
    (tmp_path / "bad.json").write_text("{}")
    assert two_lines(vit_edge("report", tmp_path / "bad.json"))
    assert two_lines(vit_edge("report", tmp_path / "missing.json"))
    (tmp_path / "ledger.json").write_text('{"schema": "vit-edge/ledger/1", "rows": []}')
    assert two_lines(vit_edge("report", tmp_path / "ledger.json"))
    assert "Ledger" in vit_edge("report", *files, tmp_path / "ledger.json", "--html", "-").stdout


def test_a_model_made_elsewhere_is_bundled_and_its_mistakes_are_two_lines(
    tiny: TinyModel, tiny_evaluation: Path, tmp_path: Path
) -> None:
    require("onnxruntime", "onnxruntime")
    model = tiny.save(tmp_path / "theirs.onnx", batch=1, int8=True)
    given = ("--reference", tiny_evaluation, "--target", "onnxruntime", "--out", tmp_path / "made")
    assert vit_edge("bundle", model, *given).stdout == f"{tmp_path / 'made'}\n"
    assert vit_edge("gate", tmp_path / "made", "--seconds", "0.1", *LOOSE).returncode == 0
    assert two_lines(vit_edge("bundle", model, *given))
    assert two_lines(vit_edge("bundle", model, *given[:-1], tmp_path / "2", "--mean", "0.5,0.5,0.5"))
    assert two_lines(vit_edge("bundle", model, *given[:-1], tmp_path / "2", "--mean", "0.5", "--std", "1,1,1"))
    assert not (tmp_path / "2").exists()
