"""Returns freed memory of the host to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Returns memory that was freed to the system, where the C library can (glibc). It otherwise keeps what XLA's
    compiler used, which is about 1 GB for an update of SmolLM2-135M."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
