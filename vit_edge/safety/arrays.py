"""Arrays from outside: .npy files of the dtype and shape that are expected, and of exactly the size that these make.

numpy's own reader evaluates the header as Python and may meet a pickle; this one knows three types and one form.
"""

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_edge.errors import UserError

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096
TYPES: dict[str, type[np.generic]] = {"|u1": np.uint8, "<i8": np.int64, "<f4": np.float32}
HEADER = re.compile(
    rb"\{'descr': '([|<][a-z]\d)', 'fortran_order': False, 'shape': \(((?:\d{1,12}, ?)*(?:\d{1,12})?)\), \} *\n"
)


def mapped(path: Path, dtype: type[np.generic], shape: Sequence[int | None], fix: str) -> np.ndarray:
    """The array in `path`, memory-mapped and read-only.

    shape: what it must have; null stands for any number. Raises UserError for another type, shape or size.
    """
    found_dtype, found_shape, start = _header(path, fix)
    fits = len(found_shape) == len(shape) and all(
        size > 0 and expected in (None, size) for size, expected in zip(found_shape, shape, strict=True)
    )
    if found_dtype != dtype or not fits:
        asked = ", ".join("any" if size is None else str(size) for size in shape)
        raise UserError(
            f"{path} holds {np.dtype(found_dtype).name} {found_shape}, expected {np.dtype(dtype).name} ({asked})", fix
        )
    size_bytes = start + math.prod(found_shape) * np.dtype(dtype).itemsize
    if path.stat().st_size != size_bytes:
        raise UserError(f"{path} has {path.stat().st_size} bytes, its header promises {size_bytes}", fix)
    return np.memmap(path, dtype, "r", start, found_shape)


def _header(path: Path, fix: str) -> tuple[type[np.generic], tuple[int, ...], int]:
    """Type, shape, and the byte that the data begins at."""
    with path.open("rb") as file:
        start = file.read(12)
        length_bytes, form = (2, "<H") if start[6:7] == b"\x01" else (4, "<I")
        lead = 8 + length_bytes
        length = struct.unpack(form, start[8:lead])[0] if len(start) == 12 else 0
        file.seek(lead)
        found = HEADER.fullmatch(file.read(length)) if length <= MAX_HEADER_BYTES else None
    if not start.startswith(MAGIC) or found is None or found[1].decode() not in TYPES:
        raise UserError(f"{path} is no plain array of bytes, int64 or float32", fix)
    shape = tuple(int(size) for size in found[2].split(b",") if size.strip())
    return TYPES[found[1].decode()], shape, lead + length
