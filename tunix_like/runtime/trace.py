"""Writes `trace.json`: when a run did what, as an array of Chrome trace events, for ui.perfetto.dev and
speedscope.

`writing` opens the file of a run. The other functions add events to it; they do nothing while no file is open. Times
are values of `time.perf_counter`; the file has microseconds of wall time, so the parts of a resumed run follow each
other.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger("tunix_like")

FILE = "trace.json"
EARLIER = "trace_earlier.json"

MOST_BYTES = 10_000_000
"""Size at which the file is renamed to `EARLIER`, which it replaces, so a long run keeps its newest events."""

_TRACKS = ("steps", "trainer", "rollouts ahead", "rewards ahead", "checkpoints", "compiler")
_GROUPS = ("run", "environment calls", "reward calls")
"""The groups of tracks. The first has `_TRACKS`; each of the others has as many as calls run at the same time. Numbers
of groups and tracks are fixed, because a resumed run appends to the file."""

_TAIL = 65_536
"""Bytes at the end of a file in which there is a whole event."""


class _Trace:
    """An open file. It is complete JSON after each write, so a killed run leaves a file that every reader accepts.
    Calls, of which there can be thousands a second, are written together, at the latest with the next activity."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._origin = time.time_ns() - time.perf_counter_ns()
        # The end of the last event of each track, with its number, in ascending order.
        self._ends: dict[str, list[tuple[int, int]]] = {group: [] for group in _GROUPS[1:]}
        self._trainer = threading.get_ident()
        self._warned = False
        self._unwritten: list[str] = []
        self._written = 0  # when, in microseconds
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        """Opens the file and cuts an incomplete last event."""
        self._named: set[tuple[int, int]] = set()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        start = max(os.fstat(self._file).st_size - _TAIL, 0)
        tail = os.pread(self._file, _TAIL, start)
        events = tail[: tail.rfind(b"\n")].rstrip(b",")
        self._end = start + len(events)  # of the last event
        if not events.endswith(b"}"):
            os.pwrite(self._file, b"[", 0)
            self._end = 1
        self._close_array()

    def _close_array(self) -> None:
        os.pwrite(self._file, b"\n]", self._end)
        os.ftruncate(self._file, self._end + 2)

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._stop()

    def _stop(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a full disk of a server can show only here
                os.close(self._file)
        self._file = -1

    def add(self, track: str | None, name: str, start: float, end: float, args: Mapping[str, int]) -> None:
        if track is None:
            own = threading.get_ident() == self._trainer
            track = "trainer" if own else threading.current_thread().name.partition("_")[0]
        if track in _TRACKS:  # other threads can overlap
            with self._lock:
                self._write(0, _TRACKS.index(track), track, name, self._time(start), self._time(end), args)

    def add_call(self, group: str, name: str, start: float, end: float, args: Mapping[str, int]) -> None:
        """Adds a call to the track of the group that has been free for the shortest time."""
        first = self._time(start)
        last = self._time(end)
        ends = self._ends[group]
        with self._lock:
            free = bisect.bisect_left(ends, (first + 1,))
            track = ends.pop(free - 1)[1] if free else len(ends)
            bisect.insort(ends, (last, track))
            self._write(_GROUPS.index(group), track, f"{group} {track + 1}", name, first, last, args)

    def _time(self, value: float) -> int:
        return (self._origin + int(value * 1e9)) // 1000

    def _write(
        self, group: int, track: int, title: str, name: str, first: int, last: int, args: Mapping[str, int]
    ) -> None:
        if self._file < 0:  # a thread of the run has outlived it
            return
        place = f'"pid":{group + 1},"tid":{100_000 * (group + 1) + track + 1}'
        if (group, track) not in self._named:
            self._named.add((group, track))
            for what, label in (("process_name", _GROUPS[group]), ("thread_name", title)):
                self._unwritten.append(f'{{"name":"{what}","ph":"M",{place},"args":{{"name":"{label}"}}}}')
        numbers = ",".join([f'"{key}":{value}' for key, value in args.items()])
        more = f',"args":{{{numbers}}}' if args else ""
        times = f'"ts":{first},"dur":{last - first}'
        self._unwritten.append(f'{{"name":{json.dumps(name)},"ph":"X",{place},{times}{more}}}')
        if group == 0 or last - self._written > 1_000_000:
            self._written = last
            self._flush()

    def _flush(self) -> None:
        lines = self._unwritten
        self._unwritten = []
        if not lines or self._file < 0:
            return
        data = ((",\n" if self._end > 1 else "\n") + ",\n".join(lines) + "\n]").encode()
        try:
            if os.fstat(self._file).st_size != self._end + 2:  # another run owns the folder, or a repair failed
                logger.warning("%s was changed by something else; it gets no more events", self._path)
                self._stop()
                return
            if os.pwrite(self._file, data, self._end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(data) - 2
            if self._end > MOST_BYTES:
                full = self._file
                self._path.replace(self._path.with_name(EARLIER))
                self._open()
                os.close(full)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._close_array()
            if not self._warned:
                logger.warning("%s cannot be written (%s), so it lacks events", self._path, error)
            self._warned = True
            self._named.clear()  # the names may be lost too


_trace: _Trace | None = None


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Context manager in which events are appended to the trace in `folder`; None writes nothing."""
    global _trace
    before = _trace
    opened = None
    if folder is not None:
        try:
            opened = _Trace(folder)
        except OSError as error:
            logger.warning("%s cannot be written: %s", folder / FILE, error)
    _trace = opened
    try:
        yield
    finally:
        _trace = before
        if opened is not None:
            opened.close()


def add(name: str, start: float, end: float, track: str | None = None, **args: int) -> None:
    """Adds an activity. Without `track`, the thread determines it: the one that called `writing`, or one with the name
    of a track. Events of a track must not overlap, except that one can lie within another."""
    if (trace := _trace) is not None:
        trace.add(track, name, start, end, args)


def add_call(group: str, name: str, start: float, end: float, *, failed: bool = False, **args: int) -> None:
    """Adds a call to a group of `_GROUPS`, in which calls can overlap. One that failed has another name, and so another
    color."""
    if (trace := _trace) is not None:
        trace.add_call(group, f"{name} failed" if failed else name, start, end, args)


@contextlib.contextmanager
def span(name: str, track: str | None = None, **args: int) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        add(name, start, time.perf_counter(), track, **args)
