"""The command `replay`: recomputes an optimizer update that was skipped because it was non-finite."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunix_like.cli.common import setup_jax


def replay(arguments: argparse.Namespace) -> None:
    """Recomputes a skipped optimizer update and prints which completions make the update non-finite."""
    setup_jax()
    from tunix_like.report.replay import print_report

    print_report(Path(arguments.file), arguments.overrides)
