"""The command `report`: runs read, the page and the figures written."""

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
"""By which a page written before is known (`static/page.html`)."""


def write(folders: Sequence[str], out: str | None, png: str | None, batches: int | None) -> None:
    """Writes the page to `out` (None: `report.html` in the first run's folder), and the figures into the folder `png`
    (None: nowhere), with the gradient norms of so many `batches` of prompts (None: of none).

    Raises:
      UserError: `batches` is below 1, a folder is no run, a file of it cannot be read, or a place cannot be written.
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
    console.say(f"wrote {file} ({len(page) / 1e6:.1f} MB): one file, open it in a browser")
    if png is not None:
        written = save_figures(runs, Path(png), gradients)
        console.say(f"wrote {len(written)} figures to {png}: {', '.join(path.name for path in written)}")


def _check_out(file: Path) -> None:
    """Raises UserError where the page would take the place of something other than a page written before, or where
    there is no folder for it."""
    if not file.absolute().parent.is_dir():
        raise UserError(f"--out {file}: cannot write it: {file.parent} is no folder; make it, or give another place.")
    if not file.exists():
        return
    if file.is_dir():
        raise UserError(f"--out {file} is a folder; give a file in it, e.g. {file / 'report.html'}.")
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            ours = file.stat().st_size == 0 or _TITLE in opened.read(4096)
    except OSError as error:
        raise UserError(f"--out {file}: cannot be read: {error.strerror or error}.") from error
    if not ours:
        raise UserError(f"--out {file}: is there already and no report; give another name, or delete it.")


def _measure(runs: Sequence[Run], batches: int) -> list[Gradients]:
    if batches < 1:
        raise UserError(f"--gradients {batches}: give a number of batches of prompts, at least 1.")
    from tunix_like.report.gradients import measure

    out = []
    for run in runs:
        with progress.task(f"gradients of {run.name}", batches * int(run.config.get("data.batch_size", 1))) as tick:
            out.append(measure(run.folder, batches, tick))
    return out
