"""What a bundle may have a runtime open, and what it may ask of it: one known form of file, options that touch no file."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vit_edge.errors import UserError
from vit_edge.safety import onnx_file, openvino_file

# Domains of operators that come with the runtime.
DOMAINS = {
    "onnxruntime": onnx_file.STANDARD | {"com.microsoft"}, "openvino": onnx_file.STANDARD, "tensorrt": onnx_file.STANDARD,
}  # fmt: skip
# Options that change speed or rounding alone. Others name files, load libraries or write caches.
OPTIONS = {
    "onnxruntime": {
        "optimization.disable_specified_optimizers", "optimization.minimal_build_optimizations",
        "session.disable_prepacking", "session.disable_quant_qdq", "session.disable_double_qdq_remover",
        "session.enable_quant_qdq_cleanup", "session.qdqisint8allowed", "session.set_denormal_as_zero",
        "session.intra_op.allow_spinning", "session.inter_op.allow_spinning", "session.dynamic_block_base",
        "session.disable_aot_function_inlining", "mlas.enable_gemm_fastmath_arm64_bfloat16",
    },
    "openvino": {
        "PERFORMANCE_HINT", "EXECUTION_MODE_HINT", "INFERENCE_PRECISION_HINT", "SCHEDULING_CORE_TYPE",
        "ENABLE_HYPER_THREADING", "ENABLE_CPU_PINNING", "CPU_DENORMALS_OPTIMIZATION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    },
    "tensorrt": {"attention"},
}  # fmt: skip


def check_options(runtime: str, options: Mapping[str, str]) -> None:
    """UserError for a session option that does more than change speed or rounding."""
    for name in options:
        if name not in OPTIONS[runtime]:
            known = ", ".join(sorted(OPTIONS[runtime])) or "none"
            raise UserError(f"a bundle may not set {runtime}'s option {name!r}", f"leave it out; it may set: {known}")


def check_artefact(folder: Path, runtime: str, artefact: Sequence[str], files: Collection[str]) -> None:
    """Refuses an artefact in another form than the runtime's own, and what its file would load or run.

    artefact: paths in the bundle, the one to open first; files: all of the bundle's. An engine is never opened: it is
    executable, and is built on the device from ONNX.
    """
    first, *others = artefact
    if runtime == "openvino":
        _check_form(folder / first, first.endswith(".xml") and others == [f"{first[:-4]}.bin"], "an .xml and its .bin")
        openvino_file.check(folder / first, folder / others[0])
    else:
        _check_form(folder / first, first.endswith(".onnx"), "an .onnx file")
        onnx_file.check(folder / first, first, DOMAINS[runtime], files)


def check_onnx(path: Path, runtime: str) -> None:
    """Refuses an ONNX file that a runtime's bundle may not hold: foreign operators, weights in another file."""
    onnx_file.check(path, path.name, DOMAINS[runtime], ())


def _check_form(path: Path, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{path} is not what the runtime opens: expected {expected}", "export again for this target")
