"""Weights & Biases and trackio: rows handed over in a thread, and a run that goes on in its own curve.

Knows how these tools are started and what they make of a step that was logged before. They are imported when the first
row is due.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tunix_like.json_files import read_object

logger = logging.getLogger("tunix_like")

FILE = "tracking.json"
FINISH_SECONDS = 60.0
"""How long the end of a phase waits for a tool to hand over what it has."""


class Start(NamedTuple):
    """Where a start of a phase takes up its run.

    Attributes:
      key: the rows' step column, `step` or `sft/step`.
      first: the first step to come; those from it on are done again.
      kept: rows of `metrics.jsonl` that stay; the next one has number `kept + 1`.
      seen: rows that it had before.
    """

    key: str
    first: int
    kept: int
    seen: int


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
    """What a tool is told of the run: a stable id, the run folder, the hyperparameters."""

    id: str
    folder: Path
    settings: dict[str, Any]


class Wandb:
    """A run of Weights & Biases. Its own step is the number of the row, which never goes back: it drops what does. The
    axes of the charts are the run's steps."""

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
        for names, step in (("sft/*", "sft/step"), ("train/*", "step"), ("eval/*", "step")):
            self._run.define_metric(names, step_metric=step)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log(row, step=number)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, found again by its name, which therefore ends in the id."""

    def __init__(self, place: Place) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "tunix_like")
        name = f"{place.folder.name}-{place.id}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=place.settings, embed=False)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log({name: value for name, value in row.items() if name != key}, step=int(row[key]))

    def finish(self, failed: bool) -> None:
        self._run.finish()


TOOLS: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio}


class Trackers:
    """Tools that keep a run elsewhere, by one id that stays in the run folder.

    Neither tool takes back what it was told (Weights & Biases truncates a run only for some accounts). A run that goes
    back to a checkpoint does the same steps again, to the bit, so their rows are not told twice: the curve goes on
    where it had ended. A run without a checkpoint starts over, under another id.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        self._names, self._folder, self._settings = names, folder, settings
        self._told, self._key = 0, ""
        self._threads: list[Tool] = []

    def __str__(self) -> str:
        return " and ".join(self._names)

    def begin(self, start: Start) -> None:
        file = self._folder / FILE
        known: dict[str, Any] = {"run": secrets.token_hex(4), "rows": 0}
        if start.kept and file.is_file():
            known = read_object(file, "Remove it to go on in a new curve.")
        self._told = max(known["rows"], start.seen if start.kept else 0)
        self._key = start.key
        known["rows"] = self._told
        text = json.dumps(known)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, file)
        place = Place(known["run"], self._folder, self._settings)
        self._threads = [Tool(name, place, start.key) for name in self._names]

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        if number > self._told:
            for thread in self._threads:
                thread.write(number, scalars(row))

    def close(self, failed: bool) -> None:
        for thread in self._threads:
            thread.close(failed)


class Tool:
    """One tool in a thread of its own: whatever it waits for, the run does not. What it raises is warned of, and ends
    the thread."""

    def __init__(self, name: str, place: Place, key: str) -> None:
        self._name, self._place, self._key = name, place, key
        self._rows: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)

    def write(self, number: int, row: dict[str, float]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():
            self._rows.put((number, row))

    def close(self, failed: bool) -> None:
        if self._thread.ident is None:
            return
        self._rows.put(failed)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s: not done after %g s; it is left alone", self._name, FINISH_SECONDS)

    def _work(self) -> None:
        try:
            session = TOOLS[self._name](self._place)
            while not isinstance(item := self._rows.get(), bool):
                session.log(item[0], self._key, item[1])
            session.finish(item)
        except Exception as error:  # it may be anything, and it is not worth a run
            cause = str(error) or type(error).__name__
            logger.warning("%s: %s; this logger is off until the next start", self._name, cause)
