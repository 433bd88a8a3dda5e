"""Lists the runs below a folder: state, steps, a metric, age and size."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunix_like.config.load import flat, read_yaml
from tunix_like.config.yaml_files import parse_override
from tunix_like.errors import UserError, nearest
from tunix_like.runtime import console
from tunix_like.storage import metrics
from tunix_like.storage.run_state import RunState, run_state

logger = logging.getLogger("tunix_like")

PASS = "eval/pass@1"


class Listed(NamedTuple):
    """A run in a list.

    Attributes:
      last, best: newest and largest value of the metric; None if the run has not recorded it.
      written: time of its last metrics or checkpoint, in seconds since the epoch.
      size: bytes of the folder.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    state: RunState
    last: float | None
    best: float | None
    written: float
    size: int


KEYS = {
    "name": lambda run: run.name,
    "state": lambda run: run.state.state,
    "step": lambda run: (run.state.of_sft, -run.state.step),
    "metric": lambda run: float("inf") if run.last is None else -run.last,
    "age": lambda run: -run.written,
    "size": lambda run: -run.size,
}
"""Orders of a list, by the column of this name; numbers from the largest, the metric by its last value."""


def run_folders(folder: Path) -> list[Path]:
    """Returns the run folders below `folder`, or `folder` itself if it is one."""
    return sorted(_found(folder))


def _found(folder: Path) -> Iterator[Path]:
    for place, inner, files in os.walk(folder):
        if metrics.FILE in files or ("config.yaml" in files and "model" in inner):
            inner.clear()
            yield Path(place)


def list_runs(folder: Path, metric: str = PASS, wanted: Sequence[str] = (), order: str = "name") -> list[Listed]:
    """Returns the runs below a folder whose config has the values `key=value` in `wanted`.

    Raises:
      UserError: there is no run that can be read, or a key of `wanted` is in no config.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one that contains runs.")
    found = []
    for run in run_folders(folder):
        try:
            found.append(_listed(run, folder, metric))
        except (UserError, OSError) as error:
            logger.warning("%s is left out: %s", run, error)
    if not found:
        raise UserError(f"{folder} contains no run folder (with {metrics.FILE}) that can be read.")
    known = {key for run in found for key in run.config}
    for each in wanted:
        key, _, value = each.partition("=")
        if key not in known:
            raise UserError(f"runs: '{each}': no run has this key. {nearest(key, known)}")
        parsed = parse_override(value, key)
        found = [run for run in found if run.config.get(key) in (parsed, value)]
    return sorted(found, key=KEYS[order])


def _listed(folder: Path, top: Path, metric: str) -> Listed:
    config = dict(flat(read_yaml(file))) if (file := folder / "config.yaml").is_file() else {}
    rows = metrics.rows(folder)
    values = [row[metric] for row in rows if metrics.is_number(row.get(metric))]
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    name = str(folder.relative_to(top)) if folder != top else folder.name
    state = _newest_state(run_state(folder), rows, config)
    written = max((each.st_mtime for each in files), default=folder.stat().st_mtime)
    last, best = (values[-1], max(values)) if values else (None, None)
    return Listed(folder, name, config, state, last, best, written, sum(each.st_size for each in files))


def _newest_state(state: RunState, rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> RunState:
    """Returns the state with the step of the newest row, which can be after the checkpoint, and with the number of
    steps of the config, which the checkpoint knows if it is unset."""
    newest = {key: row[key] for row in rows for key in ("sft/step", "step") if isinstance(row.get(key), int)}
    of_sft = "step" not in newest and (state.of_sft or "sft/step" in newest)
    saved = state if state.of_sft == of_sft else state._replace(step=0, total=None)
    total = config.get("sft.max_steps" if of_sft else "training.max_steps") or saved.total
    step = max(saved.step, newest.get("sft/step" if of_sft else "step", 0))
    return saved._replace(step=step, total=total, of_sft=of_sft)


def show(runs: Sequence[Listed], metric: str = PASS) -> None:
    """Prints a table of runs."""
    rows = [
        [
            run.name,
            run.state.state,
            f"{'sft ' * run.state.of_sft}{run.state.step}/{'?' if run.state.total is None else run.state.total}",
            "" if run.last is None else console.figure(metric, run.last),
            "" if run.best is None else console.figure(metric, run.best),
            _age(time.time() - run.written),
            f"{run.size / 1e6:.1f} MB",
        ]
        for run in runs
    ]
    columns = ["run", "state", "step", f"{metric}, last", f"{metric}, best", "age", "size"]
    console.table(f"{len(runs)} run{'s' * (len(runs) != 1)}", columns, rows, texts=("run", "state", "step"))


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
