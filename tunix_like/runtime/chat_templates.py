"""Renders chat templates in a separate process (`template_worker.py`) with a limit on time and memory."""

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
from typing import IO, TYPE_CHECKING, Any

from tunix_like.errors import UserError

if TYPE_CHECKING:
    from tunix_like.types import Message

REQUEST = struct.Struct("!Q")
"""Header of a request, which contains the length of the request in bytes."""

ANSWER = struct.Struct("!BQ")
"""Header of an answer: a status (`RENDERED`, `FAILED`, `TOO_LONG` or `NO_MEMORY`), and the length of the answer's text
in bytes."""

RENDERED, FAILED, TOO_LONG, NO_MEMORY = range(4)

_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tunix_like.runtime.template_worker import serve; serve(given['seconds'], given['memory'])"
)
"""Code that the rendering process runs (`python -c`). The settings are passed as JSON and include the `sys.path` of the
run."""

SECONDS = 5.0
"""CPU time limit of one rendering; a typical rendering takes about 20 microseconds."""

MEMORY = 2 * 1024**3
"""Memory limit of the rendering process in bytes."""

MOST = 10_000_000
"""A rendered text may have at most `MOST` characters, plus `GROWTH` times the number of characters in the inserted
values. A million tokens have about 5 million characters."""

GROWTH = 8

_LIMITS = {
    TOO_LONG: f"it renders more than {MOST} characters",
    NO_MEMORY: f"it takes more than {MEMORY >> 30} GB of memory",
}
_WINDOW = 32_768
"""Maximum total size in bytes of the requests that are sent but not yet answered. The maximum is half of the pipe's
capacity if that is smaller."""


class TemplateFailed(Exception):
    """A template raised an exception or exceeded a limit. The message gives the reason."""


class _Worker:
    """The process that renders templates. The first call of `render` starts it, and it ends when the run ends."""

    def __init__(self) -> None:
        settings = {"path": sys.path, "seconds": SECONDS, "memory": MEMORY}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # how the process ends is reported by `_how_it_ended`
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only the main process
        )
        self.owner, self.seconds, self.window = os.getpid(), SECONDS, _WINDOW
        if hasattr(fcntl, "F_GETPIPE_SZ"):
            self.window = min(_WINDOW, fcntl.fcntl(self._stdin, fcntl.F_GETPIPE_SZ) // 2)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def answers(self, requests: Sequence[bytes]) -> Iterator[tuple[int, str]]:
        """Sends requests and yields the status and the text of each answer, in the order of the requests.

        Several requests are sent ahead, so that the process renders the next request while this method reads an answer.
        A request is sent ahead only if all unanswered requests fit into the pipe to the process together. Otherwise
        both processes could block.

        Raises:
          TemplateFailed: the process ended before it answered a request.
        """
        sent = waiting = 0  # number of sent requests; bytes of sent requests without an answer
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
        return f"its process ended with status {status}; it may need more memory than is available"

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
    """Builds a request to render a chat template, for the function `render`.

    Args:
      source: the template.
      variables: maps the names of the template's variables to plain values, such as texts, lists and dicts.
      size: total number of characters of the values in `variables`.

    Raises:
      TemplateFailed: a value cannot be pickled.
    """
    try:
        content = pickle.dumps((source, dict(variables), MOST + GROWTH * size), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the class of a value may raise anything
        raise TemplateFailed(f"one of its values cannot be pickled: {error}") from error
    return REQUEST.pack(len(content)) + content


def render(requests: Sequence[bytes]) -> list[str | TemplateFailed]:
    """Renders chat templates in a separate process. Returns, for each request, the rendered text or a `TemplateFailed`.

    If the process ends during a request, for example after more than `SECONDS` of CPU time, the returned list ends with
    the failure of this request. The caller must then send the later requests again.
    """
    global _worker
    done: list[str | TemplateFailed] = []
    with _lock:
        if _worker is not None and _worker.owner != os.getpid():  # after a fork, the worker is the parent's
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
        except BaseException:  # also signals; otherwise the next request would read a late answer
            _forget()
            raise


def _forget() -> None:
    global _worker
    if _worker is not None:
        _worker.kill()
    _worker = None


def template_error(turns: Sequence[Mapping[str, Any]], failure: Exception) -> UserError:
    """Returns the error to raise if the chat template failed on a conversation."""
    roles = [str(turn["role"]) for turn in turns]
    cure = " If it rejects system messages, unset data.system_prompt and put its text into data.prompt_template."
    return UserError(
        f"The tokenizer's chat template failed on a conversation ({', '.join(roles)}): "
        f"{failure}.{cure if 'system' in roles else ''}"
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checks that each message has a role and a content. Returns the messages as plain dicts, because a template must
    receive ordinary JSON values."""
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise UserError(f"Message {position} of a prompt must have 'role' and 'content'; it is {message!r}.")
    return [dict(message) for message in messages]
