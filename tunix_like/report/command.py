"""The command `report`: runs read, the page and the figures written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunix_like import console
from tunix_like.errors import UserError
from tunix_like.report.figures import save_figures
from tunix_like.report.page import build
from tunix_like.report.reading import read_runs


def write(folders: Sequence[str], out: str | None = None, png: str | None = None) -> None:
    """Writes the page to `out` (None: `report.html` in the first run's folder), and the figures into the folder `png`
    (None: nowhere).

    Raises:
      UserError: a folder is no run, a file of it cannot be read, or a place cannot be written.
    """
    runs = read_runs(folders)
    file = runs[0].folder / "report.html" if out is None else Path(out)
    page = build(runs)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {file}: cannot write it: {error.strerror or error}.") from error
    console.say(f"wrote {file} ({len(page) / 1e6:.1f} MB): one file, open it in a browser")
    if png is not None:
        written = save_figures(runs, Path(png))
        console.say(f"wrote {len(written)} figures to {png}: {', '.join(path.name for path in written)}")
