"""An environment for `test_pool.py`, which runs it in separate processes. Some turns name a fault, which the
environment then causes. Every other turn is answered with its length."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

np.random.seed(0)  # the state that all children would start with


def _hang():
    time.sleep(1000)


def _spin():
    9**9**9  # in C code, which does not check for signals or other threads


def _child():
    """Hangs, with two child processes that hang too: one in its session, and one that has left it."""
    for new_session in (False, True):
        code = "import time; time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session)
        with Path("children").open("a") as file:
            file.write(f"{child.pid}\n")
    time.sleep(1000)


def _orphan():
    """Exits and leaves a process of another session, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path("orphan").write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    while not Path("orphan").exists() or not Path("orphan").read_text():
        time.sleep(0.01)
    os._exit(5)


def _fork():
    """Forks; the child would continue in place of its parent."""
    if os.fork() == 0:
        return "child", 77.0, False
    time.sleep(0.05)
    return "parent", 1.0, False


def _grow():
    held = bytearray()
    while len(held) < 500_000_000:
        held += b"x" * 50_000_000
    time.sleep(1000)


def _grow_elsewhere():
    code = "held = bytearray(b'x') * 500_000_000; import time; time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code], check=False)


def _catch():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


def _ignore():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return "ignored", 0.0, False


def _print():
    while True:
        print("x" * 1000)


def _sockets():
    """Yields the file descriptors of the sockets of this process."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                yield int(entry)


def _write(content):
    def deed():
        for descriptor in _sockets():
            os.write(descriptor, content)
        time.sleep(1000)

    return deed


def _trickle():
    """Begins an answer and sends a byte of it from time to time."""
    channel = next(_sockets())
    os.write(channel, (1000).to_bytes(8, "big"))
    while True:
        os.write(channel, b" ")
        time.sleep(0.01)


def _close():
    os.closerange(3, 1000)
    time.sleep(1000)


def _leave(what):
    """Returns a deed that leaves something behind in its process."""

    def deed():
        what()
        return "left", 0.0, False

    return deed


LEFT = []
LEFTOVERS = {
    "leave child": lambda: LEFT.append(subprocess.Popen(["sleep", "1000"])),
    "leave thread": lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
    "leave file": lambda: LEFT.append(open("/dev/null")),  # noqa: SIM115
    "leave memory": lambda: LEFT.append(bytearray(b"x") * 100_000_000),
    "leave directory": lambda: os.chdir("/"),
    "leave variable": lambda: os.environ.update(LEFT="1"),
    "leave handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "leave timer": lambda: signal.alarm(1),
    "leave limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
}


def _frame(text):
    return len(text).to_bytes(8, "big") + text


DEEDS = {
    "hang": _hang,
    "spin": _spin,
    "child": _child,
    "orphan": _orphan,
    "fork": _fork,
    "grow": _grow,
    "grow elsewhere": _grow_elsewhere,
    "catch": _catch,
    "ignore": _ignore,
    "print": _print,
    "close": _close,
    "trickle": _trickle,
    "garbage": _write(b"\x00" * 20 + b"garbage"),
    "long": _write(b"\x00\x00\x00\xff" + b"x" * 100),
    "other": _write(_frame(b"[1, 2]")),
    "wrong": _write(_frame(b'{"observation": "a", "reward": "1", "done": false, "info": {}}')),
    "raise": lambda: {}["no such key"],
    "exit": lambda: sys.exit("leaving"),
    "os._exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "signal": lambda: (os.kill(os.getppid(), signal.SIGTERM), ("sent", 0.0, False))[1],
    "server": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000)),
    "freeze": lambda: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(1000)),
    "bytes": lambda: (b"bytes", 0.0, False),
    "infinite": lambda: ("a", float("inf"), False),
    "none": lambda: None,
    "large": lambda: ("x" * 10_000_000, 1.0, False),
    "draw": lambda: (f"{random.random()} {np.random.random()}", 0.0, False),
    "pid": lambda: (str(os.getpid()), 0.0, False),
    **{name: _leave(what) for name, what in LEFTOVERS.items()},
}


class Env:
    """Rewards each turn with its length and returns it as the observation. The columns can select a fault of
    `reset`."""

    def reset(self, start="", deed=None):
        self.turns = 0
        if deed is not None:
            return DEEDS[deed]()
        return f"start {start}"

    def step(self, completion):
        self.turns += 1
        if completion in DEEDS:
            return DEEDS[completion]()
        done = completion == "end"
        return f"heard {completion}", float(len(completion)), done, {"turns": self.turns, "text": "no number"}


class Scored:
    """An environment with the interface of TRL."""

    kind = "scored"

    def __init__(self):
        self.total = 0
        self.best, self.lock, self.large = (np.float32(0.5), {"a": 1}), threading.Lock(), list(range(10**6))

    @property
    def slow(self):
        time.sleep(1000)

    def reset(self, **columns):
        self.total = columns.get("start", 0)

    def add(self, number: int) -> int:
        """Adds a number.

        Args:
            number: what to add
        """
        self.total += number
        return self.total

    def get_reward(self):
        if self.total == 13:
            time.sleep(1000)
        return float(self.total)


class Slow:
    """An environment that cannot be loaded within the time limit."""

    def reset(self):
        time.sleep(1000)

    def step(self, completion):
        return None, 0.0, True


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: what to double
    """
    return 2 * number
