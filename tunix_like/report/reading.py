"""Reads a run folder: its config, the rows of `metrics.jsonl` as columns, and its histograms by pass rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.config.load import read_yaml
from tunix_like.config.shown import given
from tunix_like.errors import UserError
from tunix_like.storage import metrics
from tunix_like.storage.metrics import is_number
from tunix_like.tasks.results import PASS_RATES

HISTOGRAMS = ("drawn", "trained", "advantage", "all")
"""Possible values of `<name>` in the metrics `train/pass_rate/<name>`. The value of such a metric at a step is a
histogram with ten pass-rate bins (`algorithms/pass_rates.py`)."""

MOST_STEPS = 2000
"""Maximum number of evenly spread steps of a training phase (RL or SFT) in a report. If a phase has more steps, all
other steps are left out, except steps with an evaluation."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The metrics of one training phase: the steps in ascending order, one value per step and metric (None: not
    recorded), and the number of steps that were left out to limit the size."""

    steps: list[int]
    columns: dict[str, list[float | None]]
    histograms: dict[str, list[list[float] | None]]
    left_out: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run folder. `config` has the known keys, flat (`optimizer.learning_rate`), with values that are
    not to be shown (`contents.text_of`). Without a file `config.yaml`, `config` is empty."""

    name: str
    folder: Path
    config: dict[str, Any]
    rl: Table
    sft: Table


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Reads runs. The name of a run is the last part of its path, or several last parts if names would be equal."""
    paths = [Path(folder).resolve() for folder in folders]
    if doubled := {str(path) for path in paths if paths.count(path) > 1}:
        raise UserError(f"{min(doubled)} is given twice; give each run once.")
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read_run(folder: Path, name: str) -> Run:
    file = folder / metrics.FILE
    if not file.exists():
        what = "is not a folder" if not folder.is_dir() else f"has no {metrics.FILE}"
        raise UserError(f"{folder} {what}: give the folder of a run, as `tunix-like train` prints it.")
    rows = metrics.rows(folder)
    rl, sft = (_table(rows, key) for key in metrics.STEP_KEYS)
    if not rl.steps and not sft.steps:
        raise UserError(f"{file} has no row of a step yet: wait for the run's first step.")
    return Run(name, folder, _config(folder / "config.yaml"), rl, sft)


def _config(file: Path) -> dict[str, Any]:
    return given(read_yaml(file)) if file.is_file() else {}


def _table(rows: Sequence[Mapping[str, Any]], key: str) -> Table:
    """Builds the table of a phase. Merges rows of the same step, because a final evaluation can have its own row."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = row.get(key)
        if step is None:
            continue
        merged.setdefault(step, {}).update(row)
    steps = sorted(merged)
    seconds = _running_seconds([merged[step] for step in steps])
    for step, passed in zip(steps, seconds, strict=True):
        merged[step]["seconds"] = passed
    kept = _thin(steps, {step for step in steps if any(name.startswith("eval/") for name in merged[step])})
    return Table(
        kept, _columns([merged[step] for step in kept], key), _histograms(merged, kept), len(steps) - len(kept)
    )


def _running_seconds(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the total seconds of all steps up to each step, without evaluations and checkpoints."""
    total = 0.0
    out = []
    for row in rows:
        taken = row.get("train/step_time_sec", row.get("sft/step_time_sec"))
        total += taken if is_number(taken) else 0.0
        out.append(total)
    return out


def _thin(steps: list[int], wanted: set[int]) -> list[int]:
    if len(steps) <= MOST_STEPS:
        return steps
    spread = {steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)}
    return [step for step in steps if step in spread or step in wanted]


def _columns(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float | None]]:
    names = {name for row in rows for name, value in row.items() if name != key and is_number(value)}
    return {name: [_number(row.get(name)) for row in rows] for name in sorted(names)}


def _histograms(merged: Mapping[int, Mapping[str, Any]], steps: Sequence[int]) -> dict[str, list[list[float] | None]]:
    histograms = {
        name: [_bins(merged[step].get(f"train/pass_rate/{name}")) for step in steps]
        for name in HISTOGRAMS
    }  # fmt: skip
    return {name: values for name, values in histograms.items() if any(values)}


def _bins(value: Any) -> list[float] | None:
    whole = isinstance(value, list) and len(value) == len(PASS_RATES) and all(map(is_number, value))
    return value if whole else None


def _number(value: Any) -> float | None:
    return value if is_number(value) else None
