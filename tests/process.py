"""Runs a new Python process, for tests that depend on its start: the number of devices, the peak memory. Also measures
the memory of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """The memory of this process; 0 where the system does not say."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else 0


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGV` in `cwd` until it ends, with this repository before the installed packages on the path."""
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
