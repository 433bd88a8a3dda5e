"""Standard output and standard error of a command. A write to them never raises and never stops a run.

A reader that ended (`| head`), a closed terminal and a full disk fail a write; a paused terminal blocks it. A run goes
on: text that cannot be written is kept and written later, or goes to a file of the run folder. A command whose output
is its result ends. This module knows file descriptors. It does NOT know what is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError

FILE = "output.log"
"""File in the run folder that takes the output once its own stream is gone."""

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit status of a command whose output nobody reads any more; shells report the same for `seq 99999 | head -1`."""

PATIENCE = 1.0
"""Seconds that a run waits for a stream that is blocked, before it goes on without."""

KEPT = 1 << 20
"""Bytes of unwritten text that are kept, for each stream; of more the oldest are dropped."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a later write can succeed

_PART = 4096  # bytes that a pipe takes without blocking once select reports it ready (PIPE_BUF)
_PART_OF_TERMINAL = 64  # a terminal is ready when it has room for 256 bytes, and makes two of each line break

_lock = threading.RLock()
_streams: list[_Stream] = []
_goes_on = False
_file: Path | None = None


class Unread(SystemExit):
    """The reader of standard output has ended."""

    def __init__(self) -> None:
        super().__init__(EXIT_UNREAD)


class _Unwritten(UserError):
    """Standard output cannot be written for another reason."""

    status = 74


class _Stream(io.RawIOBase):
    """A descriptor that is written to without raising.

    Attributes:
      error: why the last write failed; None: it succeeded.
    """

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._name, self._number = name, number
        self._waiting, self._dropped = bytearray(), 0
        self._blocked = self._moved = False

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        text = bytes(data)
        with _lock:
            self._waiting += text
            patience = 0.0 if self._blocked else PATIENCE
            self.drain(patience if _goes_on else None)
            self._drop_oldest()
        return len(text)

    def drain(self, patience: float | None) -> None:
        """Writes what is waiting, unless the stream is blocked for `patience` seconds (None: waits for ever) or
        fails."""
        with _lock:
            while self._waiting:
                try:
                    if not select.select([], [self._number], [], patience)[1]:
                        self._blocked = True
                        return
                    part = _PART_OF_TERMINAL if self.isatty() else _PART
                    written = os.write(self._number, self._waiting[:part])
                except BlockingIOError:  # non-blocking, and another process was faster
                    time.sleep(0.01)
                    continue
                except OSError as error:
                    self.error = error
                    if self._move(error):
                        continue
                    return
                self._blocked, self.error = False, None
                del self._waiting[:written]

    def _move(self, error: OSError) -> bool:
        """Connects the descriptor to the file of the run; False where that is not possible or not needed."""
        if _file is None or self._moved or error.errno in _FULL:
            return False
        try:
            file = os.open(_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            return False
        os.dup2(file, self._number)  # what C code prints goes there too
        os.close(file)
        self._moved = True
        said = f"WARNING: {self._name} cannot be written ({error.strerror}): what follows goes to {_file}\n"
        for stream in _streams:
            if stream is not self:
                stream.write(said.encode())
        return True

    def _drop_oldest(self) -> None:
        excess = len(self._waiting) - KEPT
        if excess > 0:
            # By halves, since each cut copies what is left; at the end of a line where there is one.
            end = self._waiting.find(b"\n", excess + KEPT // 2) + 1 or len(self._waiting)
            self._dropped += end
            self._waiting[:end] = f"\n[{self._dropped} bytes of output could not be written and are lost]\n".encode()


def guard() -> None:
    """Replaces the interpreter's own two streams; others (of a test, of a notebook) stay.

    A descriptor that is closed is connected to /dev/null: a file that is opened later would get its number, and with
    it what is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name, words, number in (("stdout", "standard output", 1), ("stderr", "standard error", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            raw = _Stream(words, number)
            _streams.append(raw)
            encoding = getattr(stream, "encoding", None) or "utf-8"
            setattr(sys, name, io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that its encoding lacks must not end a run
    if _streams:
        atexit.register(_last_drain)


def go_on(run: bool) -> None:
    """Says what a failed or blocked write means: a run goes on; any other command waits, or ends at `check`."""
    global _goes_on
    _goes_on = run


def keep_in(folder: Path) -> None:
    """From here on, and for what is still unwritten, a stream that is gone is replaced by a file in `folder`."""
    global _file
    _file = folder / FILE


def check() -> None:
    """Ends a command whose output is its result when that output cannot be written. Returns for a run, and in threads
    other than the main one.

    Raises:
      Unread: its reader has ended.
      UserError: it cannot be written for another reason, such as a full disk.
    """
    if _goes_on or threading.current_thread() is not threading.main_thread():
        return
    error = next((stream.error for stream in _streams if stream.fileno() == 1), None)
    if isinstance(error, BrokenPipeError):
        raise Unread
    if error is not None:
        raise _Unwritten(f"standard output cannot be written ({error.strerror}): write it to another place.")


def finish() -> None:
    """Writes what is left of the last line. Raises what `check` raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    check()


def from_handler(text: str) -> None:
    """Writes to standard error at once or not at all: a signal handler must not wait, and must not take a lock that
    the code it interrupts may hold."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _last_drain() -> None:
    for stream in _streams:
        stream.drain(PATIENCE)


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
