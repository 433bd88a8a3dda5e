"""Tests that freed memory of the host is returned to the system."""

import ctypes
import platform
from pathlib import Path

import pytest

from tunix_like.runtime.host_memory import return_freed_memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_returned():
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    size = 100_000  # below the size from which glibc maps each block alone
    blocks = [library.malloc(size) for _ in range(2_000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps the C library from shrinking its heap by itself
        library.free(block)
    before = resident()
    return_freed_memory()
    assert before - resident() > 100e6
    library.free(blocks[-1])
