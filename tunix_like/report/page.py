"""Writes the report page: one HTML file that contains its style, script and data and needs no network access.

The data is embedded as escaped JSON in a block that is not a script, so no text can end the block. The script of the
page inserts the data as text nodes only. A content security policy forbids all connections. It also forbids all scripts
except the script of the page, which it identifies by a hash.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.resources
import json
import logging
import math
import os
import tempfile
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.errors import UserError
from tunix_like.report import contents
from tunix_like.report.figures import save_figures
from tunix_like.report.listing import run_folders
from tunix_like.report.reading import Run, Table, read_runs
from tunix_like.report.rollouts import MOST_BYTES, read_kept
from tunix_like.runtime import console, progress, trace
from tunix_like.runtime.atomic import write_atomically
from tunix_like.runtime.input_files import path_below
from tunix_like.runtime.object_storage import download, is_remote, names_below, upload_file
from tunix_like.runtime.visible import visible
from tunix_like.storage.metrics import FILE, is_number
from tunix_like.storage.mirror import checkpoints_among, latest
from tunix_like.tasks.results import PASS_RATES

if TYPE_CHECKING:
    from tunix_like.report.gradients import Gradients

logger = logging.getLogger("tunix_like")

SCRIPTS = ("charts.js", "sections.js", "rollouts.js", "main.js")
"""Files that are concatenated, in this order, to the script of the page."""


_TITLE = "<title>tunix-like report</title>"
"""Text near the beginning of every report (from `static/page.html`), by which a file is recognised as a report."""


def write(folders: Sequence[str], out: str | None, png: str | None, batches: int | None) -> None:
    """Writes the page (to `out` or the first folder) and, into the folder `png`, the figures of runs. `batches`:
    number of batches of prompts whose gradient norms are measured."""
    with contextlib.ExitStack() as copies:
        places = [copies.enter_context(_local(folder, batches is not None)).resolve() for folder in folders]
        runs = read_runs([run for place in places for run in _runs_below(place)])
        file = places[0] / "report.html" if out is None else Path(out)
        _check_out(file)
        gradients = [] if batches is None else _measure(runs, batches)
        size = _write(file, build(runs, gradients, file.parent))
        shown = str(file)
        if out is None and is_remote(folders[0]):
            shown = f"{folders[0].rstrip('/')}/report.html"
            upload_file(file, shown)
        console.print_text(f"wrote {shown} ({size / 1e6:.1f} MB); open it in a browser")
        if png is not None:
            written = save_figures(runs, Path(png), gradients)
            console.print_text(f"wrote {len(written)} figures to {png}: {', '.join(path.name for path in written)}")


def _runs_below(place: Path) -> list[Path]:
    """Returns the runs in a folder, or the folder. Of several runs, those that never started are left out."""
    found = run_folders(place) or [place]
    started = [run for run in found if (run / FILE).exists()]
    if not started:
        return found
    for run in sorted({*found} - {*started}):
        logger.warning("%s is left out: it has no %s", run, FILE)
    return started


@contextlib.contextmanager
def _local(folder: str, with_checkpoint: bool) -> Iterator[Path]:
    """Yields a run folder, or a temporary copy of what a report reads if it is in object storage."""
    if not is_remote(folder):
        yield Path(folder)
        return
    wanted = ["config.yaml", FILE, "rollouts/*"]
    if with_checkpoint:
        wanted += ["model/*", f"{latest(checkpoints_among(names_below(folder, 'report'))[0])}/*"]
    with tempfile.TemporaryDirectory() as temporary:
        copy = path_below(Path(temporary), folder.rstrip("/").replace("://", "/"), "report")  # runs are named by it
        download(folder, "report", wanted, copy)
        yield copy


def _write(file: Path, page: str) -> int:
    """Writes the page and returns its size."""
    try:
        write_atomically(file, page)
    except OSError as error:
        raise UserError(f"--out {file}: cannot write it: {error.strerror or error}.") from error
    return len(page)


def _check_out(file: Path) -> None:
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


def build(runs: Sequence[Run], gradients: Sequence[Gradients], folder: Path) -> str:
    """Builds the report page for a file in `folder`. `gradients` has one entry per run, or is empty."""
    files = importlib.resources.files("tunix_like.report")
    read = lambda name: files.joinpath("static", name).read_text(encoding="utf-8")  # noqa: E731
    script = '"use strict";\n(() => {\n' + "\n".join(map(read, SCRIPTS)) + "\n})();"
    style = read("page.css")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": embedded(page_data(runs, gradients, folder))}
    before, *rest = read("page.html").split("{{")  # one pass, so that "{{" in the inserted data is not replaced
    return before + "".join(parts[name] + text for name, text in (piece.split("}}", 1) for piece in rest))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(data: Any) -> str:
    """Encodes data as ASCII JSON for an HTML block. `<`, `>` and `&` are escaped, so that no text in the data can end
    the block or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[Run], gradients: Sequence[Gradients], folder: Path) -> dict[str, Any]:
    """Returns the data that the script of the page shows. The page is a file in `folder`."""
    data = {
        "runs": [_run(run, MOST_BYTES // len(runs), folder) for run in runs],
        "curves": [curve._asdict() for curve in contents.curves(runs)],
        "others": [curve._asdict() for curve in contents.others(runs)],
        "gradients": [_finite(measured)._asdict() for measured in gradients],
        "missing": contents.missing(runs),
        "summary": contents.summary(runs),
        "ends": contents.ENDS,
        "differing": contents.differing(runs) if len(runs) > 1 else [],
        "bins": PASS_RATES,
        "parts": list(contents.TIME_PARTS),
    }
    return {name: _visible(value) for name, value in data.items()}


def _visible(value: Any) -> Any:
    """Escapes all texts and keys. Bidirectional control characters would otherwise reorder the surrounding text."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, list | tuple) else value


def _finite(gradients: Gradients) -> Gradients:
    """Removes the prompts with a non-finite gradient norm, which cannot be drawn."""
    columns = zip(gradients.rates, gradients.bins, gradients.norms, strict=True)
    rows = [row for row in columns if math.isfinite(row[2])]
    rates, bins, norms = map(list, zip(*rows, strict=True)) if rows else ([], [], [])
    return gradients._replace(rates=rates, bins=bins, norms=norms)


def _run(run: Run, most_bytes: int, folder: Path) -> dict[str, Any]:
    traced = run.folder / trace.FILE
    return {
        "name": run.name,
        "facts": contents.facts(run),
        "config": {key: contents.text_of(run, key) for key in run.config},
        "threshold": threshold if is_number(threshold := run.config.get("rewards.success_threshold")) else 1.0,
        "rl": _phase(run.rl),
        "sft": _phase(run.sft),
        "histograms": run.rl.histograms,
        "rollouts": read_kept(run.folder, most_bytes),
        "trace": urllib.parse.quote(os.path.relpath(traced, folder.resolve())) if traced.exists() else None,
    }


def _phase(table: Table) -> dict[str, Any]:
    columns = {
        name: [None if value is None else float(f"{value:.5g}") for value in values]
        for name, values in table.columns.items()
    }
    return {"steps": table.steps, "columns": columns, "left_out": table.left_out}
