"""Starts one worker process, exchanges messages with it by non-blocking reads and writes, and kills it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunix_like.rewards.worker import HEADER, START, message, send_pending
from tunix_like.runtime.visible import visible

SHOWN = 65_536
"""Maximum bytes of a worker's printed output that are forwarded to stderr; the rest is dropped."""

_CUT = "(it prints more, which is not shown)"
_TAIL = 4_000  # bytes of the last output that are reported when a worker dies
_READ = 1 << 20


class WorkerProcess:
    """A separate process that calls functions of the user on request, and the socket to it.

    Attributes:
      gone: whether the process has exited, or has closed its end of the socket.
    """

    def __init__(self, places: Sequence[str], start: str = START, label: str = "reward worker"):
        """Starts the worker process.

        Args:
          places: locations of the user's functions, such as `FILE.py:function`; passed to the code `start`.
          start: Python code that the process runs. The code must read its settings like `worker.START` does.
          label: printed before each line of the worker's output that is forwarded to stderr.
        """
        self.label = label
        self.channel, theirs = socket.socketpair()
        settings = {"path": sys.path, "socket": theirs.fileno(), "places": list(places), "parent": os.getpid()}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", start, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the run only; child processes are killed with the worker
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # only the run uses the accelerator
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.channel.setblocking(False)
        os.set_blocking(self.output.fileno(), False)
        self.gone = False
        self._out, self._in = b"", bytearray()
        self._printed, self._line, self._tail = 0, b"", b""  # bytes printed so far, incomplete last line, last bytes

    @property
    def alive(self) -> bool:
        return not self.gone and self._process.poll() is None

    def send(self, content: bytes) -> None:
        self._out += message(content)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Registers the socket and the output of the worker with a selector. A `select` then returns as soon as `pump`
        can send or read data."""
        selector.register(self.channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0))
        if not self.output.closed:
            selector.register(self.output, selectors.EVENT_READ)

    def pump(self) -> dict[str, Any] | None:
        """Sends pending requests, forwards printed output and reads answers, all without blocking. Returns the worker's
        next answer, or None if no answer is complete yet."""
        self._pass_on()
        try:
            self._out = send_pending(self.channel, self._out)
        except OSError:
            self.gone = True
        try:
            while part := self.channel.recv(_READ):
                self._in += part
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        if len(self._in) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._in)[0]
        if len(self._in) < end:
            return None
        content = bytes(self._in[HEADER.size : end])
        del self._in[:end]
        return dict(json.loads(content))

    def _pass_on(self) -> None:
        """Forwards the worker's printed output to stderr. Only complete lines are forwarded, because several workers
        print at the same time and a line may arrive in parts. An incomplete last line is shown when the output ends."""
        if self.output.closed:
            return
        try:
            part = os.read(self.output.fileno(), _READ)
        except BlockingIOError:
            return
        if not part:
            self._end_output()
            return
        self._tail = (self._tail + part)[-_TAIL:]
        room = SHOWN - self._printed
        if room <= 0:
            return
        self._printed += len(part)
        *lines, self._line = (self._line + part[:room]).split(b"\n")
        if len(part) >= room:
            lines, self._line = [*lines, *filter(None, [self._line]), _CUT.encode()], b""
        self._show(lines)

    def _end_output(self) -> None:
        self.output.close()
        if self._line:
            self._show([self._line])
        self._line = b""

    def _show(self, lines: Sequence[bytes]) -> None:
        """Writes lines of the worker's output to stderr in one call, so that no lines of other processes appear between
        them.

        The lines are dropped if stderr is closed, missing or cannot be written.
        """
        texts = [visible(_decoded(line)) for line in lines]
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("".join(f"[{self.label} {self._process.pid}] {text}\n" for text in texts))

    @property
    def pid(self) -> int:
        """The process id of the worker, which is also the id of its session."""
        return self._process.pid

    def memory(self) -> int:
        """Returns the resident memory of the worker in bytes; 0 if the system does not provide this number."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def wait(self, seconds: float) -> None:
        """Waits for the process to end, at most for `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> str:
        """Kills the worker and its child processes. Returns a text for an error message, which tells how the worker
        ended and contains its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1 if self.gone else 0)
        ended = self._process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.channel.close()
        self._pass_on()  # output printed since the last read
        if not self.output.closed:
            self._end_output()
        self.gone = True
        how = "closed its socket" if ended is None else f"ended with status {ended}"
        if ended is not None and ended < 0:
            how = f"was killed by signal {-ended} ({signal.strsignal(-ended)})"
        output = self.last_output
        return f"{how}; its last output was:\n{output}" if output else how

    @property
    def last_output(self) -> str:
        """The end of the worker's printed output, at most 4,000 bytes."""
        return _decoded(self._tail).strip()


def _decoded(printed: bytes) -> str:
    """Decodes the printed output of a worker from UTF-8, with escapes for invalid bytes, and converts Windows line ends
    to Unix line ends."""
    return printed.decode(errors="backslashreplace").replace("\r\n", "\n").removesuffix("\r")
