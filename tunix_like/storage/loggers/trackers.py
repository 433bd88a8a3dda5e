"""Weights & Biases and trackio: rows handed over in a thread, and a run that goes on in its own curve.

Knows how these tools are started and what they make of a step that was logged before. They are imported when the first
row is due.
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
CURE = "Remove it to go on in a new curve."
_LOCK = threading.Lock()  # the file's: each tool says in its own thread how far it is

FINISH_SECONDS = 60.0
"""How long the end of a phase waits for the tools, all together, to hand over what they have."""

WAITING_ROWS = 10_000
"""Rows that may wait for a tool (55 MB, with 50 numbers each); one that lets more come is given up."""


class Start(NamedTuple):
    """Where a start of a phase takes up its run.

    Attributes:
      key: the rows' step column, `step` or `sft/step`.
      first: the first step to come; those from it on are done again.
      kept: rows of `metrics.jsonl` that stay; the next one has number `kept + 1`.
    """

    key: str
    first: int
    kept: int


@runtime_checkable
class Logger(Protocol):
    """What is told of every row. It may raise anything."""

    def begin(self, start: Start) -> None:
        """A phase begins or goes on; rows may follow, or none."""

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Row `number` (from 1, over all phases) of `metrics.jsonl`."""

    def close(self, failed: bool) -> None:
        """The phase is over, by an exception or not."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row is a finite number."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Place(NamedTuple):
    """What a tool is told of the run: a stable id, the run folder, the hyperparameters, how many rows it surely has."""

    id: str
    folder: Path
    settings: dict[str, Any]
    mark: int


class Wandb:
    """A run of Weights & Biases. Its own step is the number of the row, which never goes back: it drops what does. The
    axes of the charts are the run's steps."""

    at_once = False  # a killed process takes with it what is not sent yet, and offline all that is not in a full block

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
            reinit="create_new",  # a run that the user has open stays theirs
            settings={"console": environment.get("WANDB_CONSOLE", "off")},  # else it takes over the process's output
        )
        self.first = place.mark + 1 if self._run.offline else max(1, self._run.step)  # online the server knows
        for names, step in (("sft/*", "sft/step"), ("train/*", "step"), ("eval/*", "step")):
            self._run.define_metric(names, step_metric=step)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log(row, step=number)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, found again by its name, which therefore ends in the id."""

    at_once = True  # but for half a second

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
    """Tools that keep a run elsewhere, by one id that stays in the run folder.

    Neither tool takes back what it was told (Weights & Biases truncates a run only for some accounts). A run that goes
    back to a checkpoint does the same steps again, to the bit, so what a tool has is not told again: the curve goes on
    where it had ended. (With another `max_steps`, `eval.*` or `train_micro_batch_size` they are not the same to the
    bit; what was told first stays.) Rows of `metrics.jsonl` that a tool lacks are told first. A run without a
    checkpoint starts over, under another id.

    `tracking.json` holds the id, and for each tool how many rows it surely has: where it keeps them at once, all that
    it took; else those of the last end that it took part in.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        self._names, self._file, self._settings = names, folder / FILE, settings
        self._tools: list[Tool] = []

    def __str__(self) -> str:
        return " and ".join(self._names)

    def begin(self, start: Start) -> None:
        with _LOCK:
            known: dict[str, Any] = {"run": secrets.token_hex(4)}
            if start.kept and self._file.is_file():
                known = read_object(self._file, CURE)
            _save(self._file, known)
        place = Place(known["run"], self._file.parent.resolve(), self._settings, 0)
        self._tools = [
            Tool(name, place._replace(mark=known.get(name, 0)), start) for name in self._names if not _left_alone(name)
        ]

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        for tool in self._tools:
            tool.write(number, scalars(row))

    def close(self, failed: bool) -> None:
        # A second Ctrl-C is to end at once; `loop.Interrupted`, which the first one ends in, is of a type of its own.
        wait = 0.0 if type(sys.exception()) is KeyboardInterrupt else FINISH_SECONDS
        for tool in self._tools:
            tool.end(failed)
        until = time.monotonic() + wait
        for tool in self._tools:
            if not tool.ended(until):
                logger.warning("%s: not done after %g s; it is left alone", tool.name, wait)


def _save(file: Path, known: dict[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(known), encoding="utf-8")
    os.replace(temporary, file)


def _left_alone(name: str) -> bool:
    """Whether the tool still works for an earlier phase: a second start beside it would meet the first one's run."""
    if left := any(thread.name == _thread_name(name) for thread in threading.enumerate()):
        logger.warning("%s: still busy with an earlier phase; this logger is off until the next start", name)
    return left


def _thread_name(name: str) -> str:
    return f"logger {name}"


class Tool:
    """One tool in a thread of its own: whatever it waits for, the run does not. What it raises is warned of, and ends
    the thread."""

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
        """No more rows come."""
        self._rows.put(failed)

    def ended(self, until: float) -> bool:
        """Waits for the tool until that time of `time.monotonic`; not for one that is given up."""
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
        except Exception as error:  # it may be anything, and it is not worth a run
            cause = str(error) or type(error).__name__
            logger.warning("%s: %s; this logger is off until the next start", self.name, cause)

    def _log(self, session: Any, number: int, row: dict[str, float]) -> None:
        if number >= session.first:
            session.log(number, self._start.key if self._start.key in row else "sft/step", row)
            if session.at_once:
                self._note(number)

    def _note(self, number: int) -> None:
        """The tool has the rows up to this one."""
        file = self._place.folder / FILE
        with _LOCK, contextlib.suppress(OSError, UserError):  # a full disk: the next one may be written
            known = read_object(file, CURE)
            if known.get("run") == self._place.id:  # else the run was started over while this tool was left alone
                _save(file, known | {self.name: max(known.get(self.name, 0), number)})
