"""The building commands as a user types them: what they leave behind, and what they refuse in two lines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from vit_edge import bundle
from vit_edge.cli import main as cli
from vit_edge.models import zoo
from vit_edge.recipe import ModelConfig

SMALL = ["--epochs", "1", "--batch-size", "64", "--image-size", "32", "--device", "cpu"]
Ended = tuple[int, str, str]
Cli = Callable[..., Ended]


@pytest.fixture
def vit_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["vit-edge", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def refused(ended: Ended, problem: str, fix: str) -> None:
    """Exit 2, and the two lines are the last thing that is said."""
    code, _, err = ended
    assert code == 2, err
    first, second = err.strip().splitlines()[-2:]
    assert first.startswith("error: ")
    assert problem in first
    assert second.startswith("fix: ")
    assert fix in second
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (["distill", "--teacher", "vit_b17"], "unknown model 'vit_b17'", "vit_b16"),
        (["distill", "--student", "vit_t16"], "unknown model 'vit_t16'", "vit_ti16"),
        (["train", "--data", "digit"], "unknown data set 'digit'", "did you mean 'digits'?"),
        (["train", "--data", "folder:nowhere"], "there is no folder nowhere", "PATH/train/CLASS"),
        (["export", "--target", "openvinno"], "there is no run", "vit-edge distill"),
        (["run", "quickstrat"], "unknown recipe 'quickstrat'", "did you mean 'quickstart'?"),
        (["run", "quickstart", "--set", "studnet.x=1"], "unknown key 'studnet'", "did you mean 'student'?"),
        (["run", "quickstart", "--from", "studnet"], "unknown stage 'studnet'", "did you mean 'student'?"),
        (["train", "--model", "vit_ti16", "--image-size", "40"], "W = 40 ", "nearest image_size is 32"),
        (["train", "--seed", "-1"], "seed = -1", "correct 'seed'"),
        (["run", "quickstart", "--set", "teacher.training.learning_rate=.inf"], "finite number", "learning_rate"),
        (["run", "quickstart", "--set", "name=../evil"], "name = '../evil'", "correct 'name'"),
        (["train", "--model", "vit_ti16", "--device", "cuda:9"], "--device cuda:9 is not to be had", "--device cpu"),
        (["export", "--target", "openvino", "--model", "nope"], "nope is no run and no model", "runs/NAME"),
        (["train", "--model", "vit_ti16", "--weights", "none.pt"], "expected none, pretrained or an existing file", ""),
        (["train", "--set", "student.model.depth=100000000"], "7.1e+14 parameters", "a smaller width, depth"),
        (["train", "--set", "student.model.dept=3"], "unknown key 'student.model.dept'", "did you mean 'depth'?"),
        (["train", "--set", "student.model=3"], "student.model = 3", "correct"),
        (["distill", "--set", "student.model.mean=[124,117,104]"], "mean.0 = 124", "correct"),
        (["distill", "--set", "seed"], "--set 'seed': expected KEY=VALUE", "--set student.training.epochs=5"),
    ],
)
def test_a_mistake_is_two_lines_and_leaves_nothing(
    vit_edge: Cli, tmp_path: Path, arguments: list[str], problem: str, fix: str
) -> None:
    refused(vit_edge(*arguments), problem, fix)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("stage.json", "model.safetensors")]


def test_an_unknown_target_is_refused_before_anything_is_trained(vit_edge: Cli, tmp_path: Path) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL)[0] == 0
    refused(vit_edge("export", "--target", "openvinno"), "unknown target 'openvinno'", "did you mean 'openvino'?")
    assert not (tmp_path / "runs" / "vit_ti16-digits" / "int8").exists()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("targets: [{name: opnvino}]", encoding="utf-8")
    refused(vit_edge("run", str(recipe)), "unknown target 'opnvino'", "did you mean 'openvino'?")
    assert not (tmp_path / "runs" / "mine" / "teacher").exists()


def test_train_quantize_reference_export(vit_edge: Cli, tmp_path: Path) -> None:
    code, out, err = vit_edge("train", "--model", "vit_ti16", *SMALL)
    assert code == 0, err
    assert "student: runs/vit_ti16-digits/student, top-1 0." in out
    code, out, _ = vit_edge("quantize", "--search-seconds", "0", "--set", "int8.equalization=[]")
    assert code == 0
    assert "int8 model: runs/vit_ti16-digits/int8" in out
    assert "given back" not in out
    code, out, _ = vit_edge("quantize", "--search-seconds", "60", "--search-trials", "3")
    assert code == 0
    assert "nothing needs to be given back" in out
    record = (tmp_path / "runs" / "vit_ti16-digits" / "recipe.yaml").read_text(encoding="utf-8")
    assert "trials: 3" in record
    assert "equalization: []" in record
    refused(vit_edge("quantize", "--search-seconds", "0", "--search-trials", "3"), "no effect", "leave out")
    code, out, _ = vit_edge("reference")
    assert code == 0
    assert "runs/vit_ti16-digits/reference/evaluation" in out
    code, out, _ = vit_edge("export", "--target", "onnx", "--target", "openvino")
    assert code == 0
    for name in ("onnxruntime", "openvino"):
        assert f"bundle: runs/vit_ti16-digits/export/{name}/bundle" in out
        assert (tmp_path / "runs/vit_ti16-digits/export" / name / "bundle" / "bundle.json").is_file()
    manifest = Path("runs/vit_ti16-digits/export/openvino/bundle/bundle.json")
    for option, is_open in (("--dynamic-batch", True), ("--static-batch", False)):
        assert vit_edge("export", "--target", "openvino", option)[0] == 0
        assert json.loads(manifest.read_text())["target"]["dynamic_batch"] is is_open
    refused(vit_edge("export", "--target", "onnx", "--sign", "no.pem"), "no.pem is not there", "openssl genpkey")
    (tmp_path / "key.pem").write_bytes(private_key())
    code, out, err = vit_edge("export", "--target", "onnx", "--sign", "key.pem")
    assert code == 0, err
    assert out.endswith("/export/onnxruntime/bundle, signed\n")
    assert (tmp_path / "runs/vit_ti16-digits/export/onnxruntime/bundle/bundle.json.sig").stat().st_size == 64
    refused(vit_edge("export", "--target", "onnx", "--zip", "key.pem"), "key.pem: File exists", "written")
    code, out, err = vit_edge("export", "--target", "onnx", "--sign", "key.pem", "--zip", "new/bundles")
    assert code == 0, err
    assert out == "bundle: new/bundles/onnxruntime.zip, signed\n"
    with bundle.opened(tmp_path / "new/bundles/onnxruntime.zip") as opened:
        assert opened.manifest.target.name == "onnxruntime"
        assert (opened.folder / "bundle.json.sig").exists()


def private_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_a_trained_run_can_teach_and_its_folder_can_be_exported(vit_edge: Cli) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "first")[0] == 0
    code, out, err = vit_edge(
        "distill", "--teacher", "first", "--student", "mobilenetv3_small_050", *SMALL, "--out", "second"
    )
    assert code == 0, err
    assert "teacher: second/teacher" in out
    assert "teacher: epoch" not in err
    code, out, err = vit_edge("export", "--target", "onnxruntime", "--model", "second/student")
    assert code == 0, err
    assert "/export/onnxruntime/bundle" in out


def test_weights_of_unknown_origin_are_asked_about_and_then_train_at_another_side(
    vit_edge: Cli, tmp_path: Path
) -> None:
    torch.save(zoo.create(ModelConfig(name="vit_ti16"), 10, 32).state_dict(), tmp_path / "w.pth")
    arguments = ["distill", "--teacher", "vit_ti16", "--teacher-weights", "w.pth", "--student", "vit_ti16", *SMALL]
    refused(vit_edge(*arguments), "w.pth was trained with is not known", "--set teacher.model.mean=[0.5,0.5,0.5]")
    told = ["--set", "teacher.model.mean=[0.5,0.5,0.5]", "--set", "teacher.model.std=[0.5,0.5,0.5]"]
    larger = ["--set", "teacher.model.image_size=48", "--set", "teacher.training.epochs=1"]
    code, _, err = vit_edge(*arguments, *told, *larger)
    assert code == 0, err
    assert "teacher: vit_ti16, 48 px" in err
    assert "positions resampled from 2×2 to 3×3 patches (bicubic): fine-tune at this resolution" in err


def test_a_saved_model_keeps_its_side_unless_it_is_trained_at_another(vit_edge: Cli) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "first")[0] == 0
    _, _, err = vit_edge("distill", "--teacher", "first", "--student", "vit_ti16", *SMALL[:-4], "--image-size", "48")
    assert "teacher: vit_ti16, 32 px" in err
    assert "student: vit_ti16, 48 px" in err
    code, _, err = vit_edge("train", "--model", "first", *SMALL[:-4], "--image-size", "48", "--out", "second")
    assert code == 0, err
    assert "student: vit_ti16, 48 px" in err
    assert "positions resampled from 2×2 to 3×3" in err


def test_folders_that_hold_something_else_are_left_alone(vit_edge: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").touch()
    refused(vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "thesis"), "it holds text.tex", "--out")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text.tex"]
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "run")[0] == 0
    refused(vit_edge("train", "--model", "vit_s16", *SMALL, "--out", "run"), "holds the run 'vit_ti16-digits'", "--out")
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "run", "--seed", "3")[0] == 0


def test_a_target_may_be_asked_for_twice(vit_edge: Cli) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL)[0] == 0
    code, out, err = vit_edge("export", "--target", "onnx", "--target", "onnxruntime")
    assert code == 0, err
    assert out.count("bundle:") == 1


def test_quantization_aware_training_goes_on_from_a_run_and_asks_a_bare_model_for_its_images(
    vit_edge: Cli, tmp_path: Path
) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "runs/mine")[0] == 0
    refused(vit_edge("quantize", "--qat", "--model", "runs/mine/student"), "does not say which", "add --data SPEC")
    code, out, err = vit_edge("quantize", "--qat", "--set", "int8.qat.epochs=1", "--device", "cpu")
    assert code == 0, err
    assert "int8 model: runs/mine/int8" in out
    assert "quantization-aware training" in err
    assert len((tmp_path / "runs/mine/int8/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    code, _, err = vit_edge("export", "--target", "onnx", "--device", "cpu")
    assert code == 0, err
    assert "int8: running" not in err


def test_other_data_than_the_runs_own_is_refused(vit_edge: Cli) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL)[0] == 0
    refused(vit_edge("quantize", "--data", "fashion-mnist"), "was made from digits", "leave --data out")


def test_a_folder_with_a_broken_image(vit_edge: Cli, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(40):
            Image.new("RGB", (40, 30), (6 * i, 40 * len(name) % 255, 90)).save(tmp_path / "pets" / name / f"{i}.png")
    (tmp_path / "pets" / "cat" / "7.png").write_bytes(b"not an image")
    arguments = ["train", "--model", "vit_ti16", "--data", "folder:pets", *SMALL]
    refused(vit_edge(*arguments), "7.png", "--skip-bad-images")
    code, _, err = vit_edge(*arguments, "--skip-bad-images")
    assert code == 0, err
    assert "left out 1 unreadable" in err


def test_a_run_folder_that_is_a_file_is_refused(vit_edge: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    refused(vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "taken"), "taken", "a path that can be")
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


def test_a_failed_command_is_not_the_newest_run(vit_edge: Cli) -> None:
    assert vit_edge("train", "--model", "vit_ti16", *SMALL, "--out", "runs/good")[0] == 0
    assert vit_edge("train", "--model", "vit_ti16", "--data", "folder:nope")[0] == 2
    code, out, _ = vit_edge("reference")
    assert code == 0
    assert "runs/good/reference" in out


def test_a_missing_runtime_names_its_pip_command(tmp_path: Path) -> None:
    code = "import sys; sys.modules['openvino'] = None; sys.argv = ['vit-edge', *sys.argv[1:]]\nfrom vit_edge.cli.main import main; main()"
    arguments = ["train", "--model", "vit_ti16", *SMALL]
    assert subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, check=False).returncode == 0
    ended = subprocess.run(
        [sys.executable, "-c", code, "export", "--target", "openvino"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    refused((ended.returncode, ended.stdout, ended.stderr), "openvino", 'pip install "vit-edge[openvino]"')


def test_ctrl_c_says_how_to_continue_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vit_edge", "train", "--model", "vit_ti16", "--epochs", "500", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "vit_ti16-digits" / "student.partial" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-2:] == ["interrupted: nothing is half-written", "continue with the same command"]
    assert not (tmp_path / "runs" / "vit_ti16-digits" / "student").exists()


def test_help_and_lists_need_no_torch(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    code = "import sys\nfor name in ('torch', 'timm', 'torchvision', 'onnx'): sys.modules[name] = None\nsys.argv = ['vit-edge', *sys.argv[1:]]\nfrom vit_edge.cli.main import main; main()"
    for arguments in (["--help"], ["pipelines"], ["targets"], ["doctor"], ["run", "--help"]):
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout


def test_models_lists_ours_and_timms(vit_edge: Cli) -> None:
    code, out, _ = vit_edge("models", "vit_ti16")
    assert code == 0
    assert "vit_ti16" in out
    assert "mobilenetv3_small_050" in vit_edge("models", "mobilenetv3_small")[1]
