"""Replaces standard output and standard error by streams that never raise and never stop a run.

A write fails if the reader has exited (`| head`), the terminal was closed or the disk is full. A write blocks if the
terminal is paused. In both cases a run continues. The unwritten text is kept and written later, or written to a file in
the run folder. Commands other than a run exit if a write fails, because their output is their result.
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
"""File in the run folder that receives the output after standard output or standard error has failed."""

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit status of a command if the program that reads its output has exited. Shells use the same status (128 +
SIGPIPE)."""

PATIENCE = 1.0
"""Seconds that a run waits for a blocked stream before it continues."""

KEPT = 1 << 20
"""Maximum number of bytes of unwritten text that are kept per stream. If there are more, the oldest bytes are
dropped."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a later write can succeed

_PART = 4096  # bytes that a pipe accepts without blocking if select reports that it is ready (PIPE_BUF)
_PART_OF_TERMINAL = 64  # a ready terminal accepts 256 bytes; a line break counts as two

_lock = threading.RLock()
_streams: list[_Stream] = []
_continue_on_error = False
_file: Path | None = None


class Unread(SystemExit):
    """The program that reads the standard output has exited."""

    def __init__(self) -> None:
        super().__init__(EXIT_UNREAD)


class _Unwritten(UserError):
    """Writing to standard output failed, for example because the disk is full. If the program that reads the output has
    exited, `Unread` is raised instead."""

    status = 74


class _Stream(io.RawIOBase):
    """A stream on a file descriptor whose writes never raise.

    Attributes:
      error: why the last write failed; None if it succeeded.
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
            self.drain(patience if _continue_on_error else None)
            self._drop_oldest()
        return len(text)

    def drain(self, patience: float | None) -> None:
        """Writes the text that is not written yet. Returns early if a write fails, or if the stream is blocked for
        `patience` seconds (None: no time limit)."""
        with _lock:
            while self._waiting:
                try:
                    if not select.select([], [self._number], [], patience)[1]:
                        self._blocked = True
                        return
                    part = _PART_OF_TERMINAL if self.isatty() else _PART
                    written = os.write(self._number, self._waiting[:part])
                except BlockingIOError:  # a non-blocking stream that another process has filled meanwhile
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
        """Redirects the stream's descriptor to `output.log` in the run folder. Returns False without redirecting if no
        folder is set, if the file cannot be opened, if the descriptor is redirected already, or if the disk is full."""
        if _file is None or self._moved or error.errno in _FULL:
            return False
        try:
            file = os.open(_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            return False
        os.dup2(file, self._number)  # redirects the output of C code too
        os.close(file)
        self._moved = True
        warning = f"WARNING: {self._name} cannot be written ({error.strerror}): further output goes to {_file}\n"
        for stream in _streams:
            if stream is not self:
                stream.write(warning.encode())
        return True

    def _drop_oldest(self) -> None:
        excess = len(self._waiting) - KEPT
        if excess > 0:
            # Drops half of the buffer at once, because each cut copies the rest. Cuts at a line break if there is one.
            end = self._waiting.find(b"\n", excess + KEPT // 2) + 1 or len(self._waiting)
            self._dropped += end
            self._waiting[:end] = f"\n[{self._dropped} bytes of output could not be written and are lost]\n".encode()


def guard() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams that never raise.

    A stream that a test or a notebook has already replaced is kept. A closed descriptor (0, 1 or 2) is connected to
    /dev/null, because a file that is opened later would otherwise get its number and receive the output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`
    for name, words, number in (("stdout", "standard output", 1), ("stderr", "standard error", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            raw = _Stream(words, number)
            _streams.append(raw)
            encoding = getattr(stream, "encoding", None) or "utf-8"
            setattr(sys, name, io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the encoding lacks must not stop a run
    if _streams:
        atexit.register(_last_drain)


def set_continue_on_error(value: bool) -> None:
    """Sets how failed or blocked writes are handled.

    Args:
      value: whether the process continues after a failed or blocked write, as a run does. If False, the process waits
        for a blocked stream, and `check` raises an error after a failed write.
    """
    global _continue_on_error
    _continue_on_error = value


def set_fallback_folder(folder: Path) -> None:
    """Sets the folder of `output.log`. If standard output or standard error fails, its unwritten and later text is
    written to this file."""
    global _file
    _file = folder / FILE


def check() -> None:
    """Raises an error if standard output cannot be written. Does nothing in a run, which continues after a failed
    write, and nothing outside the main thread.

    Raises:
      Unread: the reader of the output has exited.
      UserError: the output cannot be written for another reason, such as a full disk.
    """
    if _continue_on_error or threading.current_thread() is not threading.main_thread():
        return
    error = next((stream.error for stream in _streams if stream.fileno() == 1), None)
    if isinstance(error, BrokenPipeError):
        raise Unread
    if error is not None:
        raise _Unwritten(f"standard output cannot be written ({error.strerror}): redirect it to another file.")


def finish() -> None:
    """Flushes standard output and standard error. Then raises the error of a failed write (see `check`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    check()


def from_handler(text: str) -> None:
    """Writes a text to standard error, or drops it if the write would block. For signal handlers, which must not wait
    and must not take a lock that the interrupted code may hold."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _last_drain() -> None:
    for stream in _streams:
        stream.drain(PATIENCE)


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent can have held the lock
