"""The command `replay`: recomputes a skipped update."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunix_like.cli.common import setup_jax


def replay(arguments: argparse.Namespace) -> None:
    """Recomputes a skipped update and prints which completions make it non-finite."""
    setup_jax()
    from tunix_like.report.replay import print_report

    print_report(Path(arguments.file), arguments.overrides)
