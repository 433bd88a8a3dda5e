"""The command `replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunix_like.cli.common import setup_jax


def replay(arguments: argparse.Namespace) -> None:
    """Computes a skipped update again and prints which completions are at fault."""
    setup_jax()
    from tunix_like.report.replay import print_report

    print_report(Path(arguments.file), arguments.overrides)
