"""Chat templates, rendered in a process of their own that ends when one takes too much time or memory.

It knows the process and its answers (`template_worker.py`). It does NOT know what a template says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

REQUEST = struct.Struct("!Q")
"""In front of a request: its length in bytes."""

ANSWER = struct.Struct("!BQ")
"""In front of an answer: one of the statuses below, and its length in bytes."""

RENDERED, FAILED, TOO_LONG, NO_MEMORY = range(4)

_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tunix_like.data.template_worker import serve; serve(given['seconds'], given['memory'])"
)
"""What the interpreter is told to run (`-c`), with its settings as JSON: the modules that the run finds are found."""

SECONDS = 5.0
"""Processor time that one rendering may take; an ordinary one takes some 20 microseconds."""

MEMORY = 2 * 1024**3
"""Bytes of memory that the process may have."""

MOST = 10_000_000
"""Characters that a template may make beyond `GROWTH` times those of its values; a million tokens are about half."""

GROWTH = 8

_LIMITS = {
    TOO_LONG: f"it makes more than {MOST} characters",
    NO_MEMORY: f"it takes more than {MEMORY >> 30} GB of memory",
}
_WINDOW = 32_768
"""Bytes of requests under way, or half of what the pipe holds if that is less."""


class TemplateFailed(Exception):
    """A template that raised an exception, or took too much; the text says which."""


class _Worker:
    """The process; it is started with the first template, and ends with this one."""

    def __init__(self) -> None:
        settings = {"path": sys.path, "seconds": SECONDS, "memory": MEMORY}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what Python says of an end that is told here
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self.owner, self.seconds, self.window = os.getpid(), SECONDS, _WINDOW
        if hasattr(fcntl, "F_GETPIPE_SZ"):
            self.window = min(_WINDOW, fcntl.fcntl(self._stdin, fcntl.F_GETPIPE_SZ) // 2)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def answers(self, requests: Sequence[bytes]) -> Iterator[tuple[int, str]]:
        """Status and text of each answer, in order. The process works on the next request while the last answer is
        read; what it has not read yet fits into the pipe, so neither side waits for the other.

        Raises:
          TemplateFailed: the process ended at the request that would be answered next.
        """
        sent = waiting = 0  # requests; bytes that are sent and not answered
        try:
            for request in requests:
                while sent < len(requests) and (not waiting or waiting + len(requests[sent]) <= self.window):
                    self._write(requests[sent])
                    waiting += len(requests[sent])
                    sent += 1
                status, length = ANSWER.unpack(self._read(ANSWER.size))
                text = self._read(length).decode("utf-8", "surrogatepass")
                waiting -= len(request)
                yield status, text
        except (OSError, EOFError):
            raise TemplateFailed(self._how_it_ended()) from None

    def _write(self, request: bytes) -> None:
        rest = memoryview(request)
        while rest:
            rest = rest[self._stdin.write(rest) :]

    def _read(self, length: int) -> bytes:
        assert self.process.stdout is not None
        parts, missing = [], length
        while missing:
            if not (part := self.process.stdout.read(min(missing, 1 << 20))):
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _how_it_ended(self) -> str:
        status = self.process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self.seconds:g} seconds"
        return f"its process ended with status {status}; it may take more memory than there is"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


_lock = threading.Lock()
_worker: _Worker | None = None


def request(source: str, variables: Mapping[str, Any], size: int) -> bytes:
    """What `render` takes.

    Args:
      source: the template.
      variables: the names that it sees; plain values.
      size: characters that these hold.

    Raises:
      TemplateFailed: a value is none that another process can be told.
    """
    try:
        content = pickle.dumps((source, dict(variables), MOST + GROWTH * size), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # what a value's own class raises
        raise TemplateFailed(f"a value for it is no plain one: {error}") from error
    return REQUEST.pack(len(content)) + content


def render(requests: Sequence[bytes]) -> list[str | TemplateFailed]:
    """The texts of the first of `requests`, or why one failed: it raised an exception, or made too many characters
    (`MOST`). One that takes more than `SECONDS` or `MEMORY` is the last of the result; the others are to be asked for
    again."""
    global _worker
    done: list[str | TemplateFailed] = []
    with _lock:
        if _worker is not None and _worker.owner != os.getpid():  # after a fork: it is the other process's
            _worker = None
        if _worker is not None and _worker.process.poll() is not None:
            _forget()
        if _worker is None:
            _worker = _Worker()
        try:
            for status, text in _worker.answers(requests):
                done.append(text if status == RENDERED else TemplateFailed(_LIMITS.get(status, text)))
            return done
        except TemplateFailed as error:
            _forget()
            return [*done, error]
        except BaseException:  # also a signal's: what is still to come would be taken for the next answer
            _forget()
            raise


def _forget() -> None:
    global _worker
    if _worker is not None:
        _worker.kill()
    _worker = None
