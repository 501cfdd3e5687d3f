"""What this machine is, as far as its numbers depend on it."""

import os
import platform
from pathlib import Path
from typing import Any

from vit_edge.store import processor_name
from vit_edge.target import Target

# What int8 and low precision run on: x86 flags and ARM features as /proc/cpuinfo spells them.
INSTRUCTION_SETS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "AVX-VNNI", "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16", "amx_int8": "AMX int8", "amx_bf16": "AMX bf16",
    "asimddp": "dot product", "i8mm": "i8mm", "bf16": "bf16", "asimdhp": "fp16", "sve": "SVE",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, cores, instruction sets that matter for int8, memory and operating system."""
    import psutil  # takes long to import

    return {
        "processor": processor_name(),
        "physical_cores": physical_cores(),
        "instruction_sets": instruction_sets(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
    }


def physical_cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def threads(target: Target) -> int:
    """Threads of one inference on the target: its own number, or every physical core."""
    return target.threads or physical_cores()


def instruction_sets() -> list[str]:
    """Names of the CPU's instruction sets for low precision; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    flags = {flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    return [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held so far."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
