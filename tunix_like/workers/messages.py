"""The form of messages between the training process and the processes that it starts for foreign code.

A message is a header with the length of its content in bytes, and the content. Requests of calls are pickled tuples,
which only the started processes unpickle. All other messages are JSON objects.
"""

from __future__ import annotations

import json
import pickle
import selectors
import socket
import struct
from typing import Any

from tunix_like.errors import UserError

HEADER = struct.Struct("!Q")

MOST_ANSWER = 64_000_000
"""Maximum size of an answer in bytes. Processes shorten long texts, so every valid answer is smaller."""

_READ = 1 << 14  # a buffer of this size is allocated for each answer


class Lost(Exception):
    """A process has ended, or has sent bytes that are not a message."""


def message(content: bytes) -> bytes:
    return HEADER.pack(len(content)) + content


def packed(request: tuple[Any, ...], subject: str, cure: str) -> bytes:
    """Pickles the request of a call.

    Raises:
      UserError: a value cannot be pickled. The message begins with `subject` and ends with `cure`.
    """
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise UserError(
            f"{subject} cannot be sent to its process ({type(error).__name__}: {error}); {cure}."
        ) from error


def receive(channel: socket.socket) -> bytes | None:
    """Waits for the next message on a blocking socket. Returns its content, or None if the other end is closed."""
    length = _read_exactly(channel, HEADER.size)
    return None if length is None else _read_exactly(channel, HEADER.unpack(length)[0])


def _read_exactly(channel: socket.socket, length: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Connection:
    """Sends and receives messages on a socket without blocking.

    Attributes:
      most: maximum size in bytes of a received message.
      closed: whether the other end is closed.
    """

    def __init__(self, channel: socket.socket, most: int):
        channel.setblocking(False)
        self.channel = channel
        self.most = most
        self.closed = False
        self._out, self._in = bytearray(), bytearray()

    def send(self, content: bytes) -> None:
        """Sends as much of a message as the socket accepts. `receive` sends the rest."""
        self._out += message(content)
        self.flush()

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None if it has not arrived completely.

        Raises:
          Lost: the bytes that arrived are not a JSON object, or the message is too long.
        """
        self.flush()
        try:
            while len(self._in) <= self.most:
                part = self.channel.recv(_READ)
                self._in += part
                if len(part) < _READ:
                    self.closed = self.closed or not part
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        if len(self._in) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._in)[0]
        if end > self.most:
            raise Lost(f"its process sent {bytes(self._in[:60])!r}, which is not an answer")
        if len(self._in) < end:
            return None
        content = bytes(self._in[HEADER.size : end])
        del self._in[:end]
        try:
            return dict(json.loads(content))
        except (ValueError, TypeError, RecursionError):
            raise Lost(f"its process sent {content[:60]!r}, which is not an answer") from None

    def register(self, selector: selectors.BaseSelector, data: Any) -> None:
        """Makes a `select` return as soon as `receive` can send or read bytes."""
        if not self.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            selector.register(self.channel, events, data)

    def has_part(self) -> bool:
        """Returns whether a message has arrived in part."""
        return bool(self._in)

    def is_quiet(self) -> bool:
        """Returns whether the other end is open and has sent nothing that was not read."""
        try:
            self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._in and not self.closed
        except OSError:
            pass
        return False

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.channel.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
