"""The start of a process that runs foreign code, and the loop in which it answers calls.

Such a process is a new interpreter, or a fork of one (`fork_server.py`), and never a fork of the training process. It
therefore holds no lock, thread or device of the run, and does not run the user's script again. The training process
enforces deadlines (`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunix_like.workers.messages import message, receive

START = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from tunix_like.workers.child import main; main(start)"
)
"""Code that the interpreter of a process runs (`python -c`)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(start: Mapping[str, Any]) -> None:
    """Calls `main(channel, settings)` of the module `program`. The settings are the first message on the socket.

    Args:
      start: the name `program`, the file descriptor `socket`, and `parent`, the id of the process that started this
        one; this process ends when its parent ends.
    """
    die_with(start["parent"])
    with contextlib.suppress(OSError):  # the out-of-memory killer of Linux takes this process before the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()  # prints a traceback on a crash in C code
    channel = socket.socket(fileno=start["socket"])
    channel.set_inheritable(False)
    if (settings := receive(channel)) is not None:
        importlib.import_module(start["program"]).main(channel, json.loads(settings))


def send(channel: socket.socket, content: Mapping[str, Any]) -> None:
    channel.sendall(message(json.dumps(content).encode()))


def serve(
    channel: socket.socket,
    answer: Callable[[bytes], Mapping[str, Any]],
    failed: Callable[[BaseException], Mapping[str, Any]],
) -> None:
    """Answers calls until the socket is closed.

    Args:
      answer: called with a pickled request; returns the answer, which JSON must be able to represent.
      failed: returns the answer if `answer` raised an exception.
    """
    own = os.getpid()
    while (request := receive(channel)) is not None:
        try:
            content = json.dumps(answer(request)).encode()
        except BaseException as error:  # includes SystemExit and KeyboardInterrupt
            content = json.dumps(failed(error)).encode()
        if os.getpid() != own:
            os._exit(0)  # the user's code has forked, and this is the child; only its parent answers
        channel.sendall(message(content))


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel of Linux send this process the signal `how` when its parent ends, even during a call. On other
    systems this function does nothing, and the process exits after its current call."""
    if sys.platform != "linux":
        return
    _libc().prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Makes this process the new parent of all its descendants whose parent has ended (Linux only)."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # loaded once, because forked processes inherit it
