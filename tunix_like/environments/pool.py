"""Runs each environment in a separate process, with deadlines and a memory limit.

A fork server (`workers/fork_server.py`) loads the user's module once, and forks the processes of environments. A
process runs one trajectory at a time. It is used again if this trajectory ended well and left nothing behind, because a
fork and the end of a process take milliseconds, and most calls take less. An environment that hangs, exits or exceeds
the memory limit is killed with all processes that it started. Only the trajectory of this environment fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tunix_like.environments.outcomes import Outcome
from tunix_like.environments.protocol import checked_number, checked_observation, checked_step, show
from tunix_like.environments.worker import settings_of
from tunix_like.errors import UserError
from tunix_like.rewards.environment_state import EnvironmentState
from tunix_like.runtime.moment import START, Moment
from tunix_like.workers.failures import LONGEST_REASON, Failure, FailureKind
from tunix_like.workers.fork_server import Fork, ForkServer
from tunix_like.workers.messages import packed
from tunix_like.workers.process import memory_of
from tunix_like.workers.supervisor import RunningCall, Supervisor

MOST_IDLE = 512
"""Maximum number of processes that wait for another trajectory. Each of them holds some megabytes."""

_GROWTH = 64_000_000  # bytes; a process that holds so much more memory than at its start is not used again


class EnvironmentPool:
    """Runs each environment in its own process (see `Environments`). This class is not thread-safe.

    Each process is a fork of a fresh interpreter that has loaded the user's module. If `outcomes` is not called for
    more than a second, this time does not count towards the time limits.

    Args:
      place: name or location (`user_code.place_of`) of a class or factory, or the locations of functions as tools.
      arguments: passed to the class or factory by name. JSON must be able to represent the values.
      workers: maximum number of calls that run at the same time; further calls wait.
      timeout_seconds: time limit of one call. The start of the process, the construction of the environment and `reset`
        count as one call.
      memory_gb: memory limit in GB (10^9 bytes) of an environment together with the processes that it started. An
        environment above the limit is stopped (Linux only).

    Raises:
      UserError: a name is unknown, `arguments` cannot be used, or `workers` is less than 1.
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
        if workers < 1:
            raise UserError(f"EnvironmentPool: workers is {workers}; give 1 or more, or pass the class itself instead.")
        self.settings = settings_of(place, arguments)
        self.name = self.settings.get("environment", "tools").rpartition(":")[2]
        self.workers = workers
        self.timeout_seconds = timeout_seconds
        self.memory_gb = memory_gb
        self._supervisor = Supervisor("environment", timeout_seconds, memory_gb)
        self._server: ForkServer | None = None
        self._loaded_bytes: int | None = None  # memory of the fork server; None while it imports the user's module
        self._tools: list[Mapping[str, Any]] | None = None
        self._problem: Failure | None = None  # why the user's module cannot be used
        self._forks: dict[int, Fork | None] = {}  # the process of each trajectory; None while its start is queued
        self._idle: list[Fork] = []  # processes that wait for another trajectory
        self._requests: deque[tuple[int, str, bytes]] = deque()  # calls that wait
        self._ready: list[Outcome] = []

    @property
    def where(self) -> str:
        """Where and with which limits the environments run, for the description of a run."""
        return f"{self.workers} at a time in processes, {self.timeout_seconds:g} s a step"

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools of the environments; empty if there are no tools. The first access starts the fork
        server, which loads the user's module.

        Raises:
          UserError: the module cannot be loaded, or the object is not an environment.
        """
        self._problem = None
        while self._tools is None:
            self._start_server()
            self._supervisor.wait(self._server)
            self._advance(True)
            if self._problem is not None:
                raise UserError(self._problem.reason)
        return self._tools

    def reset(self, number: int, columns: Mapping[str, Any], moment: Moment = START) -> None:
        """Makes and resets the environment of a trajectory; see `Environments.reset`.

        Raises:
          UserError: a column cannot be pickled.
          ValueError: the trajectory already has an environment.
        """
        if number in self._forks:
            raise ValueError(f"Trajectory {number} already has an environment; finish it first.")
        self._submit(number, "reset", (dict(columns), dict(moment)), f"a column ({', '.join(columns)})")

    def step(self, number: int, completion: str) -> None:
        """Steps the environment of a trajectory; see `Environments.step`.

        Raises:
          ValueError: the trajectory has no environment.
        """
        if number not in self._forks:
            raise ValueError(f"Trajectory {number} has no environment; reset it first.")
        self._submit(number, "step", completion, "the argument of step")

    def finish(self, number: int) -> None:
        """Ends a trajectory; see `Environments.finish`. A trajectory without an environment gets an outcome with reward
        0."""
        if number not in self._forks:
            self._ready.append(Outcome(number))
        else:
            self._submit(number, "finish", None, "the argument of finish")

    def cancel(self, number: int) -> None:
        """Stops the environment of a trajectory that has no unanswered call. The trajectory gets no outcome."""
        if (fork := self._forks.pop(number, None)) is not None:
            fork.kill()

    def outcomes(self, wait: bool) -> list[Outcome]:
        """Returns the outcomes of `reset`, `step` and `finish` that are ready and were not returned before. If `wait`
        is True and a call is unanswered, waits for at least one outcome."""
        news = True  # whether the fork server may have sent something
        while True:
            self._advance(news)
            if self._ready or not wait or not (self._supervisor.calls or self._requests):
                ready = self._ready
                self._ready = []
                return ready
            news = self._supervisor.wait(self._server)

    def close(self) -> None:
        """Stops all environments and the fork server, and drops unanswered calls."""
        self._stop_server()
        self._supervisor.close()
        for fork in self._forks.values():
            if fork is not None:
                fork.kill()
        for held in (self._forks, self._requests, self._ready):
            held.clear()

    def _submit(self, number: int, what: str, value: Any, part: str) -> None:
        subject = f"Environment '{self.name}': {part}"
        request = packed((what, value, self.timeout_seconds), subject, "use plain values")
        self._forks.setdefault(number, None)
        self._requests.append((number, what, request))
        self._hand_out()

    def _hand_out(self) -> None:
        """Starts queued calls while fewer than `workers` calls are running."""
        while self._requests and len(self._supervisor.calls) < self.workers:
            number, what, request = self._requests[0]
            if (fork := self._forks[number] or self._free_fork()) is None:
                return
            self._forks[number] = fork
            self._requests.popleft()
            if fork.ended is None:
                self._supervisor.call(fork, request, number, what)
            else:
                self._fail(number, self._error(f"its process {fork.ended} before the call of {what}."))

    def _free_fork(self) -> Fork | None:
        """Returns a waiting or a new process; None while the fork server starts."""
        while self._idle:
            fork = self._idle.pop()
            if fork.ended is None and fork.connection.is_quiet():
                return fork
            fork.kill()  # it has ended, or a thread or a process of the last trajectory still runs
        server = self._start_server()
        return None if self._loaded_bytes is None else server.fork()

    def _start_server(self) -> ForkServer:
        if self._server is None:
            self._server = ForkServer("tunix_like.environments.worker", self.settings, "environments")
            self._supervisor.load(self._server)
        return self._server

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.kill()
        self._server = self._loaded_bytes = None
        while self._idle:
            self._idle.pop().kill()

    def _advance(self, news: bool) -> None:
        """Handles the answers that have arrived and, if `news` is True, the reports of the fork server. Then starts
        queued calls."""
        if news and self._loaded_bytes is not None and self._server is not None and self._server.look() is not None:
            self._stop_server()
        for worker, call, answer in self._supervisor.look():
            if isinstance(answer, Failure):
                answer = self._error(answer.reason, answer.kind)
            elif "failure" in answer:
                answer = _failure_of(answer["failure"])
            if isinstance(worker, Fork):
                self._take(worker, call, answer)
            else:
                self._take_first(answer)
        self._hand_out()

    def _take_first(self, answer: Mapping[str, Any] | Failure) -> None:
        """Handles the first message of the fork server."""
        assert self._server is not None and self._server.pid is not None
        if not isinstance(answer, Failure):
            self._tools = answer["tools"]
            self._loaded_bytes = memory_of(self._server.pid)
            return
        self._problem = answer
        self._stop_server()
        while self._requests:
            self._fail(self._requests.popleft()[0], answer)

    def _take(self, fork: Fork, call: RunningCall, answer: Mapping[str, Any] | Failure) -> None:
        """Handles the end of a call of an environment."""
        if isinstance(answer, Failure):
            return self._fail(call.tag, answer)
        try:
            outcome = _outcome(call, answer)
        except (ValueError, TypeError, KeyError, AttributeError):
            return self._fail(call.tag, self._error(f"its process sent {show(answer)}, which is not an answer."))
        if call.what == "finish":
            del self._forks[call.tag]
            self._release(fork, answer.get("reusable") is True)
        elif self._supervisor.is_too_large(fork):
            return self._fail(call.tag, self._error(self._supervisor.too_large(call).reason))
        self._ready.append(outcome._replace(called=(call.start, time.perf_counter())))

    def _error(self, reason: str, kind: FailureKind = "error") -> Failure:
        return Failure(kind, f"Environment '{self.name}': {reason}")

    def _fail(self, number: int, failure: Failure) -> None:
        """Stops an environment, and adds an outcome with the failure."""
        if (fork := self._forks.pop(number)) is not None:
            fork.kill()
        self._ready.append(Outcome(number, failure=Failure(failure.kind, failure.reason[:LONGEST_REASON])))

    def _release(self, fork: Fork, reusable: bool) -> None:
        """Keeps the process of a finished trajectory for another trajectory if it is like new; kills it otherwise."""
        most = (self._loaded_bytes or 0) + _GROWTH
        if reusable and fork.pid is not None and len(self._idle) < MOST_IDLE and memory_of(fork.pid) < most:
            self._idle.append(fork)
        else:
            fork.kill()


def _failure_of(value: Any) -> Failure:
    """Returns the failure that the process of an environment reports. The user's code can write to the socket."""
    kinds: tuple[FailureKind, ...] = get_args(FailureKind)
    kind, reason = value if isinstance(value, list) and len(value) == 2 else ("error", value)
    return Failure(next((each for each in kinds if each == kind), "error"), str(reason))


def _outcome(call: RunningCall, answer: Mapping[str, Any]) -> Outcome:
    """Converts and checks an answer. The process of the environment has checked it before, but the user's code can also
    write to the socket."""
    if call.what == "reset":
        return Outcome(call.tag, checked_observation(answer["observation"], "reset"))
    if call.what == "finish":
        state = EnvironmentState(**answer["attributes"]) if "attributes" in answer else None
        return Outcome(call.tag, reward=checked_number(answer["reward"], "finish"), environment=state)
    fields = tuple(answer[name] for name in ("observation", "reward", "done", "info"))
    return Outcome(call.tag, *checked_step(fields, "step"))
