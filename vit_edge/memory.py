"""Memory of large tensors, kept by the process instead of given back and taken up anew, page by page, for the next one."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# mallopt's parameters (malloc.h), and what glibc's own rule ends at where large blocks are freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
USUAL = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}
KEPT = {M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: (1 << 31) - 1}

_open = 0


@contextmanager
def kept() -> Iterator[None]:
    """While it is open, glibc keeps what is freed; at the end all goes back. Other systems' allocators are left alone.

    For training and evaluating on a CPU, never where a runtime is timed: it would run as it does nowhere else.
    """
    global _open
    _open += 1
    _set(KEPT)
    try:
        yield
    finally:
        _open -= 1
        if not _open:
            _set(USUAL)
            if (libc := _glibc()) is not None:
                libc.malloc_trim(0)


def _set(values: dict[int, int]) -> None:
    if (libc := _glibc()) is not None:
        for parameter, value in values.items():
            libc.mallopt(parameter, value)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
