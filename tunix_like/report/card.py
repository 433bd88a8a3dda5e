"""Writes the card of an exported model from its run: training, data, settings, pass@k with intervals, a curve."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import tunix_like
from tunix_like.config.load import as_dict, flat
from tunix_like.config.schema import Config
from tunix_like.report.contents import curves
from tunix_like.report.figures import draw
from tunix_like.report.reading import read_runs
from tunix_like.runtime import console
from tunix_like.storage import metrics

CARD, CURVE = "README.md", "curve.png"

_PRIVATE = (
    "training.output_dir",
    "training.loggers",
    "rollout.urls",
    "rollout.weights_folder",
    "environment.arguments.url",
    "mesh.",
    "eval.",
)
"""Beginnings of keys that say nothing about the model, or name places."""


def card_files(
    run: Path, step: int, config: Config, base: str | None, adapter: bool, license: str | None
) -> dict[str, bytes]:
    """Returns the files of a card by name: the text, and the curve of the held-out pass rate or of the reward.

    Args:
      run: the run folder.
      step: the step of the exported checkpoint.
      base: the hub id of the model that the run started from; None if it is a folder, or if there is none.
      adapter: whether only the adapters are exported.
      license: its id on the hub; None: to be chosen.
    """
    found = read_runs([run]) if metrics.rows(run) else []
    shown = [curve for curve in curves(found) if curve.key in ("eval/pass@1", "train/rewards/mean")][-1:]
    files = {}
    if shown:
        buffer = io.BytesIO()
        draw(found, shown[0]).savefig(buffer, format="png")
        files[CURVE] = buffer.getvalue()
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["tunix_like"]}
    head["tags"] += ["reinforcement-learning", str(config.algorithm.advantage_estimator)]
    head |= {} if base is None else {"base_model": base}
    head |= {"datasets": [config.data.path]} if config.data.name == "hub" else {}
    head |= {"license": "other", "license_name": "to-be-chosen"} if license is None else {"license": license}
    title = run.resolve().name
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {title}",
        f"Trained with tunix_like {tunix_like.__version__}: "
        f"`{config.algorithm.advantage_estimator}`, {step} steps of {config.data.batch_size} prompts with "
        f"{config.algorithm.num_generations} completions each, on the data `{config.data.name}`"
        + (f", from {base}" if base else "")
        + (". The licence is that of the base model and of the data: choose it." if license is None else "."),
        *_results(run, step),
        *([f"![{shown[0].title}]({CURVE})"] if shown else []),
        "## Settings that differ from the defaults\n\n| key | value |\n|---|---|\n" + _settings(config),
    ]
    return files | {CARD: ("\n\n".join(parts) + "\n").encode()}


def _results(run: Path, step: int) -> list[str]:
    """Returns the table of the first evaluation and of the last one up to the exported step."""
    rows = {row["step"]: row for row in metrics.rows(run) if row.get("step", step + 1) <= step and _is_evaluated(row)}
    if not rows:
        return []
    ends = sorted({min(rows), max(rows)})
    cells = [console.evaluation_cells(rows[end]) for end in ends]
    names = [name for name in cells[-1] if "@" in name]
    lines = ["| " + " | ".join(["held out", *(f"step {end}" for end in ends)]) + " |", "|---" * (len(ends) + 1) + "|"]
    lines += ["| " + " | ".join([name, *(each.get(name, "") for each in cells)]) + " |" for name in names]
    return ["## Evaluation\n\nWith 95 % intervals over problems.\n\n" + "\n".join(lines)]


def _is_evaluated(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/pass@") for name in row)


def _settings(config: Config) -> str:
    defaults, given = dict(flat(as_dict(Config()))), dict(flat(as_dict(config)))
    for entry in given.get("rewards.functions") or ():
        entry.pop("url", None)  # of a server
    changed = {
        key: os.path.basename(value.rstrip("/")) if isinstance(value, str) and value.startswith(("/", "~")) else value
        for key, value in given.items()
        if value != defaults.get(key) and not key.startswith(_PRIVATE)
    }
    return "\n".join(f"| `{key}` | `{str(value).replace('|', chr(92) + '|')}` |" for key, value in changed.items())
