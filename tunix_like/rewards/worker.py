"""The program of a worker: it calls reward functions for the process that started it.

It is started as a fresh interpreter, never forked, so it holds no lock, thread or device of the run, and nothing of the
user's script runs again. Requests and answers go over a socket; all that a function prints goes elsewhere. It knows how
a function is called. It does NOT know deadlines: the process that started it has them (`pool.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
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
"""In front of every message: its length in bytes."""

START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tunix_like.rewards.worker import serve; serve(given['socket'], given['places'], given['parent'])"
)
"""What the interpreter is told to run (`-c`), with its settings as JSON: the modules that the run finds are found."""

_PR_SET_PDEATHSIG = 1


def message(content: bytes) -> bytes:
    """The content with its length in front."""
    return HEADER.pack(len(content)) + content


def serve(number: int, places: list[str], parent: int) -> None:
    """Loads the functions at `places`, says so, and answers requests until the other side is gone.

    A request is a pickled `(place, name, arguments, count)`, an answer JSON:
    `{"rewards": [...], "failures": [[index, kind, reason], ...]}` or `{"error": text, "of_all": whether it is no single
    completion's fault}`.

    Args:
      number: file descriptor of the socket.
      parent: process that started this one.
    """
    _die_with(parent)
    faulthandler.enable()  # a crash in C says where
    channel, own = socket.socket(fileno=number), os.getpid()
    functions = {place: _load(place) for place in places}
    channel.sendall(message(b"{}"))
    while (length := _read(channel, HEADER.size)) is not None:
        request = _read(channel, HEADER.unpack(length)[0])
        if request is None:
            break
        answer = _answer(functions, request)
        if os.getpid() != own:
            os._exit(0)  # a function forked, and this is the child: the answer is its parent's to give
        channel.sendall(message(json.dumps(answer).encode()))


def _die_with(parent: int) -> None:
    """On Linux the kernel ends this process with its parent, even in the midst of a function; elsewhere it ends itself
    once the function returns. Where memory runs out it goes before the run does."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _load(place: str) -> Callable[..., Any] | str:
    """The function, or why there is none."""
    try:
        return load_function(place, "Reward")
    except BaseException as error:  # SystemExit too
        return explain(place, error)


def _answer(functions: Mapping[str, Callable[..., Any] | str], request: bytes) -> dict[str, Any]:
    name = "?"
    try:
        place, name, arguments, count = pickle.loads(request)
        function = functions[place]
        if isinstance(function, str):
            return {"error": f"Reward function '{name}' could not be loaded in a worker. {function}", "of_all": True}
        marks = call(name, function, arguments, count)
        failures = [[i, *failure] for i, failure in marks.failures.items()]
        return {"rewards": marks.rewards.tolist(), "failures": failures}
    except BaseException as error:  # sys.exit and KeyboardInterrupt too
        return {"error": explain(name, error), "of_all": isinstance(error, WrongCount)}


def _read(channel: socket.socket, length: int) -> bytes | None:
    """So many bytes, or None at the end."""
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
