"""Replaces standard output and standard error by streams that never raise.

A write fails if the reader has exited (`| head`), the terminal was closed or the disk is full. A run continues, and
writes to `output.log` in its folder instead. Another command exits, because its output is its result.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
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
"""Exit status of a command whose reader has exited, as of a tool that SIGPIPE ends."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a later write can succeed

_streams: list[_Stream] = []
_continue_on_error = False
_file: Path | None = None


class Unread(SystemExit):
    """The program that reads the standard output has exited."""

    def __init__(self) -> None:
        super().__init__(EXIT_UNREAD)


class _Unwritten(UserError):
    status = 74


class _Stream(io.RawIOBase):
    """A stream whose writes never raise. `error` is why the last write failed; None if it succeeded."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._name = name
        self._number = number
        self._moved = False

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        text = rest = bytes(data)
        while rest:
            try:
                rest = rest[os.write(self._number, rest) :]
                self.error = None
            except BlockingIOError:  # a non-blocking stream that another process has filled
                time.sleep(0.01)
            except OSError as error:
                if not self._move(error):
                    self.error = error
                    break  # the rest is lost
        return len(text)

    def _move(self, error: OSError) -> bool:
        """Redirects the descriptor to `output.log`. Returns False if that cannot be done or the disk is full."""
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


def guard() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams that never raise, unless a test or a notebook has replaced
    them. A closed descriptor (0, 1 or 2) is opened, because a later file would otherwise get its number and the
    output."""
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


def set_continue_on_error(value: bool) -> None:
    """Sets whether the process continues after a failed write, as a run does. If not, `check` raises an error."""
    global _continue_on_error
    _continue_on_error = value


def set_fallback_folder(folder: Path) -> None:
    """Sets the folder of `output.log`, which receives the output after a write has failed."""
    global _file
    _file = folder / FILE


def check() -> None:
    """Raises an error if standard output cannot be written: `Unread`, or a UserError of status 74. Does nothing in a
    run, which continues, and nothing outside the main thread."""
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
    """Writes a text to standard error without a lock, which the code that a signal interrupted may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
