"""The printed programs, built and run by a compiler against the runtime alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import MakeBundle, missing, require
from tests.tiny_model import digits
from vit_edge.stages.predict import predict_images
from vit_edge.stages.snippet import Language, program

ONNXRUNTIME_HEADER = "onnxruntime_cxx_api.h"
LANGUAGES: tuple[Language, ...] = ("python", "cpp")
CLASSES = [f'"digit" \\{number}' for number in range(10)]  # what must be escaped


def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        missing("g++", "g++ is not installed")
    return found


def libraries(runtime: str, folder: Path) -> list[str]:
    """What the compiler needs to know of the runtime that pip installed. ONNX Runtime's brings no headers.

    folder: where a library may be given the name that programs look for.
    """
    package = Path(require(runtime, runtime).__file__).parent
    if runtime == "openvino":
        (library,) = (package / "libs").glob("libopenvino.so*")
        return [f"-I{package / 'include'}", str(library), f"-Wl,-rpath,{library.parent}"]
    given = os.environ.get("ONNXRUNTIME_INCLUDE")
    places = [*([Path(given)] if given else []), Path("/usr/include"), *Path("/usr/include").glob("onnxruntime*/**/")]
    headers = next((place for place in places if (place / ONNXRUNTIME_HEADER).is_file()), None)
    if headers is None:
        missing("onnxruntime-headers", f"{ONNXRUNTIME_HEADER} is not here: set ONNXRUNTIME_INCLUDE to its folder")
    (library,) = (package / "capi").glob("libonnxruntime.so*")
    (folder / "libonnxruntime.so.1").symlink_to(library)
    return [f"-I{headers}", str(library), f"-Wl,-rpath,{folder}"]


@pytest.mark.parametrize("dynamic_batch", [False, True])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_cpp_program_answers_as_predict_does(
    make_bundle: MakeBundle, tmp_path: Path, runtime: str, dynamic_batch: bool
) -> None:
    from PIL import Image

    command = [compiler(), "-std=c++17", "-O0", "-w", "main.cpp", *libraries(runtime, tmp_path), "-o", "main"]
    bundle = make_bundle(runtime, target_fields={"dynamic_batch": dynamic_batch}, classes=CLASSES)
    (tmp_path / "main.cpp").write_text(program(bundle, language="cpp"), encoding="utf-8")
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:2000]
    for number, pixels in enumerate(digits()[0][:3]):
        (tmp_path / f"{number}.raw").write_bytes(pixels.tobytes())
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    answers = predict_images(bundle, [tmp_path / f"{number}.png" for number in range(3)], 1)
    for number, answer in enumerate(answers):
        ran = subprocess.run(
            [tmp_path / "main", tmp_path / f"{number}.raw"], cwd=bundle, capture_output=True, text=True
        )
        assert ran.stdout == f"{next(iter(answer))}\n", ran.stderr
    (tmp_path / "short.raw").write_bytes(b"too short")
    assert subprocess.run([tmp_path / "main", tmp_path / "short.raw"], cwd=bundle, capture_output=True).returncode == 1


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_tensorrts_programs_are_whole(make_bundle: MakeBundle, dynamic_batch: bool) -> None:
    """They need a GPU to run: here Python's is compiled, and C++'s is held to what it must name."""
    require("tensorrt_rtx_bindings", "tensorrt")
    bundle = make_bundle("tensorrt", target_fields={"dynamic_batch": dynamic_batch, "compute_capabilities": ()})
    python, cpp = (program(bundle, language=language) for language in LANGUAGES)
    compile(python, "program", "exec")
    assert ("add_optimization_profile" in python) is ("setInputShape" in cpp) is dynamic_batch
    assert "trtexec --onnx=int8/model.onnx --stronglyTyped" in cpp
    assert cpp.count("{") == cpp.count("}")
