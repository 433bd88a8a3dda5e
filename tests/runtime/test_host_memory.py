"""Tests that freed memory of the host is returned to the system."""

import ctypes
import platform

import pytest

from tests.process import resident_bytes
from tunix_like.runtime.host_memory import return_freed_memory


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
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 100e6
    library.free(blocks[-1])
