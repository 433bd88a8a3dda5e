"""Runs each environment in a separate process, with deadlines and a memory limit.

The program in `fork_server.py` loads the user's module once, and forks one process per trajectory. Starting an
interpreter for each trajectory would take longer than most episodes. An environment that hangs, exits or exceeds the
memory limit is killed with all processes that it started. Only the trajectory of this environment fails.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.calls import LONGEST_REASON, Failure, FailureKind
from tunix_like.rewards.pool import START_SECONDS
from tunix_like.rewards.process import WorkerProcess
from tunix_like.rollout.environments.calls import Answered, Caller, failure_in
from tunix_like.rollout.environments.fork_server import BEGIN, END, ORDER, START, places_of
from tunix_like.rollout.environments.outcomes import Outcome
from tunix_like.rollout.environments.process_tree import descendants_of, members_of, memory_of

POLL_SECONDS = 0.1
"""Interval in seconds between checks of the memory of environments that have an unanswered call."""

PATIENCE = 10.0
"""Maximum seconds for the fork server to start or kill a process after an order (`fork_server.ORDER`). Usually, this
takes milliseconds."""

_EXIT_SECONDS = 1.0  # maximum wait for an exit status after a socket was closed, and for the end of the server


class EnvironmentPool:
    """Runs each environment in its own process (see `Environments`). This class is not thread-safe.

    Each process starts at the `reset` of its trajectory, as a fork of a fresh interpreter that has loaded the user's
    module. If `outcomes` is not called for more than a second, this time does not count towards the time limits.

    Args:
      place: name or location of a class or factory (`rewards.pool.place_of`), or the locations of functions that are
        tools.
      arguments: passed to the class or factory by name. JSON must be able to represent the values.
      workers: maximum number of calls that run at the same time; further calls wait.
      timeout_seconds: time limit of one call. The start of the process, the construction of the environment and `reset`
        count as one call.
      memory_gb: memory limit in GB (10^9 bytes) of an environment together with the processes that it started. An
        environment above the limit is stopped (Linux only).

    Raises:
      UserError: a name is unknown, or `arguments` cannot be used.
    """

    def __init__(
        self,
        place: str | Sequence[str],
        *,
        arguments: Mapping[str, Any] | None = None,
        workers: int = 4,
        timeout_seconds: float = 20.0,
        memory_gb: float = 4.0,
    ):
        self.places = places_of(place, arguments)
        self.name = self.places[0].rpartition(":")[2] if isinstance(place, str) else "tools"
        self.workers, self.timeout_seconds, self.memory_gb = workers, timeout_seconds, memory_gb
        self.memory_bytes = int(memory_gb * 1e9)
        self._tools: list[Mapping[str, Any]] | None = None
        self._callers: dict[int, Caller] = {}
        self._serials: dict[int, Caller] = {}  # callers with a process, by the number of the process
        self._requests: deque[tuple[Caller, str, bytes]] = deque()  # calls that wait
        self._running: dict[int, Caller] = {}
        self._ready: list[Outcome] = []
        self._next = 0
        self._orders: deque[tuple[bytes, socket.socket | None]] = deque()
        self._unanswered: dict[tuple[str, int], float] = {}  # time of each unanswered order
        self._server: WorkerProcess | None = None
        self._loaded, self._started = False, 0.0
        self._looked = self._measured = 0.0
        self._held: list[WorkerProcess] = []
        # also runs at interpreter exit if `close` was not called
        self._finalizer = weakref.finalize(self, _stop_all, self._held)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools of the environments; empty if there are no tools. The first access starts the fork
        server (`fork_server.py`), which loads the user's module.

        Raises:
          UserError: the module cannot be loaded, or the object is not an environment.
        """
        while self._tools is None:
            server = self._server or self._start()
            answer = self._load(server)
            if answer is not None:
                self._stop_server()
                raise UserError(answer.reason)
            if self._tools is None:
                self._select(POLL_SECONDS)
        return self._tools

    def reset(self, number: int, columns: Mapping[str, Any]) -> None:
        """Makes and resets the environment of a trajectory; see `Environments.reset`.

        Raises:
          UserError: a column cannot be pickled.
          ValueError: the trajectory already has an environment.
        """
        if number in self._callers:
            raise ValueError(f"Trajectory {number} already has an environment; finish it first.")
        try:
            request = pickle.dumps(("reset", dict(columns), self.timeout_seconds))
        except Exception as error:
            raise UserError(
                f"Environment '{self.name}': a column ({', '.join(columns)}) cannot be sent to its process "
                f"({type(error).__name__}: {error}); use columns of plain values."
            ) from error
        caller = self._callers[number] = Caller(number, self._next)
        self._next += 1
        self._submit(caller, "reset", request)

    def step(self, number: int, completion: str) -> None:
        """Steps the environment of a trajectory; see `Environments.step`.

        Raises:
          ValueError: the trajectory has no environment.
        """
        if number not in self._callers:
            raise ValueError(f"Trajectory {number} has no environment; reset it first.")
        self._submit(self._callers[number], "step", pickle.dumps(("step", completion, self.timeout_seconds)))

    def finish(self, number: int) -> None:
        """Ends a trajectory; see `Environments.finish`. A trajectory without an environment gets an outcome with reward
        0."""
        if number not in self._callers:
            self._ready.append(Outcome(number))
        else:
            self._submit(self._callers[number], "finish", pickle.dumps(("finish", None, self.timeout_seconds)))

    def outcomes(self, wait: bool) -> list[Outcome]:
        """Returns the outcomes of `reset`, `step` and `finish` that are ready and were not returned before. If `wait`
        is True and a call is unanswered, waits for at least one outcome."""
        while True:
            self._look()
            self._hand_out()
            if self._ready or not wait or not (self._running or self._requests):
                ready, self._ready = self._ready, []
                return ready
            self._select(self._until_next())

    def close(self) -> None:
        """Stops all environments and the fork server, and drops unanswered calls."""
        for caller in self._callers.values():
            caller.close()
        for held in (self._callers, self._serials, self._running, self._requests, self._ready):
            held.clear()
        self._stop_server()

    def _submit(self, caller: Caller, what: str, request: bytes) -> None:
        self._requests.append((caller, what, request))
        self._hand_out()

    def _hand_out(self) -> None:
        """Starts queued calls while fewer than `workers` calls are running. Sends the fork server the queued orders to
        start and kill processes."""
        while self._requests and len(self._running) < self.workers:
            caller, what, request = self._requests[0]
            if what == "reset" and not self._loaded:
                if self._server is None:
                    self._start()
                break
            self._requests.popleft()
            if caller.ended is not None:
                self._fail(caller, "error", f"its process {caller.ended} before the call of {what}.")
                continue
            caller.call(what, request)
            if what == "reset":
                self._order(BEGIN, caller.serial, caller.connect())
                self._serials[caller.serial] = caller
            caller.given = time.monotonic()
            caller.deadline = caller.given + self.timeout_seconds
            self._running[caller.number] = caller
            self._pump(caller)
        self._send_orders()

    def _look(self) -> None:
        """Reads the answers to running calls. Stops processes that exceed a deadline or the memory limit."""
        self._look_at_server()
        now = time.monotonic()
        unattended = self._looked if now - self._looked > 10 * POLL_SECONDS else now
        check_memory = now - self._measured > POLL_SECONDS / 2
        for caller in list(self._running.values()):
            caller.deadline += now - max(unattended, caller.given) if unattended < now else 0.0
            self._pump(caller)
            if self._running.get(caller.number) is not caller:
                continue
            if check_memory and self._is_over(caller):
                continue
            if now > caller.deadline:
                self._over_time(caller)
        self._looked = now
        if check_memory:
            self._measured = now

    def _pump(self, caller: Caller) -> None:
        try:
            answer = caller.pump()
        except Answered as error:
            self._fail(caller, "error", f"its process {error}.")
            return
        if isinstance(answer, Outcome):
            if caller.what == "finish":
                self._drop(caller)
            elif self._is_over(caller):
                return
            self._running.pop(caller.number, None)
            self._ready.append(answer)
        elif answer is not None:
            self._fail(caller, answer.kind, answer.reason, whole=True)
        elif caller.closed:
            caller.deadline = min(caller.deadline, time.monotonic() + _EXIT_SECONDS)

    def _is_over(self, caller: Caller) -> bool:
        """Stops an environment if it exceeds the memory limit. Returns whether it was stopped."""
        if caller.pid is None or memory_of(caller.pid) <= self.memory_bytes:
            return False
        limit = f"environment.memory_gb={self.memory_bytes / 1e9:g} GB"
        self._fail(caller, "error", f"it used more than {limit} in {caller.what} and was stopped.")
        return True

    def _over_time(self, caller: Caller) -> None:
        if caller.closed:
            self._fail(caller, "error", f"its process closed its socket in {caller.what}.")
        else:
            limit = f"environment.timeout_seconds={self.timeout_seconds:g} s"
            self._fail(caller, "timeout", f"{caller.what} did not return within {limit}.")

    def _fail(self, caller: Caller, kind: FailureKind, reason: str, whole: bool = False) -> None:
        """Stops an environment and adds an outcome with the failure. If `whole` is False, the name of the environment
        is put before `reason`."""
        text = reason if whole else f"Environment '{self.name}': {reason}"
        self._drop(caller)
        self._ready.append(Outcome(caller.number, failure=Failure(kind, text[:LONGEST_REASON])))

    def _drop(self, caller: Caller) -> None:
        caller.close()
        for held in (self._callers, self._running):
            held.pop(caller.number, None)
        if self._serials.pop(caller.serial, None) is not None and caller.ended is None:
            self._order(END, caller.serial, None)

    def _order(self, what: bytes, serial: int, theirs: socket.socket | None) -> None:
        self._unanswered["begun" if what == BEGIN else "stopped", serial] = time.monotonic()
        self._orders.append((ORDER.pack(what, serial), theirs))
        self._send_orders()

    def _send_orders(self) -> None:
        if self._server is None:
            return
        with contextlib.suppress(OSError):  # the socket is full, or the server has ended (see `_look_at_server`)
            while self._orders:
                order, theirs = self._orders[0]
                socket.send_fds(self._server.channel, [order], [] if theirs is None else [theirs.fileno()])
                self._orders.popleft()
                if theirs is not None:
                    theirs.close()

    def _start(self) -> WorkerProcess:
        self._server = WorkerProcess(self.places, START, "environments")
        self._held.append(self._server)
        self._loaded, self._started = False, time.monotonic()
        return self._server

    def _load(self, server: WorkerProcess) -> Failure | None:
        """Reads the first message, if it has arrived, of the fork server, which starts the processes of environments.
        Returns why the fork server cannot be used, or None if no problem is known."""
        alive = server.alive  # read before `pump`, so that a message written just before an exit is not missed
        answer = server.pump()
        if answer is not None and "tools" in answer:
            self._loaded, self._tools = True, answer["tools"]
        elif answer is not None:
            return failure_in(answer)
        elif not alive:
            return Failure("error", f"Environment '{self.name}' could not be loaded: its process {server.kill()}")
        elif time.monotonic() - self._started > START_SECONDS:
            return Failure("error", f"Environment '{self.name}' was not loaded within {START_SECONDS} s.")
        return None

    def _look_at_server(self) -> None:
        """Reads the messages of the fork server, which starts the processes of environments. Stops the fork server if
        it has failed, has ended or does not answer."""
        server = self._server
        if server is None:
            return
        if not self._loaded:
            if (problem := self._load(server)) is not None:
                self._stop_server()
                for caller, _, _ in list(self._requests):
                    self._fail(caller, problem.kind, problem.reason, whole=True)
                self._requests.clear()
            return
        alive = server.alive
        while (answer := server.pump()) is not None:
            self._told(server, answer)
        if not alive:
            self._lose_server(f"the process that starts environments {server.kill()}")
        elif any(time.monotonic() - given > PATIENCE for given in self._unanswered.values()):
            self._lose_server(f"the process that starts environments did not answer within {PATIENCE:g} s")

    def _told(self, server: WorkerProcess, answer: Mapping[str, Any]) -> None:
        """Updates the state of the pool after a message of the fork server, which starts the processes."""
        for what in ("begun", "stopped"):
            if what in answer:
                self._unanswered.pop((what, answer[what]), None)
        if "begun" in answer and (caller := self._serials.get(answer["begun"])) is not None:
            caller.pid = answer["pid"]
        if "ended" not in answer:
            return
        self._unanswered.pop(("begun", answer["ended"]), None)
        if (caller := self._serials.get(answer["ended"])) is None:
            return
        if caller.number in self._running:
            self._pump(caller)  # the process may have answered just before its end
        how = answer.get("error") or _how(answer["status"])
        if caller.number in self._running:
            caller.ended = how
            self._fail(caller, "error", f"its process {how} in {caller.what}.{_traceback(server, how)}")
        else:
            caller.ended = how

    def _lose_server(self, why: str) -> None:
        """Stops the fork server and with it all environments. Running calls fail now, and other trajectories fail at
        their next call."""
        self._stop_server()
        for caller in list(self._serials.values()):
            caller.ended = f"ended, because {why},"
            if caller.number in self._running:
                self._fail(caller, "error", f"{why} in {caller.what}.")

    def _stop_server(self) -> None:
        for _, theirs in self._orders:
            if theirs is not None:
                theirs.close()
        self._orders.clear()
        self._unanswered.clear()
        _stop_all(self._held)
        self._server, self._loaded = None, False

    def _until_next(self) -> float:
        """Returns the time in seconds until the earliest deadline of a running call, but at most `POLL_SECONDS`."""
        deadlines = [caller.deadline for caller in self._running.values()]
        return max(0.0, min([POLL_SECONDS, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _select(self, seconds: float) -> None:
        with selectors.PollSelector() as selector:
            if self._server is not None:
                self._server.register(selector)
            for caller in self._running.values():
                if caller.channel is not None and not caller.closed:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.out else 0)
                    selector.register(caller.channel, events)
            selector.select(seconds)


def _traceback(server: WorkerProcess, how: str) -> str:
    """Returns the last traceback that `faulthandler` printed; an empty text if no signal killed the process, as `how`
    tells. The traceback may be of another environment, because all environments share one output stream."""
    start = server.last_output.rfind("Fatal Python error") if "by signal" in how else -1
    return "" if start < 0 else f" The last crash printed:\n{server.last_output[start:]}"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by signal {-status} ({signal.strsignal(-status)})"


def _stop_all(servers: list[WorkerProcess]) -> None:
    """Ends fork servers and all environments of these fork servers.

    A fork server kills its environments when its socket is closed. This function then kills all processes that still
    run.
    """
    while servers:
        server = servers.pop()
        with contextlib.suppress(OSError):
            server.channel.shutdown(socket.SHUT_RDWR)
            server.wait(_EXIT_SECONDS)
        below = list(descendants_of(server.pid)) if server.alive else []
        server.kill()
        for pid in (*below, *members_of(server.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
