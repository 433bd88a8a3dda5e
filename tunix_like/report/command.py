"""Implements the command `report`: reads runs, and writes the page and the figures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_like.errors import UserError
from tunix_like.report.figures import save_figures
from tunix_like.report.page import build
from tunix_like.report.reading import Run, read_runs
from tunix_like.runtime import console, progress

if TYPE_CHECKING:
    from tunix_like.report.gradients import Gradients

_TITLE = "<title>tunix-like report</title>"
"""Text near the beginning of every report (from `static/page.html`), by which a file is recognised as a report."""


def write(folders: Sequence[str], out: str | None, png: str | None, batches: int | None) -> None:
    """Writes the page and the figures of runs.

    Args:
      folders: run folders.
      out: file of the page; defaults to `report.html` in the first run's folder.
      png: folder of the figures; None writes no figures.
      batches: number of batches of prompts for which gradient norms are measured; None measures no gradient norms.

    Raises:
      UserError: `batches` is below 1, a folder is not a run, or a file cannot be read or written.
    """
    runs = read_runs(folders)
    file = runs[0].folder / "report.html" if out is None else Path(out)
    _check_out(file)
    gradients = [] if batches is None else _measure(runs, batches)
    page = build(runs, gradients)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise UserError(f"--out {file}: cannot write it: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    console.print_text(f"wrote {file} ({len(page) / 1e6:.1f} MB); open it in a browser")
    if png is not None:
        written = save_figures(runs, Path(png), gradients)
        console.print_text(f"wrote {len(written)} figures to {png}: {', '.join(path.name for path in written)}")


def _check_out(file: Path) -> None:
    """Raises UserError if `file` exists and is not a report, or if the folder of `file` does not exist."""
    if not file.absolute().parent.is_dir():
        raise UserError(f"--out {file}: the folder {file.parent} does not exist; create it, or give another path.")
    if not file.exists():
        return
    if file.is_dir():
        raise UserError(f"--out {file} is a folder; give a file in it, e.g. {file / 'report.html'}.")
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            is_report = file.stat().st_size == 0 or _TITLE in opened.read(4096)
    except OSError as error:
        raise UserError(f"--out {file}: cannot be read: {error.strerror or error}.") from error
    if not is_report:
        raise UserError(f"--out {file}: the file exists and is not a report; give another name, or delete it.")


def _measure(runs: Sequence[Run], batches: int) -> list[Gradients]:
    if batches < 1:
        raise UserError(f"--gradients {batches}: give a number of batches of prompts, at least 1.")
    from tunix_like.report.gradients import measure

    out = []
    for run in runs:
        with progress.task(f"gradients of {run.name}", batches * int(run.config.get("data.batch_size", 1))) as tick:
            out.append(measure(run.folder, batches, tick))
    return out
