"""Reward functions that fail in different ways when a completion names the failure. The reward of every other
completion is its length. `test_pool.py` runs them in workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

LOCK = threading.Lock()
LEAKED = []


def _hang():
    time.sleep(1000)


def _spin():
    9**9**9  # runs in C, without checks for signals or other threads


def _child():
    """Starts a child program that hangs, and hangs too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path("child").write_text(str(child.pid))
    time.sleep(1000)


def _daemon():
    """Starts a daemon: a program in a session of its own, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        pathlib.Path("daemon").write_text(str(daemon.pid))
        os._exit(0)
    while not pathlib.Path("daemon").exists() or not pathlib.Path("daemon").read_text():
        time.sleep(0.01)
    return 5.0


def _daemon_and_exit():
    _daemon()
    os._exit(3)


def _fork():
    """Forks. The child would continue in place of the worker."""
    if os.fork() == 0:
        return 77.0
    time.sleep(0.1)
    return 1.0


def _flood():
    for _ in range(3000):
        print("x" * 1000)
        print("y" * 10, file=sys.stderr)
    return 4.0


def _grow():
    held = bytearray()
    while len(held) < 500_000_000:
        held += b"x" * 50_000_000
    time.sleep(1000)


def _close():
    os.closerange(3, 1000)


def _write(content):
    """Returns a deed that writes bytes to the sockets of the process."""

    def deed():
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    os.write(int(entry), content)

    return deed


DEEDS = {
    "hang": _hang,
    "spin": _spin,
    "child": _child,
    "raise": lambda: {}["no such key"],
    "exit": lambda: sys.exit("leaving"),
    "os._exit": lambda: os._exit(3),
    # A process that a shell started in the background ignores the signal.
    "interrupt": lambda: (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.raise_signal(signal.SIGINT),
    ),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "recursion": lambda: _recursion(),
    "grow": _grow,
    "close": _close,
    "lock": LOCK.acquire,
    "deadlock": lambda: LOCK.acquire() and LOCK.acquire(),
    "text": lambda: "1",
    "infinite": lambda: float("inf"),
    "garbage": _write(b"\x00" * 8 + b"garbage!"),
    "answer": _write((16).to_bytes(8, "big") + b'{"rewards": "x"}'),
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "fork": _fork,
    "daemon": _daemon,
    "daemon and exit": _daemon_and_exit,
    "flood": _flood,
}


def _recursion():
    return [_recursion()]


def deed(prompts, completions, **_):
    """Returns the length of each completion. If a completion is the name of a failure, runs that failure instead."""
    return [DEEDS[text]() if text in DEEDS else len(text) for text in completions]


def too_few(completions):
    return [1.0] * (len(completions) - ("few" in completions))


def no_list(completions):
    return 1.0


def printing(completions):
    print("one line of mine")
    return [float(len(text)) for text in completions]


def ragged(completions):
    """Prints each completion as a line, a few bytes at a time. The last line of a call has no line end."""
    for i, text in enumerate(completions):
        line = f"<{text}>".encode() + b"\n" * (i + 1 < len(completions))
        for start in range(0, len(line), 3):
            os.write(1 + start % 2, line[start : start + 3])
            time.sleep(0.002)
    return [1.0] * len(completions)


def quotes(completions):
    """Raises an error that contains the completion."""
    raise ValueError(f"cannot read {completions[0]}")


def leaking(completions):
    """Keeps 30 MB per call, and returns the id of its process."""
    LEAKED.append(bytearray(os.urandom(1)) * 30_000_000)
    return [float(os.getpid())] * len(completions)


def compares(completions):
    """Returns for each completion how many of the given completions are not longer."""
    return [float(sum(len(other) <= len(text) for other in completions)) for text in completions]


def light(completions):
    """Returns 1 if the worker has not imported heavy libraries and its standard input is empty."""
    heavy = {"jax", "flax", "torch", "transformers"} & set(sys.modules)
    return [float(not heavy and sys.stdin.read() == "" and os.environ["JAX_PLATFORMS"] == "cpu")] * len(completions)


def nested(completions, extra):
    """Returns the sums of the numbers in a column of nested values."""
    return [float(sum(each["numbers"])) for each in extra]


def parity(completions, hang):
    """Returns 1 for an odd length, else 0. Hangs at the completion that the column `hang` names."""
    for text, named in zip(completions, hang, strict=True):
        if text == named:
            _hang()
    return [float(len(text) % 2) for text in completions]


def raises(completions):
    raise ZeroDivisionError("no verifier")


async def later(prompts, completions, **columns):
    return [len(completion) for completion in completions]
