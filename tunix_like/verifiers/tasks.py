"""Reads the tasks of an environment of the package `verifiers` (the format of the Environments Hub)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.data.source import HIDDEN_COLUMN, DataSource, MappedRows, Record, RowRange, take
from tunix_like.errors import UserError
from tunix_like.verifiers.process import VerifiersProcess

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

MOST_HELD_OUT = 64
"""Maximum number of held-out tasks if neither `data.eval_size` nor `data.eval_arguments` is set. In this case, a tenth
of the tasks is held out, but not more than this number."""

TASK_COLUMN = "task"
"""The column with the task in the form that the environment receives."""


def load(config: DataConfig) -> DataSource:
    """Loads the tasks of an environment in a separate process.

    The training rows are tasks that the environment provides with the arguments `data.arguments`. If
    `data.eval_arguments` is set, the held-out rows are the tasks that the environment provides with those arguments.
    Otherwise, the last tasks are held out and are not trained on.

    Raises:
      UserError: the package `verifiers` is not installed, the environment cannot be loaded, the arguments of the
        environment are wrong, or the environment has too few tasks.
    """
    train = config.train_size
    held_out = config.eval_size
    both = None if train is None or held_out is None else train + held_out
    wanted = {
        "train": both if config.eval_arguments is None else train,
        "eval": held_out,
        "eval_arguments": config.eval_arguments,
    }
    process = VerifiersProcess(settings_of(config) | {"list": wanted})
    process.kill()
    found = process.first
    assert found is not None
    if not found["train"]:
        raise UserError(f"data.path={config.path}: its taskset has no tasks; check data.arguments.")
    if "eval" in found:
        rows = take(found["train"], train, "data.train_size")
        tests = take(found["eval"], held_out, "data.eval_size")
    else:
        rows, tests = _split(found["train"], train, held_out)
    return DataSource(MappedRows(rows, record), MappedRows(tests, record), None, reward="exact_match")


def settings_of(config: DataConfig) -> dict[str, Any]:
    """Returns the settings of the process that runs an environment. Raises a UserError if `data.path` is unset or a
    missing file."""
    if config.path is None:
        raise UserError(
            "data.path: data.name=verifiers needs the id of an installed environment, or a Python file with one."
        )
    if config.path.endswith(".py") and not Path(config.path).is_file():
        raise UserError(f"data.path={config.path}: there is no such file.")
    return {"path": config.path, "arguments": config.arguments or {}, "list": None}


def _split(tasks: Sequence[Any], train: int | None, held_out: int | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits tasks into training tasks (from the beginning) and held-out tasks (from the end)."""
    if held_out is None:
        held_out = min(MOST_HELD_OUT, len(tasks) // 10)
    wanted = max(train or 0, 1) + held_out
    if wanted > len(tasks):
        raise UserError(
            f"data.train_size and data.eval_size: {wanted} tasks are needed, but the taskset has {len(tasks)}; lower "
            "them."
        )
    left = len(tasks) - held_out
    return RowRange(tasks, 0, left if train is None else train), RowRange(tasks, left, len(tasks))


def record(task: Mapping[str, Any]) -> Record:
    """Returns the row of a task: `prompt`, `task`, `hidden` (a hash of the task) and, if the task has a text
    `answer`, the column `answer`."""
    data = task["data"]
    known = {name: value for name, value in data.items() if name != "idx"}
    row = {
        "prompt": task["messages"],
        TASK_COLUMN: data,
        HIDDEN_COLUMN: hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest(),
    }
    return row | ({"answer": data["answer"]} if isinstance(data.get("answer"), str) else {})
