import struct
from pathlib import Path

import numpy as np
import pytest

from vit_edge.errors import UserError
from vit_edge.safety import arrays


def header(text: str, data: bytes = bytes(12)) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + data


@pytest.mark.parametrize(("dtype", "shape"), [(np.uint8, (2, 3, 3, 3)), (np.int64, (5,)), (np.float32, (4, 10))])
def test_reads_what_numpy_writes(tmp_path: Path, dtype: type, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for version in ((1, 0), (2, 0)):
        with (tmp_path / "a.npy").open("wb") as file:
            np.lib.format.write_array(file, array, version=version)
        found = arrays.mapped(tmp_path / "a.npy", dtype, (None, *shape[1:]), "fix")
        assert np.array_equal(found, array)
        assert not found.flags.writeable


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        header("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"),
        header("{'descr': '<f4', 'fortran_order': True, 'shape': (3,), }"),
        header("{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }", b""),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", bytes(13)),
        header("(" * 5000),
        b"PK\3\4" + bytes(100),
        b"\x80\x04cposix\nsystem\n",
    ],
)
def test_what_is_no_plain_array_of_that_size_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError):
        arrays.mapped(tmp_path / "a.npy", np.float32, (None,), "fix")
