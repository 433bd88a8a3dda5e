"""Sends calls over a socket to an environment that runs in another process, and reads and checks the answers."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import socket
from collections.abc import Mapping
from typing import Any, get_args

from tunix_like.errors import UserError
from tunix_like.rewards.calls import Failure, FailureKind
from tunix_like.rewards.worker import HEADER, message, send_pending
from tunix_like.rollout.environments.outcomes import Outcome
from tunix_like.rollout.environments.results import (
    MOST_CHARACTERS,
    checked_number,
    checked_observation,
    checked_step,
    show,
)

MOST_ANSWER = 16 * MOST_CHARACTERS
"""Maximum size in bytes of an answer from the process of an environment. That process cuts observations, so every valid
answer is smaller."""

_READ = 1 << 20


class Answered(Exception):
    """The process of an environment sent bytes that are not a valid answer. The error message shows the first bytes."""


class Caller:
    """The connection to the process that runs the environment of one trajectory, and the current call to this process.

    Attributes:
      number: the number of the trajectory, as in `Environments`.
      serial: the number of the process. No other process of the `EnvironmentPool` has this number.
      channel: the socket to the process; None before `connect` is called.
      pid: the operating system's id of the process; None until the start of the process is reported.
      what: the current or last call: `reset`, `step` or `finish`.
      given, deadline: start and deadline of the current call, as values of `time.monotonic`.
      closed: whether the process has closed its end of the socket.
      ended: how the process ended, such as "ended with status 1"; None while no end of the process is reported.
    """

    def __init__(self, number: int, serial: int):
        self.number, self.serial = number, serial
        self.channel: socket.socket | None = None
        self.pid: int | None = None
        self.what, self.given, self.deadline = "reset", 0.0, 0.0
        self.closed = False
        self.ended: str | None = None
        self.out, self._in = b"", bytearray()

    def connect(self) -> socket.socket:
        """Makes a pair of connected sockets. Keeps one socket as `channel`, and returns the other one, which is for the
        process of the environment.

        Raises:
          UserError: the system allows no more open files.
        """
        self.channel, theirs = _socket_pair()
        self.channel.setblocking(False)
        return theirs

    def call(self, what: str, request: bytes) -> None:
        """Prepares the call `what` (`reset`, `step` or `finish`). `pump` later sends `request`, the content of the
        call."""
        self.what, self.out = what, message(request)

    def pump(self) -> Outcome | Failure | None:
        """Sends and receives bytes on the socket to the environment's process, without blocking. Returns the outcome or
        the failure of the current call, or None if this call has not ended.

        Raises:
          Answered: the bytes that arrived are not a valid answer.
        """
        assert self.channel is not None
        try:
            self.out = send_pending(self.channel, self.out)
        except OSError:
            self.closed = True
        try:
            while len(self._in) <= MOST_ANSWER and (part := self.channel.recv(_READ)):
                self._in += part
            self.closed = self.closed or len(self._in) <= MOST_ANSWER
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return self._read()

    def _read(self) -> Outcome | Failure | None:
        if len(self._in) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._in)[0]
        if end > MOST_ANSWER:
            raise Answered(f"sent {show(bytes(self._in[:60]))}, which is not an answer")
        if len(self._in) < end:
            return None
        content = bytes(self._in[HEADER.size : end])
        del self._in[:end]
        try:
            answer = json.loads(content)
            if "error" in answer:
                return failure_in(answer)
            return self._outcome(answer)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Answered(f"sent {show(content[:60])}, which is not an answer") from None

    def _outcome(self, answer: dict[str, Any]) -> Outcome:
        """Converts an answer of an environment's process to an `Outcome`, and checks the answer. That process has
        checked it before, but user code in that process can also write to the socket."""
        if self.what == "reset":
            return Outcome(self.number, checked_observation(answer["observation"], "reset"))
        if self.what == "finish":
            return Outcome(self.number, reward=checked_number(answer["reward"], "finish"))
        fields = tuple(answer[name] for name in ("observation", "reward", "done", "info"))
        return Outcome(self.number, *checked_step(fields, "step"))

    def close(self) -> None:
        """Closes the socket to the process of the environment."""
        if self.channel is not None:
            self.channel.close()


def failure_in(answer: Mapping[str, Any]) -> Failure:
    """Returns the failure that the answer of an environment's process reports."""
    kinds: tuple[FailureKind, ...] = get_args(FailureKind)
    kind = [each for each in kinds if each == answer.get("kind")]  # the user's code can write to the socket
    return Failure(kind[0] if kind else "error", str(answer["error"]))


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Makes a pair of connected sockets. If this process has reached its soft limit of open files, first increases the
    soft limit to the hard limit."""
    try:
        return socket.socketpair()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return socket.socketpair()
    except OSError as error:
        raise UserError(
            f"Environments: no more files can be opened ({error.strerror}; the limit is {soft}). Each trajectory needs "
            "one; raise the limit with 'ulimit -n', or use fewer trajectories per step."
        ) from error
