"""How far long things are: one line at the bottom of a terminal, elsewhere a plain line after a long silence.

What takes long says so (`task`); nothing is shown, and nothing kept, unless somebody asks (`shown`), as the command
line does. Knows clocks and the screen; does NOT know what is being done.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import rich.live
import rich.progress_bar
import rich.table
import rich.text

from tunix_like.runtime import console

Advance = Callable[..., None]
"""`f(done, note="")`: so many more are done, and what else there is to say of it."""

_SOON = 0.5
"""Seconds that a part of a longer task must have taken to be shown: shorter ones would flicker."""

_STEPS = 20
"""So many of the last steps say how long those to come will take."""


class _Task:
    def __init__(self, name: str, total: int | None, done: int) -> None:
        self.name, self.total, self.done, self.note = name, total, done, ""
        self.began = time.monotonic()
        self.marks = collections.deque([(self.began, done)], maxlen=_STEPS + 1)
        self.told = 0

    def advance(self, done: int, note: str = "") -> None:
        self.done, self.note, self.told = self.done + done, note, self.told + 1
        if self.told == 2:  # the first step, which compiles, tells nothing of those to come
            self.marks.popleft()
        self.marks.append((time.monotonic(), self.done))

    @property
    def count(self) -> str:
        if self.total is None:
            return f" {self.done}" if self.done else ""
        return f" {self.done}/{self.total}"

    def left(self, now: float) -> float | None:
        """Seconds to the end at the pace of the last `_STEPS` steps; the first, which compiles, counts while it is
        alone. What is under way now, however long, is taken to be over next."""
        marks = list(self.marks)  # another thread adds to them
        (first, before), (last, done) = marks[0], marks[-1]
        if self.total is None or done == before or done >= self.total:
            return None
        pace = (last - first) / (done - before)
        return pace * (self.total - done) - min(now - last, pace) or None


class _Display:
    """The tasks under way, outermost first, on the screen: of the first count, time and end, of its parts the count."""

    def __init__(self, lines: bool, every: float) -> None:
        self.tasks: list[_Task] = []
        self.compiling: tuple[str, float] | None = None
        self.every = every
        self._bar, self._lines = console.has_bottom_line(), lines
        self._live: rich.live.Live | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        if lines and not self._bar and not console.terminal().quiet:
            self._thread.start()

    def push(self, task: _Task) -> None:
        self.tasks.append(task)
        if self._bar and self._live is None:
            self._live = rich.live.Live(
                console=console.terminal(),
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),  # what goes into a file stays out of the screen
            )
            self._live.start()

    def pop(self, task: _Task) -> None:
        self.tasks.remove(task)
        self.compiling = None  # one that failed told no end
        if self._live is not None and not self.tasks:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def parts(self, now: float) -> str:
        """What of the outermost task is under way."""
        inner = [task for task in self.tasks[1:] if now - task.began >= _SOON]
        said = [f"{task.name}{task.count}" + (f", {task.note}" if task.note else "") for task in inner]
        if inner:
            said[-1] += f", {duration(now - inner[-1].began)}"
        if (compiling := self.compiling) is not None and now - compiling[1] >= _SOON:
            said.append(f"compiling {compiling[0]}, {duration(now - compiling[1])}")
        return " > ".join(said)

    def line(self, now: float) -> str:
        """All of it in a plain line."""
        task = self.tasks[0]
        left = task.left(now)
        said = f"{task.name}{task.count}, {duration(now - task.began)}" + (f", {task.note}" if task.note else "")
        said += "" if left is None else f", {duration(left)} left"
        return said + (f": {parts}" if (parts := self.parts(now)) else "")

    def tick(self) -> None:
        """Says the plain line if nothing was said for `every` seconds, and something has been under way as long."""
        now = time.monotonic()
        with contextlib.suppress(IndexError):  # the last task ended meanwhile
            if now - max(console.last_said(), self.tasks[0].began) >= self.every:
                console.say(self.line(now))

    def _tell(self) -> None:
        while not self._over.wait(min(1.0, self.every)):
            self.tick()

    def _render(self) -> rich.table.Table:
        now, grid = time.monotonic(), rich.table.Table.grid(padding=(0, 2, 0, 0))
        if not console.has_bottom_line():  # the terminal is gone, and a file has taken its place
            return grid
        for task in self.tasks[:1]:
            left = task.left(now)
            bar = rich.progress_bar.ProgressBar(task.total, task.done, width=20, pulse=task.total is None)
            times = duration(now - task.began) + ("" if left is None else f", {duration(left)} left")
            texts = [rich.text.Text(text) for text in (times, task.note, self.parts(now)) if text]
            grid.add_row(rich.text.Text(task.name + task.count), bar, *texts)
            for column in grid.columns:
                column.no_wrap, column.overflow = True, "ellipsis"
        return grid


_SHOWN: _Display | None = None


@contextlib.contextmanager
def shown(*, lines: bool = True, every: float = 30.0) -> Iterator[None]:
    """Shows the tasks that begin inside: on a terminal the line at the bottom, of which nothing stays.

    Args:
      lines: whether to say a plain line where there is no terminal.
      every: seconds without a word after which it is said.
    """
    global _SHOWN
    before, _SHOWN = _SHOWN, _Display(lines, every)
    try:
        yield
    finally:
        _SHOWN.close()
        _SHOWN = before


@contextlib.contextmanager
def task(name: str, total: int | None = None, done: int = 0) -> Iterator[Advance]:
    """Something that takes long, or a part of what is under way already.

    Args:
      total: how many things there are to do; None: not known, or one.
      done: how many of them are done already.
    """
    if (display := _SHOWN) is None:
        yield lambda done, note="": None
        return
    own = _Task(name, total, done)
    display.push(own)
    try:
        yield own.advance
    finally:
        display.pop(own)


def compiling(name: str | None) -> None:
    """A program of this name is being compiled from now on; None: no longer."""
    if _SHOWN is not None:
        _SHOWN.compiling = None if name is None else (name, time.monotonic())


def duration(seconds: float) -> str:
    """`12 s`, `4:05` (minutes), `1:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
