"""Starts a process that runs foreign code, forwards its printed output, and kills it with all processes that it has
started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tunix_like.runtime.visible import visible
from tunix_like.workers.child import START
from tunix_like.workers.messages import MOST_ANSWER, Connection

SHOWN = 65_536
"""Maximum bytes of printed output that are forwarded to stderr; the rest is dropped."""

MARK = "TUNIX_LIKE_PROCESS"
"""Environment variable by which the descendants of a process are found. They inherit it, whatever else they leave."""

_CUT = "(it prints more, which is not shown)"
_TAIL = 4_000  # bytes of the last output that are reported when a process ends
_READ = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Worker:
    """A process that answers calls.

    Attributes:
      pid: the id of the process; None until its start is reported.
      ended: how the process ended, such as "ended with status 1"; None while no end is known.
    """

    connection: Connection
    pid: int | None
    ended: str | None

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message of the process (see `Connection.receive`)."""
        return self.connection.receive()

    def register(self, selector: selectors.BaseSelector) -> None:
        self.connection.register(selector, self)

    def last_output(self) -> str:
        """Returns a sentence with the end of the printed output, for an error message; an empty text if it is not
        known."""
        return ""

    def kill(self) -> None:
        """Kills the process and all processes that it has started, and closes the connection."""
        raise NotImplementedError


class Process(Worker):
    """A new interpreter that runs a program of this library. It is killed when this object is deleted.

    Args:
      program: a module with a function `main(channel, settings)`.
      settings: JSON value for this function.
      label: printed before each line of output that is forwarded to stderr. If it is None, nothing is forwarded, and
        the output goes to a temporary file. The process then never waits until its output is read.
      grace: seconds that the process gets to end by itself after its socket is closed.
      most: maximum size in bytes of a message of the process.
    """

    def __init__(
        self, program: str, settings: Any, label: str | None, grace: float = 0.0, most: int = MOST_ANSWER
    ) -> None:
        channel, theirs = socket.socketpair()
        file = tempfile.TemporaryFile() if label is None else None  # noqa: SIM115 - closed in `_end_output`
        mark = secrets.token_hex(16)
        start = {"path": sys.path, "socket": theirs.fileno(), "parent": os.getpid(), "program": program}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", START, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                stdout=file or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the run only; child processes are killed with the process
                # Only the run uses the accelerator. All descendants have the variable `MARK`.
                env=os.environ | {"JAX_PLATFORMS": "cpu", MARK: mark},
            )
        output = file or self._process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        self.label = label
        self.pid = self._process.pid
        self._output = output
        self.connection = Connection(channel, most)
        self._printed = 0  # bytes
        self._line = b""  # the last line, as long as it is incomplete
        self._tail = b""  # the last bytes
        # Also runs when the interpreter exits.
        self._end = weakref.finalize(self, _end, self._process, channel, grace, mark)
        self.connection.send(json.dumps(settings).encode())

    @property
    def ended(self) -> str | None:  # type: ignore[override]
        status = self._process.poll()
        return None if status is None else how_ended(status)

    def receive(self) -> dict[str, Any] | None:
        """Forwards printed output, and returns the next message of the process."""
        self._forward()
        return self.connection.receive()

    def register(self, selector: selectors.BaseSelector) -> None:
        super().register(selector)
        if self.label is not None and not self._output.closed:
            selector.register(self._output, selectors.EVENT_READ, self)

    def last_output(self) -> str:
        self._forward()
        if self.label is None and not self._output.closed:
            file = self._output.fileno()
            # not with `seek`, which would also move the position at which the process writes
            self._tail = os.pread(file, _TAIL, max(0, os.fstat(file).st_size - _TAIL))
        output = _decoded(self._tail).strip()
        return f" Its last output was:\n{output}" if output else ""

    def kill(self) -> None:
        self._end()
        self._forward()
        self._end_output()

    def _forward(self) -> None:
        """Forwards printed output to stderr. Only complete lines are forwarded, because several processes print at the
        same time and a line may arrive in parts. An incomplete last line is shown when the output ends."""
        if self.label is None or self._output.closed:
            return
        try:
            part = os.read(self._output.fileno(), _READ)
        except BlockingIOError:
            return
        if not part:
            self._end_output()
        self._tail = (self._tail + part)[-_TAIL:]
        room = SHOWN - self._printed
        if room <= 0:
            return
        self._printed += len(part)
        *lines, self._line = (self._line + part[:room]).split(b"\n")
        if len(part) >= room:
            lines = [*lines, *filter(None, [self._line]), _CUT.encode()]
            self._line = b""
        self._show(lines)

    def _end_output(self) -> None:
        self._output.close()
        self._show([self._line] if self._line else [])
        self._line = b""

    def _show(self, lines: Sequence[bytes]) -> None:
        """Writes lines to stderr in one call, so that no lines of other processes appear between them. The lines are
        dropped if stderr is closed, missing or cannot be written."""
        if lines and self.label is not None and sys.stderr is not None:
            text = "".join(f"[{self.label} {self.pid}] {visible(_decoded(line))}\n" for line in lines)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)


def wait_for(workers: Iterable[Worker], seconds: float) -> set[Worker]:
    """Waits until a process sends or can receive bytes, at most for `seconds`. Returns the processes that do."""
    with selectors.PollSelector() as selector:
        for worker in workers:
            worker.register(selector)
        return {key.data for key, _ in selector.select(seconds)}


def children_of(pid: int) -> Iterator[int]:
    """Yields the ids of the child processes of a process (Linux only, as in the next functions)."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def descendants_of(pid: int) -> Iterator[int]:
    """Yields the ids of all descendants of a process. Each descendant comes after its own descendants."""
    for child in children_of(pid):
        yield from descendants_of(child)
        yield child


def members_of(session: int) -> Iterator[int]:
    """Yields the ids of the processes in the session with the id `session`."""
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and _session(entry) == session:
                yield int(entry)


def marked(mark: str) -> Iterator[int]:
    """Yields the ids of the processes whose environment has the variable `MARK` with this value."""
    wanted = f"{MARK}={mark}".encode()
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal() and wanted in _read(f"/proc/{entry}/environ").split(b"\0"):
                    yield int(entry)


def memory_of(pid: int) -> int:
    """Returns the resident memory of a process and all its descendants, in bytes; 0 if the memory is not known."""
    return _resident(pid) + sum(map(_resident, descendants_of(pid)))


def _resident(pid: int) -> int:
    try:
        return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _session(entry: str) -> int | None:
    try:
        text = _read(f"/proc/{entry}/stat")
    except OSError:
        return None
    return int(text.rpartition(b")")[2].split()[3])


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # `EnvironmentPool` reads two files per answer
        return file.readall()


def how_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by signal {-status} ({signal.strsignal(-status)})"


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], channel: socket.socket, grace: float, mark: str) -> None:
    try:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            channel.shutdown(socket.SHUT_RDWR)
            process.wait(grace)
    finally:  # also after Ctrl-C
        below = list(descendants_of(process.pid)) if process.poll() is None else []
        kill_group(process.pid)
        kill_all([*below, *members_of(process.pid)])
        kill_all(marked(mark))  # daemons: they have left the session, and their parents have ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        channel.close()


def _decoded(printed: bytes) -> str:
    """Decodes printed output from UTF-8, with escapes for invalid bytes, and converts Windows line ends to Unix line
    ends."""
    return printed.decode(errors="backslashreplace").replace("\r\n", "\n").removesuffix("\r")
