"""The GitHub action's own shell steps, run as a runner does: bash, a step summary, outputs and an exit code."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import missing

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
INSTALL, GATE = ACTION["runs"]["steps"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


class Runner:
    """What GitHub's runner gives to a composite action's steps."""

    def __init__(self, temporary: Path):
        self.temporary, self.summary, self.output = temporary, temporary / "summary.md", temporary / "output"

    def run(self, step: dict[str, Any], **inputs: object) -> subprocess.CompletedProcess[str]:
        values = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        values |= {name.replace("_", "-"): str(value) for name, value in inputs.items()}
        context = {f"inputs.{name}": value for name, value in values.items()}
        context |= {"github.action_path": str(ROOT), "runner.temp": str(self.temporary)}
        given = {
            key: re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: context[found[1]], text)
            for key, text in step["env"].items()
        }
        self.summary.unlink(missing_ok=True)
        self.output.unlink(missing_ok=True)
        given |= {"GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_OUTPUT": str(self.output)}
        script = self.temporary / "step.sh"
        script.write_text(step["run"])
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        return subprocess.run(command, env=os.environ | given, cwd=self.temporary, capture_output=True, text=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A runner on which the action has been installed, as its first step does it."""
    found = Runner(tmp_path_factory.mktemp("runner"))
    done = found.run(INSTALL, runtime="onnxruntime")
    if done.returncode:
        missing("onnxruntime", f"pip cannot install here: {done.stderr[-200:]}")
    return found


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        ("--max-drop 5 --min-relative-top1 0.9", 0, "pass"),
        ("--max-drop 5\n--min-relative-top1 0.9\n--max-p90-ms 0.000001", 1, "fail"),
        ("--max-drop 0.5", 3, "undecided"),
    ],
)
def test_a_verdict_is_the_exit_code_the_output_and_the_summary(
    runner: Runner, ort_bundle: Path, arguments: str, code: int, verdict: str
) -> None:
    done = runner.run(GATE, bundle=ort_bundle, arguments=arguments)
    assert done.returncode == code, done.stderr
    assert runner.output.read_text() == f"verdict={verdict}\n"
    assert runner.summary.read_text().startswith(f"# tiny on onnxruntime: {verdict}\n")
    reports = runner.temporary / ACTION["inputs"]["reports"]["default"]
    assert {path.name for path in reports.iterdir()} == {
        f"gate.{kind}" for kind in ("json", "xml", "md", "html", "log")
    }


def test_a_gate_that_cannot_run_says_why_in_the_summary(runner: Runner, tmp_path: Path) -> None:
    done = runner.run(GATE, bundle=tmp_path / "a bundle; exit 0", arguments="--max-drop 5")
    assert done.returncode == 2
    assert runner.output.read_text() == "verdict=error\n"
    assert "    error: " in runner.summary.read_text()
    assert "    fix: " in runner.summary.read_text()


def test_inputs_reach_the_shell_as_variables_only() -> None:
    for step in (INSTALL, GATE):
        assert "${{" not in step["run"], "what an input holds would be run"


def test_the_readmes_step_gives_what_the_action_takes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [step] = yaml.safe_load(re.findall(r"```yaml\n(- uses.*?)```", readme, flags=re.DOTALL)[0])
    assert set(step["with"]) <= set(ACTION["inputs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid_and_use_the_action_as_it_is(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["name"]
    assert set(workflow) <= {"name", True, "permissions", "jobs"}, "`on` is read as true"
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if step.get("uses") == "./":
                required = {name for name, one in ACTION["inputs"].items() if one.get("required")}
                assert required <= set(step["with"]) <= set(ACTION["inputs"])
