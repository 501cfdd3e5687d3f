"""What this machine is, as far as its numbers depend on it."""

import ctypes
import os
import platform
import time
from contextlib import suppress
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
X86, DOT_PRODUCTS = {"AVX2", "AVX-512"}, {"AVX-VNNI", "AVX-512 VNNI", "AMX int8"}


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


def int8_saturates() -> bool:
    """Whether int8 products are summed in 16 bits here, which eight-bit weights overflow: x86 without VNNI."""
    return bool(set(instruction_sets()) & X86) and not has_dot_products()


def has_dot_products() -> bool:
    """Whether x86 sums products of bytes in 32 bits at once."""
    return bool(set(instruction_sets()) & DOT_PRODUCTS)


def restart_peak_memory() -> int | None:
    """The memory that this process holds, from which its peak is counted anew; null where the system does not tell.

    What it has freed goes back to the system first: taken up again, it would not count.
    """
    with suppress(OSError, AttributeError):  # other libraries than glibc have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def peak_memory_since(start_bytes: int | None) -> int | None:
    """The most that this process has held beyond `start_bytes` since `restart_peak_memory` gave that."""
    peak_bytes = _status_bytes("VmHWM")
    return None if start_bytes is None or peak_bytes is None else max(0, peak_bytes - start_bytes)


def free_memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


class Load:
    """While the context is open: `elsewhere`, the share of all processors' time that other programs took."""

    elsewhere = 0.0

    def __enter__(self) -> "Load":
        self._start, self._others = time.perf_counter(), _others_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        self.elsewhere = min(1.0, max(0.0, (_others_seconds() - self._others) / seconds))


def _others_seconds() -> float:
    """Of all processors together since the machine started: spent on anything but this process."""
    import psutil

    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy - own.user - own.system)


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")]
    return found[0] if found else None


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held so far."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
