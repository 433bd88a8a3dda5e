"""The program of a worker process. It calls reward functions on request of the process that started it.

A worker is a new interpreter and never a fork. It therefore holds no lock, thread or device of the run, and it does not
run the user's script again. Requests and answers use a socket that is separate from stdout and stderr. The parent
process enforces the deadlines (`pool.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunix_like.rewards.calls import WrongCount, call, explain
from tunix_like.runtime.user_code import load_function

HEADER = struct.Struct("!Q")
"""Header of every message, which contains the length of the message in bytes."""

START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tunix_like.rewards.worker import serve; serve(given['socket'], given['places'], given['parent'])"
)
"""Code that the interpreter of a worker runs (`python -c`). The settings are passed as JSON and include the `sys.path`
of the run."""

_PR_SET_PDEATHSIG = 1


def message(content: bytes) -> bytes:
    """Returns `content` with a header in front, which contains the length of `content` in bytes."""
    return HEADER.pack(len(content)) + content


def serve(number: int, places: list[str], parent: int) -> None:
    """Loads the functions at `places`, sends `{}` when ready, and answers requests until the socket is closed.

    A request is a pickled `(place, name, arguments, count)`. An answer is JSON:
    `{"rewards": [...], "failures": [[index, kind, reason], ...]}` or `{"error": text, "of_all": whether the error
    concerns all completions of the call}`.

    Args:
      number: file descriptor of the socket.
      places: locations of the functions, as `place_of` returns them.
      parent: process id of the parent; this process ends when its parent ends.
    """
    die_with(parent)
    go_first()
    faulthandler.enable()  # prints a traceback on a crash in C code
    channel, own = socket.socket(fileno=number), os.getpid()
    functions = {place: _load(place) for place in places}
    channel.sendall(message(b"{}"))
    while (length := read_exactly(channel, HEADER.size)) is not None:
        request = read_exactly(channel, HEADER.unpack(length)[0])
        if request is None:
            break
        answer = _answer(functions, request)
        if os.getpid() != own:
            os._exit(0)  # the function has forked, and this is the child; only the parent sends the answer
        channel.sendall(message(json.dumps(answer).encode()))


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Makes this process end when its parent ends. On Linux, the kernel kills this process at once, even during a call.
    On other systems this function does nothing, and the process exits after its current call.

    Args:
      how: the signal with which the kernel ends this process.
    """
    if sys.platform != "linux":
        return
    process_control(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(0)


def go_first() -> None:
    """Makes the out-of-memory killer of Linux kill this process and its forks before the main process of the run."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def process_control(option: int, value: int) -> None:
    """Calls the function `prctl` of Linux, which changes a setting of this process."""
    _libc().prctl(option, value)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # loaded once, because forked processes inherit it


def _load(place: str) -> Callable[..., Any] | str:
    """Loads the reward function at `place`, such as `FILE.py:function`. Returns the function, or a text with the reason
    why it could not be loaded."""
    try:
        return load_function(place, "Reward")
    except BaseException as error:  # includes SystemExit
        return explain(place, error)


def _answer(functions: Mapping[str, Callable[..., Any] | str], request: bytes) -> dict[str, Any]:
    name = "?"
    try:
        place, name, arguments, count = pickle.loads(request)
        function = functions[place]
        if isinstance(function, str):
            return {"error": f"Reward function '{name}' could not be loaded in a worker. {function}", "of_all": True}
        results = call(name, function, arguments, count)
        failures = [[i, *failure] for i, failure in results.failures.items()]
        return {"rewards": results.rewards.tolist(), "failures": failures}
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt
        return {"error": explain(name, error), "of_all": isinstance(error, WrongCount)}


def send_pending(channel: socket.socket, content: bytes) -> bytes:
    """Sends as much of `content` as a non-blocking socket accepts, and returns the rest.

    Raises:
      OSError: the other end is closed.
    """
    while content:
        try:
            content = content[channel.send(content) :]
        except BlockingIOError:
            break
    return content


def read_exactly(channel: socket.socket, length: int) -> bytes | None:
    """Reads exactly `length` bytes from a socket. Returns None if the other end is closed before all bytes arrive."""
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
