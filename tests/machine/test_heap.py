"""Which blocks of the heap are given back, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from shoal.machine.heap import MOST_BYTES, map_blocks_from

def held():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def block(mib):
    at = libc.malloc(mib << 20)
    ctypes.memset(at, 1, mib << 20)
    return at

libc.free(block(30))  # glibc learns to keep what is smaller
for words in sys.argv[1:]:
    map_blocks_from(eval(words.split()[0]), for_good=words.endswith("for good"))
before = held()
many = [block(8) for _ in range(16)]
last = block(1)
for at in many:
    libc.free(at)
print(held() - before)
"""


def stays(*calls: str, **environ: str) -> int:
    """MiB that stay of 128, freed below a block that is held."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *calls],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_large_blocks_are_given_back_where_that_is_asked() -> None:
    assert stays() > 100, "as it comes"
    assert stays("2**22") < 20
    assert stays("2**22", "MOST_BYTES") > 100
    assert stays("2**22 for good", "MOST_BYTES") < 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
@pytest.mark.parametrize(
    "variable",
    [
        {"MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"},
    ],
    ids=str,
)
def test_what_the_user_says_of_the_heap_holds(variable: dict[str, str]) -> None:
    assert stays("2**22", **variable) > 100
