"""A process that imports the user's module once and then forks processes, each of which answers calls on its own
socket. A fork takes milliseconds, a new interpreter that imports the module takes seconds.

After the import, the fork server runs no user code. The training process sends orders: a struct with `BEGIN` (start the
process with a number that the training process chooses; its socket is passed along) or `END` (kill it). The fork server
reports `{"begun": number, "pid": pid}`, and `{"ended": number, "status": exit status or -signal}` or `{"ended": number,
"error": text}`. If its socket is closed, it kills all processes and ends.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tunix_like.errors import UserError
from tunix_like.workers.child import adopt_orphans, die_with
from tunix_like.workers.messages import MOST_ANSWER, Connection, Lost
from tunix_like.workers.process import Process, Worker, children_of, how_ended, kill_all, kill_group

PATIENCE = 10.0
"""Maximum seconds in which the fork server must follow an order. Usually, this takes milliseconds."""

SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals that do not end the fork server. The processes that it starts have the default handlers."""

_ORDER = struct.Struct("!cQ")
_BEGIN = b"b"
_END = b"e"
_GRACE = 1.0  # seconds for the fork server to kill its processes


class Fork(Worker):
    """A process that a fork server starts."""

    def __init__(self, server: ForkServer, number: int, channel: socket.socket):
        self.server = server
        self.number = number
        self.connection = Connection(channel, MOST_ANSWER)
        self.pid = None
        self.ended = None

    def last_output(self) -> str:
        """Returns the last traceback that `faulthandler` printed if a signal killed the process. It may be of another
        process, because all processes of the fork server share one output."""
        shown = self.server.last_output()
        start = shown.rfind("Fatal Python error") if "by signal" in str(self.ended) else -1
        return "" if start < 0 else f" The last crash printed:\n{shown[start:]}"

    def kill(self) -> None:
        self.connection.channel.close()
        if self.ended is None:
            self.server.end(self)


class ForkServer(Process):
    """Starts the fork server and gives it orders, from the training process.

    Args:
      program: a module with a function `main`, which calls `run`.
    """

    def __init__(self, program: str, settings: Any, label: str):
        super().__init__(program, settings, label, _GRACE)
        self._forks: dict[int, Fork] = {}
        self._numbers = itertools.count()
        self._unanswered: dict[int, float] = {}  # the time of the order, by number of the process

    def fork(self) -> Fork:
        """Starts a process. Raises a UserError if no more files can be opened."""
        ours, theirs = _socket_pair()
        number = next(self._numbers)
        fork = self._forks[number] = Fork(self, number, ours)
        with theirs:
            self._order(_BEGIN, number, theirs.fileno())
        return fork

    def end(self, fork: Fork) -> None:
        """Kills a process."""
        self._order(_END, fork.number)

    def look(self) -> str | None:
        """Reads the reports. Returns None, or why the fork server is lost; it is then killed with all its processes."""
        lost = self.ended  # read before the socket, so that the last report is not missed
        try:
            while (report := self.receive()) is not None:
                self._note(report)
        except Lost as error:
            lost = str(error)
        if lost is None and any(time.monotonic() - since > PATIENCE for since in self._unanswered.values()):
            lost = f"did not answer within {PATIENCE:g} s"
        if lost is not None:
            self.kill(lost)
        return lost

    def kill(self, why: str = "was stopped") -> None:
        super().kill()
        while self._forks:
            self._forks.popitem()[1].ended = f"ended, because the process that starts {self.label} {why},"

    def _note(self, report: Mapping[str, Any]) -> None:
        if "begun" in report:
            self._unanswered.pop(report["begun"], None)
            self._forks[report["begun"]].pid = report["pid"]
        else:
            self._unanswered.pop(report["ended"], None)
            fork = self._forks.pop(report["ended"])
            fork.ended = report.get("error") or how_ended(report["status"])

    def _order(self, kind: bytes, number: int, *descriptors: int) -> None:
        self._unanswered[number] = time.monotonic()
        with contextlib.suppress(OSError), selectors.PollSelector() as selector:  # `look` finds a lost fork server
            selector.register(self.connection.channel, selectors.EVENT_WRITE)
            selector.select(PATIENCE)
            socket.send_fds(self.connection.channel, [_ORDER.pack(kind, number)], descriptors)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Makes a pair of connected sockets. Increases the soft limit of open files to the hard limit if it is reached."""
    try:
        return socket.socketpair()
    except OSError:
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


def run(channel: socket.socket, ready: Mapping[str, Any], work: Callable[[socket.socket], None]) -> None:
    """Is the program of the fork server after the import of the user's module.

    Args:
      ready: the first message to the training process.
      work: called in each forked process with its socket.
    """
    with contextlib.suppress(AttributeError, ValueError, OSError):
        # line buffering, so that lines of several processes do not mix
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    _Server(channel, work).run(ready)


class _Server:
    def __init__(self, channel: socket.socket, work: Callable[[socket.socket], None]):
        self.connection = Connection(channel, 0)
        self.work = work
        self.parent = os.getppid()
        self.numbers: dict[int, int] = {}  # numbers of the processes by process id
        self.pids: dict[int, int] = {}
        self.older = set(children_of(os.getpid()))  # processes that the user's module started

    def run(self, ready: Mapping[str, Any]) -> None:
        waker, woken = socket.socketpair()
        self.private = (waker, woken, self.connection.channel)
        for end in self.private:
            end.setblocking(False)
        for number in SIGNALS:  # any of these signals can come from a forked process
            signal.signal(number, lambda *_: None)
        die_with(self.parent, signal.SIGTERM)  # not SIGKILL, so that `_end` can kill all processes first
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # so that the collector does not copy memory pages that the processes share
        self._report(ready)
        while not self.connection.closed and os.getppid() == self.parent:
            with selectors.DefaultSelector() as selector:
                selector.register(waker, selectors.EVENT_READ)
                self.connection.register(selector, None)
                selector.select()
            with contextlib.suppress(BlockingIOError):
                waker.recv(4096)
            self._follow()
            self._reap()
            self.connection.flush()
        self._end()

    def _end(self) -> None:
        """Kills all descendants of this process, waits until they have ended, and kills this process."""
        for pid in list(self.numbers):
            self._kill(pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                kill_all(children_of(os.getpid()))  # includes processes whose parent has ended
                os.waitpid(-1, 0)
        kill_group(0)  # includes processes that the user's module started in this group

    def _follow(self) -> None:
        """Follows the orders that have arrived."""
        while not self.connection.closed:
            try:
                order, descriptors, _, _ = socket.recv_fds(self.connection.channel, _ORDER.size, 1)
            except BlockingIOError:
                return
            except OSError:
                order = b""
            if len(order) < _ORDER.size:  # the training process has ended
                self.connection.closed = True
                return
            kind, number = _ORDER.unpack(order)
            if kind == _BEGIN:
                self._begin(number, descriptors[0])
            elif number in self.pids:
                self._kill(self.pids[number])

    def _begin(self, number: int, descriptor: int) -> None:
        """Forks the process with the number `number`. `descriptor` is the file descriptor of its socket."""
        own = os.getpid()
        try:
            with warnings.catch_warnings():
                # If the user's module imported jax, a fork warns about threads of jax. The import alone starts no
                # threads.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            self._report({"ended": number, "error": f"could not be started ({error})"})
            return
        if pid == 0:
            try:
                self._be_forked(descriptor, own)
            finally:
                os._exit(0)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # also set here, because the process may be killed before it sets its group
        self.numbers[pid] = number
        self.pids[number] = pid
        self._report({"begun": number, "pid": pid})

    def _be_forked(self, descriptor: int, parent: int) -> None:
        os.setpgid(0, 0)  # a process group, so that all its processes can be killed at once
        die_with(parent)
        adopt_orphans()
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in self.private:
            end.close()
        if random := sys.modules.get("numpy.random"):
            random.seed()  # otherwise all processes draw the same numbers; Python reseeds `random` itself
        self.work(socket.socket(fileno=descriptor))
        with contextlib.suppress(Exception):
            sys.stdout.flush()

    def _kill(self, pid: int) -> None:
        kill_all([pid])  # the process may have left its group; `_reap` kills its descendants
        kill_group(pid)

    def _reap(self) -> None:
        """Reports which processes have ended, and kills all processes that these have started."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True
            if (number := self.numbers.pop(pid, None)) is not None:
                del self.pids[number]
                kill_group(pid)
                self._report({"ended": number, "status": os.waitstatus_to_exitcode(status)})
        if ended:  # processes that had left the group of an ended process are now children of this process
            kill_all(set(children_of(os.getpid())) - self.older - set(self.numbers))

    def _report(self, content: Mapping[str, Any]) -> None:
        self.connection.send(json.dumps(content).encode())
