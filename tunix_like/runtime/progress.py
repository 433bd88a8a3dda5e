"""Shows the progress of long tasks: a live line at the bottom of a terminal, one output that is replaced in a notebook,
or plain lines if there is neither.

Progress output is off by default. The command line enables it with `shown()`, a learner with `watched()`. Long
operations are wrapped in `task()`, which does nothing if progress output is off.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rich.live
import rich.progress_bar
import rich.table
import rich.text

from tunix_like.runtime import console
from tunix_like.runtime.visible import visible

Advance = Callable[..., None]
"""`f(done, note="")`: adds `done` finished items and sets the note that is shown after the count."""

_SOON = 0.5
"""Seconds after which a subtask is shown. Shorter subtasks would flicker."""

_EVERY = 0.5
"""Seconds between two updates of the output in a notebook."""

_STEPS = 20
"""The remaining time is estimated from this number of most recent steps."""


class _Task:
    def __init__(self, name: str, total: int | None, done: int) -> None:
        self.name = name
        self.total = total
        self.done = done
        self.note = ""
        self.began = time.monotonic()
        self.marks = collections.deque([(self._worked(self.began), done)], maxlen=_STEPS + 1)
        self.steps = 0

    @staticmethod
    def _worked(now: float) -> float:
        """Returns the time without that of compilations, which later steps do not have."""
        return now if _SHOWN is None else now - _SHOWN.compiled(now)

    def advance(self, done: int, note: str = "") -> None:
        self.done = self.done + done
        self.note = note
        if not done:
            return
        self.steps += 1
        if self.steps == 2:  # the first step includes tracing, so the estimate ignores it
            self.marks.popleft()
        self.marks.append((self._worked(time.monotonic()), self.done))

    @property
    def count(self) -> str:
        if self.total is None:
            return f" {self.done}" if self.done else ""
        return f" {self.done}/{self.total}"

    def left(self, now: float) -> float | None:
        """Estimates the remaining seconds from the last steps, without their compilations; the first step counts only
        alone. A step that takes longer than the average is taken to end now."""
        marks = list(self.marks)  # a copy, because another thread appends to the deque
        first, before = marks[0]
        last, done = marks[-1]
        if self.total is None or done == before or done >= self.total:
            return None
        pace = (last - first) / (done - before)
        return pace * (self.total - done) - min(self._worked(now) - last, pace) or None


class _Cell:
    """The progress in a cell of a notebook: a figure and below it a text, both replaced while the cell runs. The text
    has the newest evaluation, the newest step and a line for each finished task."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._shown: str | None = None
        self._lines: list[str] = []
        self._evaluated = self._newest = ""
        self._lock = threading.Lock()

    def add(self, row: Mapping[str, Any], total: int | None) -> None:
        self._newest = console.row_line(row, total)
        if any("eval/" in name for name in row):
            self._evaluated = self._newest
            self._newest = ""

    def end(self, line: str) -> None:
        """Keeps the metrics of the last step and the last line of a task that had steps."""
        if self._evaluated or self._newest:
            self._lines = [*self._lines, *filter(None, [self._evaluated, self._newest]), line]
        self._evaluated = self._newest = ""

    def show(self, line: str) -> None:
        text = visible("\n".join(filter(None, [*self._lines, self._evaluated, self._newest, line])))
        with self._lock:
            if text != (self._shown or ""):
                self._replace("text", {"text/plain": text})
                self._shown = text

    def figure(self, png: bytes, width: int) -> None:
        """Shows a picture that is `width` CSS pixels wide."""
        data = {"image/png": base64.b64encode(png).decode(), "text/plain": "curves of the run"}
        with self._lock:
            self._replace("figure", data, {"image/png": {"width": width}})

    def _replace(self, part: str, data: dict[str, str], metadata: dict[str, Any] | None = None) -> None:
        from IPython.display import display, update_display

        if self._shown is None:  # the order of the first outputs is that in the cell
            for name in ("figure", "text"):
                display({"text/plain": ""}, raw=True, display_id=f"{self._id}-{name}")
            self._shown = ""
        update_display(data, metadata=metadata, raw=True, display_id=f"{self._id}-{part}")


class _Display:
    def __init__(self, lines: bool, every: float) -> None:
        self.tasks: list[_Task] = []
        self.compiling: tuple[str, float] | None = None
        self.seconds_compiled = 0.0
        self.every = every
        self.paused = False
        self._bar = console.has_bottom_line()
        self._lines = lines
        self.cell = _Cell() if console.in_notebook() else None
        self._live: rich.live.Live | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick_periodically, name="progress", daemon=True)
        if (lines or self.cell) and not self._bar and not console.terminal().quiet:
            self._thread.start()

    def push(self, task: _Task) -> None:
        self.tasks.append(task)
        if self._bar and self._live is None:
            self._live = rich.live.Live(
                console=console.terminal(),
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),  # if stderr goes to a file, it must not appear on the screen
            )
            self._live.start()

    def pop(self, task: _Task) -> None:
        if self.cell is not None and task is self.tasks[0]:
            if task.total is not None:
                self.cell.end(self.line(time.monotonic()))
            self.cell.show("")
        self.tasks.remove(task)
        self.compiling = None  # a failed compilation does not report its end
        if self._live is not None and not self.tasks:
            self._live.stop()
            self._live = None

    def pause(self, paused: bool) -> None:
        """Hides the progress line if `paused` is True, otherwise shows it again."""
        self.paused = paused
        if self._live is not None:
            if paused:
                self._live.stop()
            else:
                self._live.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.cell is not None:
            self.cell.show("")  # the thread may have shown an older line last

    def compiled(self, now: float) -> float:
        """Returns the seconds of compilation so far."""
        return self.seconds_compiled + (0.0 if self.compiling is None else now - self.compiling[1])

    def parts(self, now: float) -> str:
        """Describes the running subtasks of the outermost task, and a running compilation, as text."""
        inner = [task for task in self.tasks[1:] if now - task.began >= _SOON]
        texts = [f"{task.name}{task.count}" + (f", {task.note}" if task.note else "") for task in inner]
        if inner:
            texts[-1] += f", {duration(now - inner[-1].began)}"
        if (compiling := self.compiling) is not None and now - compiling[1] >= _SOON:
            texts.append(f"compiling {compiling[0]}, {duration(now - compiling[1])}")
        return " > ".join(texts)

    def line(self, now: float) -> str:
        """Describes all running tasks in one plain line."""
        task = self.tasks[0]
        left = task.left(now)
        text = f"{task.name}{task.count}, {duration(now - task.began)}" + (f", {task.note}" if task.note else "")
        text += "" if left is None else f", {duration(left)} left"
        return text + (f": {parts}" if (parts := self.parts(now)) else "")

    def tick(self) -> None:
        """Prints a line of progress if nothing was printed in the last `every` seconds."""
        now = time.monotonic()
        if self.paused:
            return
        with contextlib.suppress(IndexError):  # the last task can end during this call
            if self.cell is not None:
                return self.cell.show(self.line(now))
            if now - max(console.last_printed(), self.tasks[0].began) >= self.every:
                console.print_text(self.line(now))

    def _tick_periodically(self) -> None:
        while not self._over.wait(min(1.0, self.every) if self.cell is None else _EVERY):
            self.tick()

    def _render(self) -> rich.table.Table:
        now = time.monotonic()
        grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
        if not console.has_bottom_line():  # the terminal was closed and replaced by a file
            return grid
        for task in self.tasks[:1]:
            left = task.left(now)
            bar = rich.progress_bar.ProgressBar(task.total, task.done, width=20, pulse=task.total is None)
            times = duration(now - task.began) + ("" if left is None else f", {duration(left)} left")
            texts = [rich.text.Text(text) for text in (times, task.note, self.parts(now)) if text]
            grid.add_row(rich.text.Text(task.name + task.count), bar, *texts)
            for column in grid.columns:
                column.no_wrap = True
                column.overflow = "ellipsis"
        return grid


_SHOWN: _Display | None = None


@contextlib.contextmanager
def shown(*, lines: bool = True, every: float = 30.0) -> Iterator[None]:
    """Shows the progress of tasks that start inside this context. Without a terminal, `lines` allows a plain line after
    each `every` seconds without output."""
    global _SHOWN
    before = _SHOWN
    _SHOWN = _Display(lines, every)
    try:
        yield
    finally:
        _SHOWN.close()
        _SHOWN = before


@contextlib.contextmanager
def watched() -> Iterator[bool]:
    """Shows progress in a notebook or on a terminal. Yields False, and shows nothing, if there is neither or if
    progress is shown already."""
    if _SHOWN is not None or not (console.in_notebook() or console.has_bottom_line()):
        yield False
        return
    with shown():
        yield True


def in_cell() -> bool:
    """Returns whether progress is shown in a cell of a notebook."""
    return _SHOWN is not None and _SHOWN.cell is not None


def show_row(row: Mapping[str, Any], total: int | None) -> None:
    """Shows the line of a row of metrics in the cell of a notebook, if progress is shown there."""
    if _SHOWN is not None and _SHOWN.cell is not None:
        _SHOWN.cell.add(row, total)


def show_figure(png: bytes, width: int) -> None:
    """Shows a picture, `width` CSS pixels wide, above the progress in the cell of a notebook."""
    if _SHOWN is not None and _SHOWN.cell is not None:
        _SHOWN.cell.figure(png, width)


@contextlib.contextmanager
def task(name: str, total: int | None = None, done: int = 0) -> Iterator[Advance]:
    """Shows the progress of a long operation, or of a subtask inside another one. The yielded `advance(done, note="")`
    adds finished items and sets the note after the count."""
    if (display := _SHOWN) is None:
        yield lambda done, note="": None
        return
    new_task = _Task(name, total, done)
    display.push(new_task)
    try:
        yield new_task.advance
    finally:
        display.pop(new_task)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Hides the progress output, so that it does not overwrite the input of a person."""
    display = _SHOWN
    if display is not None:
        display.pause(True)
    try:
        yield
    finally:
        if display is not None:
            display.pause(False)


def compiling(name: str | None) -> None:
    """Reports that the program `name` is being compiled. None reports that the compilation has ended."""
    if _SHOWN is not None:
        now = time.monotonic()
        _SHOWN.seconds_compiled = _SHOWN.compiled(now)
        _SHOWN.compiling = None if name is None else (name, now)


def duration(seconds: float) -> str:
    """Formats seconds as `12 s`, `4:05` (minutes) or `1:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
