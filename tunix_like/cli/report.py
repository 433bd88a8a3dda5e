"""The commands `report`, which writes an HTML report of runs, and `replay`, which recomputes a skipped update."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunix_like.cli.common import setup_jax
from tunix_like.errors import UserError


def report(arguments: argparse.Namespace) -> None:
    """Writes the report of one or several runs and, with `--png`, its figures."""
    if (arguments.gradients is not None) != arguments.run_code:
        raise UserError(
            "--gradients and --run-code must be given together: gradients are measured with the reward functions and "
            "other code that the configuration of a run names, so give them only for runs that you trust."
        )
    if arguments.run_code:
        setup_jax()
    from tunix_like.report.page import write

    write(arguments.runs, arguments.out, arguments.png, arguments.gradients)


def replay(arguments: argparse.Namespace) -> None:
    """Prints which completions make a skipped optimizer update non-finite."""
    setup_jax()
    from tunix_like.report.replay import print_report

    print_report(Path(arguments.file), arguments.overrides)
