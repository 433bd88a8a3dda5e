"""The page: one HTML file that holds its style, its script and its data, and asks the network for nothing.

Text of runs reaches the page as JSON in a block that is no script, escaped so that nothing in it ends the block, and
the script puts it into the page as text alone. A content security policy forbids every connection and every script
but the page's own, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.algorithms.pass_rates import PASS_RATES
from tunix_like.report import contents
from tunix_like.report.reading import Run, Table
from tunix_like.report.rollouts import MOST_BYTES, read_steps
from tunix_like.runtime.visible import visible

if TYPE_CHECKING:
    from tunix_like.report.gradients import Gradients

SCRIPTS = ("charts.js", "sections.js", "rollouts.js", "main.js")
"""Read in this order as one script."""


def build(runs: Sequence[Run], gradients: Sequence[Gradients] = ()) -> str:
    """The page of the runs, with what was measured of each one's gradients (nothing: it was not asked for). Raises
    UserError naming a file of completions that cannot be read."""
    files = importlib.resources.files("tunix_like.report")
    read = lambda name: files.joinpath("static", name).read_text(encoding="utf-8")  # noqa: E731
    script = '"use strict";\n(() => {\n' + "\n".join(map(read, SCRIPTS)) + "\n})();"
    style = read("page.css")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": embedded(page_data(runs, gradients))}
    before, *rest = read("page.html").split("{{")  # in one pass: what is put in is not looked through again
    return before + "".join(parts[name] + text for name, text in (piece.split("}}", 1) for piece in rest))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(data: Any) -> str:
    """JSON in ASCII without `<`, `>` and `&`, so that no text in it can end its block or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[Run], gradients: Sequence[Gradients] = ()) -> dict[str, Any]:
    """What the page's script draws. No text in it holds a character that does not print."""
    data = {
        "runs": [_run(run, MOST_BYTES // len(runs)) for run in runs],
        "curves": [curve._asdict() for curve in contents.curves(runs)],
        "others": [curve._asdict() for curve in contents.others(runs)],
        "gradients": [_finite(each)._asdict() for each in gradients],
        "missing": contents.missing(runs),
        "summary": contents.summary(runs),
        "ends": contents.ENDS,
        "differing": contents.differing(runs) if len(runs) > 1 else [],
        "bins": PASS_RATES,
    }
    return {name: _visible(value) for name, value in data.items()}


def _visible(value: Any) -> Any:
    """The same with `visible` for every text and key: a bidirectional control reorders the text around it."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_visible(key): _visible(each) for key, each in value.items()}
    return [_visible(each) for each in value] if isinstance(value, list | tuple) else value


def _finite(each: Gradients) -> Gradients:
    """Without the prompts whose gradient is no number, which no axis has a place for."""
    rows = [row for row in zip(each.rates, each.bins, each.norms, strict=True) if math.isfinite(row[2])]
    rates, bins, norms = map(list, zip(*rows, strict=True)) if rows else ([], [], [])
    return each._replace(rates=rates, bins=bins, norms=norms)


def _run(run: Run, most_bytes: int) -> dict[str, Any]:
    steps, left_out = read_steps(run.folder, most_bytes)
    return {
        "name": run.name,
        "facts": contents.facts(run),
        "config": {key: contents.shown(value) for key, value in run.config.items()},
        "threshold": run.config.get("rewards.success_threshold", 1.0),
        "rl": _phase(run.rl),
        "sft": _phase(run.sft),
        "histograms": run.rl.histograms,
        "rollouts": steps,
        "rollouts_left_out": left_out,
    }


def _phase(table: Table) -> dict[str, Any]:
    columns = {
        name: [None if value is None else float(f"{value:.5g}") for value in values]
        for name, values in table.columns.items()
    }
    return {"steps": table.steps, "columns": columns, "left_out": table.left_out}
