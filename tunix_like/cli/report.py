"""The command `report`: writes an HTML report of runs."""

from __future__ import annotations

import argparse

from tunix_like.cli.common import setup_jax


def report(arguments: argparse.Namespace) -> None:
    """Writes the report of one or several runs and, with `--png`, its figures."""
    if arguments.gradients is not None:
        setup_jax()
    from tunix_like.report.command import write

    write(arguments.runs, arguments.out, arguments.png, arguments.gradients)
