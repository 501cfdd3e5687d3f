"""Freed memory that stays with the process, and goes back in the end."""

import platform
import subprocess
import sys

import pytest

from vit_edge import memory

MEASURE = """
import numpy as np
from vit_edge import memory

def held_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def work():
    return float(sum(np.ones(2**24, np.float32)[::4096].sum() for _ in range(3)))

work()
start = held_mb()
with memory.kept():
    with memory.kept():
        work()
    inside = held_mb() - start
after = held_mb() - start
print(inside, after)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_what_is_freed_stays_until_the_last_one_closes() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    inside, after = map(float, done.stdout.split())
    assert inside > 50
    assert after < 10


def test_a_failure_inside_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), memory.kept():
        raise ZeroDivisionError
    with memory.kept():
        pass
