"""A fresh python, for what depends on how a process begins: the number of devices, the memory it has held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGV` in `cwd` to its end, with this repository in front of what is installed."""
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
