"""The command `report`: runs read, the page and the figures written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_like import console, progress
from tunix_like.errors import UserError
from tunix_like.report.figures import save_figures
from tunix_like.report.page import build
from tunix_like.report.reading import Run, read_runs

if TYPE_CHECKING:
    from tunix_like.report.gradients import Gradients


def write(folders: Sequence[str], out: str | None, png: str | None, batches: int | None) -> None:
    """Writes the page to `out` (None: `report.html` in the first run's folder), and the figures into the folder `png`
    (None: nowhere), with the gradient norms of so many `batches` of prompts (None: of none).

    Raises:
      UserError: `batches` is below 1, a folder is no run, a file of it cannot be read, or a place cannot be written.
    """
    runs = read_runs(folders)
    file = runs[0].folder / "report.html" if out is None else Path(out)
    gradients = [] if batches is None else _measure(runs, batches)
    page = build(runs, gradients)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {file}: cannot write it: {error.strerror or error}.") from error
    console.say(f"wrote {file} ({len(page) / 1e6:.1f} MB): one file, open it in a browser")
    if png is not None:
        written = save_figures(runs, Path(png), gradients)
        console.say(f"wrote {len(written)} figures to {png}: {', '.join(path.name for path in written)}")


def _measure(runs: Sequence[Run], batches: int) -> list[Gradients]:
    if batches < 1:
        raise UserError(f"--gradients {batches}: give a number of batches of prompts, at least 1.")
    from tunix_like.report.gradients import measure

    out = []
    for run in runs:
        with progress.task(f"gradients of {run.name}", batches * int(run.config.get("data.batch_size", 1))) as tick:
            out.append(measure(run.folder, batches, tick))
    return out
