"""The device side and the base must run where there is no torch: their imports are walked, direct and indirect."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vit_edge"
NEVER = {
    "torch",
    "torchvision",
    "timm",
    "torchao",
    "accelerate",
    "safetensors",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "sklearn",
}
DEVICE_SIDE = [
    "runtimes",
    "gate",
    "accuracy",
    "latency",
    "regression",
    "ledger",
    "report",
    "stages.gate",
    "stages.artefacts",
    "stages.timing",
    "stages.bench",
    "stages.predict",
    "stages.snippet",
    "cli.device",
]
BASE = [
    "errors", "settings", "recipe", "target", "shipped", "store", "preprocess", "pixels", "yaml_text", "evaluation", "metrics", "bundle",
    "safety", "progress",
]  # fmt: skip
# Beside the standard library, what `pip install vit-edge` brings; and the extras, each in its own modules alone.
ALLOWED = {"jinja2", "numpy", "psutil", "pydantic", "rich", "typer", "typing_extensions"}
NOT_FOR_A_GATE = {
    "PIL": {"pixels", "preprocess"},
    "yaml": {"yaml_text", "recipe"},
    "filelock": {"store", "runtimes.engine_cache"},
    "cryptography": {"safety.signature"},
}
RUNTIME_LIBRARIES = {"onnxruntime", "openvino", "tensorrt", "cuda"}


def modules_of(name: str) -> list[str]:
    path = PACKAGE / name.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return [".".join(("vit_edge", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files]


def imports_of(module: str) -> set[str]:
    """Absolute names that a module of ours imports, at its head or inside functions."""
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = PACKAGE.parent / module.replace(".", "/") / "__init__.py"
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_ours(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return name.startswith("vit_edge") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def reachable(start: str) -> dict[str, str]:
    """Every module that `start` leads to → the module that imports it."""
    found, waiting = {start: start}, [start]
    while waiting:
        module = waiting.pop()
        for name in imports_of(module):
            if name not in found:
                found[name] = module
                if is_ours(name):
                    waiting.append(name)
    return found


@pytest.mark.parametrize("module", [m for name in (*DEVICE_SIDE, *BASE) for m in modules_of(name)])
def test_needs_nothing_of_the_training_side(module: str) -> None:
    for name, importer in reachable(module).items():
        assert name.partition(".")[0] not in NEVER, f"{importer} imports {name}, reached from {module}"


@pytest.mark.parametrize("module", [m for name in (*DEVICE_SIDE, *BASE) for m in modules_of(name)])
def test_imports_only_what_the_wheel_depends_on(module: str) -> None:
    import sys

    for name in imports_of(module):
        top = name.partition(".")[0]
        extra = module.removeprefix("vit_edge.") in NOT_FOR_A_GATE.get(top, ())
        assert extra or top in sys.stdlib_module_names | ALLOWED | RUNTIME_LIBRARIES | {"vit_edge"}, (
            f"{module} imports {name}"
        )


def test_each_runtime_library_is_used_in_one_module() -> None:
    for module in (m for name in (*DEVICE_SIDE, *BASE) for m in modules_of(name)):
        for library in RUNTIME_LIBRARIES & {name.partition(".")[0] for name in imports_of(module)}:
            assert module == f"vit_edge.runtimes.{library}"
