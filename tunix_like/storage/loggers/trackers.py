"""Logs metrics to Weights & Biases and trackio in background threads. A resumed run continues the same curves.

The packages are imported when the first row of metrics is logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tunix_like.errors import UserError
from tunix_like.runtime.json_files import read_object
from tunix_like.storage.metrics import rows

logger = logging.getLogger("tunix_like")

FILE = "tracking.json"
CURE = "Remove it to start a new curve."
_LOCK = threading.Lock()  # protects `FILE`, which each tool updates in its own thread

FINISH_SECONDS = 60.0
"""Maximum seconds to wait, at the end of a training phase, until all tools have sent their rows."""

WAITING_ROWS = 10_000
"""Maximum number of rows that wait to be logged by a tool. If more rows wait, the tool is disabled. 10,000 rows of 50
numbers take 55 MB."""


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


@runtime_checkable
class Logger(Protocol):
    """Writes rows of metrics to one destination, e.g. TensorBoard files. The methods may raise any exception."""

    def begin(self, start: Start) -> None:
        """Starts or resumes a training phase (supervised fine-tuning or reinforcement learning). Must be called before
        `write`."""

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Logs a row of `metrics.jsonl`. `number` is the number of its line, from 1."""

    def close(self, failed: bool) -> None:
        """Ends the training phase; `failed` is True if the phase ended with an exception."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of a row of metrics that are finite numbers, by name."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Place(NamedTuple):
    """The description of a run for a logging tool: a stable id, the run folder and the hyperparameters. `mark` is the
    number of rows of `metrics.jsonl` that the tool is known to have."""

    id: str
    folder: Path
    settings: dict[str, Any]
    mark: int


class Wandb:
    """A run of Weights & Biases. Weights & Biases drops a row whose step is smaller than an earlier step. Therefore the
    number of the row in `metrics.jsonl`, which never decreases, is passed as the step. The charts show training steps
    on their axes."""

    at_once = False  # a killed process loses unsent rows (offline: the rows of a 32 KB block that is not full)

    def __init__(self, place: Place) -> None:
        import wandb

        if wandb.setup().settings.mode in (None, "online") and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key (wandb login, WANDB_API_KEY, or WANDB_MODE=offline)")
        environment = os.environ
        self._run = wandb.init(
            project=environment.get("WANDB_PROJECT", "tunix_like"),
            name=environment.get("WANDB_NAME", place.folder.name),
            dir=environment.get("WANDB_DIR", str(place.folder)),
            id=place.id,
            resume="allow",
            config=place.settings,
            allow_val_change=True,
            reinit="create_new",  # keeps a run that the user has opened
            settings={"console": environment.get("WANDB_CONSOLE", "off")},  # wandb captures the output otherwise
        )
        self.first = place.mark + 1 if self._run.offline else max(1, self._run.step)  # online: from the server
        for names, step in (("sft/*", "sft/step"), ("train/*", "step"), ("eval/*", "step")):
            self._run.define_metric(names, step_metric=step)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log(row, step=number)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio. trackio identifies a run by its name, so the name ends with the id of the run."""

    at_once = True  # rows are stored within half a second

    def __init__(self, place: Place) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "tunix_like")
        name = f"{place.folder.name}-{place.id}"
        self.first = place.mark + 1
        self._run = trackio.init(project=project, name=name, resume="allow", config=place.settings, embed=False)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log({name: value for name, value in row.items() if name != key}, step=int(row[key]))

    def finish(self, failed: bool) -> None:
        self._run.finish()


TOOLS: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio}


class Trackers:
    """Logs to external tools under one run id, which is stored in the run folder.

    The tools cannot delete logged rows (Weights & Biases truncates a run only for some accounts). A run that resumes
    from a checkpoint repeats the same steps bit for bit, so rows that a tool already has are not logged again. (If
    `max_steps`, `eval.*` or `train_micro_batch_size` were changed, the repeated steps are not identical bit for bit;
    the tools keep the rows that were logged first.) If a tool lacks rows of `metrics.jsonl`, these rows are logged
    before new rows. A run that has no checkpoint starts from the beginning with a new id.

    `tracking.json` in the run folder stores the id, and for each tool the number of rows that the tool is known to
    have. These are all logged rows if the tool stores rows at once. Otherwise they are the rows up to the end of the
    last training phase (supervised fine-tuning or reinforcement learning) that was completed.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        self._names, self._file, self._settings = names, folder / FILE, settings
        self._tools: list[Tool] = []

    def __str__(self) -> str:
        return " and ".join(self._names)

    def begin(self, start: Start) -> None:
        with _LOCK:
            state: dict[str, Any] = {"run": secrets.token_hex(4)}
            if start.kept and self._file.is_file():
                state = read_object(self._file, CURE)
            _save(self._file, state)
        place = Place(state["run"], self._file.parent.resolve(), self._settings, 0)
        self._tools = [
            Tool(name, place._replace(mark=state.get(name, 0)), start) for name in self._names if not _is_busy(name)
        ]

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        for tool in self._tools:
            tool.write(number, scalars(row))

    def close(self, failed: bool) -> None:
        # A second Ctrl-C (KeyboardInterrupt) must end the process at once. The first Ctrl-C raises another type,
        # `loop.Interrupted`.
        wait = 0.0 if type(sys.exception()) is KeyboardInterrupt else FINISH_SECONDS
        for tool in self._tools:
            tool.end(failed)
        until = time.monotonic() + wait
        for tool in self._tools:
            if not tool.ended(until):
                logger.warning("%s: not done after %g s; the run does not wait any longer", tool.name, wait)


def _save(file: Path, state: dict[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(state), encoding="utf-8")
    os.replace(temporary, file)


def _is_busy(name: str) -> bool:
    """Returns whether the thread of a logging tool is still logging an earlier training phase. If so, the tool must not
    be started again."""
    if busy := any(thread.name == _thread_name(name) for thread in threading.enumerate()):
        logger.warning("%s: still busy with an earlier phase; this logger is off until the next start", name)
    return busy


def _thread_name(name: str) -> str:
    return f"logger {name}"


class Tool:
    """Runs one logging tool in its own thread, so that the training does not wait for the tool. An exception of the
    tool is logged as a warning and ends the thread."""

    def __init__(self, name: str, place: Place, start: Start) -> None:
        self.name, self._place, self._start = name, place, start
        self._rows: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=_thread_name(name), daemon=True)
        self._given_up = False

    def write(self, number: int, row: dict[str, float]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        if self._given_up or not self._thread.is_alive():
            return
        self._given_up = self._rows.qsize() >= WAITING_ROWS
        if self._given_up:
            logger.warning("%s: %d rows wait for it; this logger is off until the next start", self.name, WAITING_ROWS)
        else:
            self._rows.put((number, row))

    def end(self, failed: bool) -> None:
        """Tells the thread of the logging tool that no more rows follow, and whether the training phase has failed."""
        self._rows.put(failed)

    def ended(self, until: float) -> bool:
        """Waits until the thread of the logging tool ends, at most until the `time.monotonic` value `until`. Does not
        wait for a disabled tool. Returns whether the thread has ended or the tool was disabled."""
        if self._thread.ident is not None and not self._given_up:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._given_up or not self._thread.is_alive()

    def _work(self) -> None:
        try:
            session, last = TOOLS[self.name](self._place), 0
            for last, row in enumerate(rows(self._place.folder)[: self._start.kept], 1):
                self._log(session, last, scalars(row))
            while not isinstance(item := self._rows.get(), bool):
                last = item[0]
                self._log(session, *item)
            session.finish(item)
            self._note(last)
        except Exception as error:  # a tool may raise anything, which must not stop a run
            cause = str(error) or type(error).__name__
            logger.warning("%s: %s; this logger is off until the next start", self.name, cause)

    def _log(self, session: Any, number: int, row: dict[str, float]) -> None:
        if number >= session.first:
            session.log(number, self._start.key if self._start.key in row else "sft/step", row)
            if session.at_once:
                self._note(number)

    def _note(self, number: int) -> None:
        """Records in `tracking.json` that the logging tool has the rows of `metrics.jsonl` up to row `number`."""
        file = self._place.folder / FILE
        with _LOCK, contextlib.suppress(OSError, UserError):  # e.g. a full disk; a later update may succeed
            state = read_object(file, CURE)
            if state.get("run") == self._place.id:  # otherwise the run was started over in the meantime
                _save(file, state | {self.name: max(state.get(self.name, 0), number)})
