"""Reads and writes `metrics.jsonl`, which has one JSON object (row) per line, and finds the best step in it. A run that
resumes removes the rows of the steps after its checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from tunix_like.errors import UserError
from tunix_like.runtime.atomic import write_atomically
from tunix_like.runtime.input_files import file_problem

logger = logging.getLogger("tunix_like")

FILE = "metrics.jsonl"

DAMAGED = "metrics_damaged.txt"
"""The lines of `FILE` that could not be read when the run was resumed."""

STEP_KEYS = ("step", "sft/step")
"""The columns with the number of the step."""


class Start(NamedTuple):
    """The position at which a training phase (supervised fine-tuning or reinforcement learning) starts or resumes.

    Attributes:
      key: the column with the step number in `metrics.jsonl`, `step` or `sft/step`.
      first: the first step that is computed after this start. It may have been logged already, before the run was
        resumed from an earlier checkpoint.
      kept: number of rows that remain in `metrics.jsonl`; the next row has number `kept + 1`.
    """

    key: str
    first: int
    kept: int


class MetricsLog:
    """Appends rows to `metrics.jsonl` in `folder`. If `folder` is None, nothing is written.

    If rows cannot be written (for example, because the disk is full), one warning is logged. The rows are kept in
    memory, and are written with the next row that can be written.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._path = None if folder is None else Path(folder) / FILE
        self._unwritten: list[str] = []
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row and passes it to the operating system, so that a killed process loses no row.

        Scalars and arrays of numpy and jax are converted to numbers and lists; non-finite values, which JSON does not
        support, become null.

        Raises:
          TypeError: a value is not a number, a text, None, or a list or dict of these.
        """
        if self._path is None:
            return
        self._unwritten.append(json.dumps(_plain(row), allow_nan=False) + "\n")
        try:
            _append(self._path, "".join(self._unwritten))
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.warning("%s cannot be written (%s): rows are kept until it can be written", self._path, error)
            return
        if len(self._unwritten) > 1:
            kept = len(self._unwritten) - 1
            logger.warning("%s can be written again; the %d rows that were kept are written too", self._path, kept)
        self._unwritten.clear()

    def close(self) -> None:
        if self._unwritten:
            logger.warning("%s: its last %d rows could not be written and are lost", self._path, len(self._unwritten))

    def of_step(self, key: str, step: int) -> list[dict[str, Any]]:
        """Returns the rows that have the value `step` in the column `key`."""
        return [row for row in self.rows() if row.get(key) == step]

    def newest(self, key: str) -> dict[str, Any]:
        """Returns the newest value of each metric in the rows that have the column `key`."""
        return {name: value for row in self.rows() if key in row for name, value in row.items()}

    def rows(self) -> list[dict[str, Any]]:
        return [] if self._path is None else rows(self._path.parent)

    def cut(self, key: str, last: int) -> int:
        """Removes the rows with a value above `last` in the column `key`, and an incomplete last line, which a killed
        process can leave. Returns the number of remaining rows.

        Rows without this column are kept. The file is replaced atomically. Damaged lines, which must not stop a run,
        are moved to the file `DAMAGED` with a warning. Another warning says which steps up to `last` have no rows,
        because the file was damaged or could not be written.
        """
        if self._path is None:
            return 0
        lines = _lines(self._path, _step_problem) if self._path.exists() else []
        damaged = {number: line.text for number, line in enumerate(lines, 1) if line.problem is not None}
        rows = [line.row for line in lines if line.row is not None and line.problem is None]
        kept = [row for row in rows if row.get(key) is None or row[key] <= last]
        if lost := sorted(set(range(1, last + 1)) - {row.get(key) for row in kept}):
            logger.warning(
                "%s has no rows of %d of the %d steps before the checkpoint (%s %d to %d): their metrics are lost, and "
                "none of them counts as the best step any longer",
                *(self._path, len(lost), last, key, lost[0], lost[-1]),
            )
        if not self._path.exists():
            return 0
        try:
            if damaged:
                aside = self._path.with_name(DAMAGED)
                with aside.open("ab") as file:
                    file.writelines(text + b"\n" for text in damaged.values())
                numbers = ", ".join(map(str, damaged))
                logger.warning("%s: damaged lines (%s) are moved to %s", self._path, numbers, aside)
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be cut back to the checkpoint ({error}). Is the disk full or the folder not "
                "writable? Free disk space and start again; nothing is lost."
            ) from error
        return len(kept)


def _append(path: Path, text: str) -> None:
    """Appends a text to a file. If the function raises OSError, no part of the text is appended."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """Returns all rows of `metrics.jsonl` in a run folder (see `objects`); an empty list if there is no such file.

    Raises:
      UserError: also if a step is not a whole number.
    """
    path = Path(folder) / FILE
    return _rows(path, _lines(path, _step_problem)) if path.exists() else []


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that float64 can represent."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def objects(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file with one object per line. An incomplete last line is ignored.

    Raises:
      UserError: the file cannot be read, or a line before the last is not a JSON object. The message names the file
        and the line.
    """
    return _rows(path, _lines(path))


class _Line(NamedTuple):
    """A line of a file of rows. An incomplete last line has neither a row nor a problem."""

    text: bytes
    row: dict[str, Any] | None
    problem: str | None


def _lines(path: Path, problem_of: Callable[[dict[str, Any]], str | None] = lambda row: None) -> list[_Line]:
    if problem := file_problem(path):
        raise UserError(f"{path} {problem}.")
    texts = path.read_bytes().splitlines()
    found = []
    for number, text in enumerate(texts, 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            found.append(_Line(text, row, problem_of(row)))
        else:
            found.append(_Line(text, None, "this is not a JSON object" if number < len(texts) else None))
    return found


def _step_problem(row: Mapping[str, Any]) -> str | None:
    for key in STEP_KEYS:
        step = row.get(key)
        if step is not None and not (type(step) is int and 0 <= step < 1 << 31):
            return f"{key} is {step!r:.40}, not the number of a step"
    return None


def _rows(path: Path, lines: Sequence[_Line]) -> list[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.problem is not None:
            raise UserError(f"{path}, line {number}: {line.problem}; remove the line to continue.")
    return [line.row for line in lines if line.row is not None]


class Best:
    """Selects the best training step of a run by the column `metric` of its rows, e.g. `eval/pass@1` (higher is better;
    of equal steps the earliest). The column `step_key` has the step number.

    The row of a step is written before its checkpoint, and is removed if the run resumes from an earlier step. Nothing
    else is stored, so a killed process cannot leave a wrong state.
    """

    def __init__(self, metric: str, step_key: str = "step") -> None:
        self.metric = metric
        self.step_key = step_key
        self._values: dict[int, float] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the values of the metric in `rows`. Missing, null and non-finite values are ignored."""
        for row in rows:
            step, value = row.get(self.step_key), row.get(self.metric)
            if isinstance(step, int) and is_number(value):
                self._values[step] = float(value)

    def among(self, steps: Sequence[int]) -> int | None:
        """Returns the best of `steps`; None if no step has a value."""
        return max(
            (step for step in sorted(steps) if step in self._values), key=lambda step: self._values[step], default=None
        )

    def describe(self, step: int) -> str:
        return f"{self.metric} {self._values[step]:.4g} at step {step}"


def best_of(run: Path, metric: str) -> Best:
    """Returns the `Best` of a run folder."""
    best = Best(metric)
    best.add(rows(run))
    return best


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"a metric must be a number or text, not {type(value).__name__}")
    return _plain(array.tolist())
