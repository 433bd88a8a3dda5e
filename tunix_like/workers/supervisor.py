"""Watches calls of foreign code in other processes: the time limit of each call, the memory and the end of its
process."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from tunix_like.workers.failures import Failure
from tunix_like.workers.messages import Lost
from tunix_like.workers.process import Process, Worker, memory_of, wait_for

START_SECONDS = 120
"""Maximum seconds for a process to start and to import the user's modules."""

LOADING = "the import of its module"
"""Names the start of a process in error messages."""

POLL_SECONDS = 0.1
"""Interval in seconds between checks of the memory and the end of processes that execute a call."""

EXIT_SECONDS = 1.0
"""Maximum seconds between the end of a connection and the end of its process."""


@dataclasses.dataclass
class RunningCall:
    """A call that a process executes.

    Attributes:
      tag: identifies the call for the code that started it.
      what: names the call in error messages.
      limit: the time limit in error messages.
      start, deadline: values of `time.perf_counter`.
    """

    tag: Any
    what: str
    limit: str
    start: float
    deadline: float


class Supervisor:
    """Runs calls in processes, one call per process at a time. Not thread-safe.

    If `look` is not called for more than a second, this time does not count towards the time limits.

    Args:
      section: the section of the configuration with the limits, for error messages.
      timeout_seconds: time limit of a call.
      memory_gb: memory limit in GB (10^9 bytes) of a process together with the processes that it started (Linux only).

    Attributes:
      calls: the running calls.
    """

    def __init__(self, section: str, timeout_seconds: float, memory_gb: float):
        self.section = section
        self.timeout_seconds = timeout_seconds
        self.memory_gb = memory_gb
        self.calls: dict[Worker, RunningCall] = {}
        self._looked = self._measured = 0.0

    def load(self, process: Process, tag: Any = None) -> None:
        """Starts to wait for the first message of a process, which the process sends when it has imported the user's
        modules."""
        self._begin(process, tag, LOADING, START_SECONDS, f"{START_SECONDS} s")

    def call(self, worker: Worker, request: bytes, tag: Any, what: str) -> None:
        limit = f"{self.section}.timeout_seconds={self.timeout_seconds:g} s"
        self._begin(worker, tag, what, self.timeout_seconds, limit)
        worker.connection.send(request)

    def _begin(self, worker: Worker, tag: Any, what: str, seconds: float, limit: str) -> None:
        now = time.perf_counter()
        self.calls[worker] = RunningCall(tag, what, limit, now, now + seconds)

    def look(self) -> list[tuple[Worker, RunningCall, dict[str, Any] | Failure]]:
        """Returns the calls that have ended, each with the answer or the failure. After a failure, the process must be
        killed."""
        now = time.perf_counter()
        ended = []
        measure = now - self._measured > POLL_SECONDS / 2
        for worker, call in list(self.calls.items()):
            if now - self._looked > 10 * POLL_SECONDS:
                call.deadline += now - max(self._looked, call.start)
            if (answer := self._look_at(worker, call, now, measure)) is not None:
                del self.calls[worker]
                ended.append((worker, call, answer))
        self._looked = now
        self._measured = now if measure else self._measured
        return ended

    def _look_at(self, worker: Worker, call: RunningCall, now: float, measure: bool) -> dict[str, Any] | Failure | None:
        ended = worker.ended  # read before the socket, so that an answer written just before the end is not missed
        try:
            answer = worker.receive()
        except Lost as error:
            return Failure("error", f"{error}.")
        if answer is not None:
            return answer
        if ended is not None:
            return Failure("error", f"its process {ended} in {call.what}.{worker.last_output()}")
        if measure and self.is_too_large(worker):
            return self.too_large(call)
        if worker.connection.closed:
            call.deadline = min(call.deadline, now + EXIT_SECONDS)
        if now <= call.deadline:
            return None
        if worker.connection.closed:
            return Failure("error", f"its process closed its socket in {call.what}.")
        return Failure("timeout", f"{call.what} did not return within {call.limit}.")

    def is_too_large(self, worker: Worker) -> bool:
        """Returns whether a process exceeds the memory limit."""
        return worker.pid is not None and memory_of(worker.pid) > self.memory_gb * 1e9

    def too_large(self, call: RunningCall) -> Failure:
        limit = f"{self.section}.memory_gb={self.memory_gb:g} GB"
        return Failure("error", f"it used more than {limit} in {call.what} and was stopped.")

    def wait(self, other: Process | None = None) -> bool:
        """Waits for a message of a process, until the earliest deadline, and at most for `POLL_SECONDS`. Returns False
        if only processes that execute calls have sent something, and not `other`."""
        deadlines = [call.deadline - time.perf_counter() for call in self.calls.values()]
        workers = {*self.calls} if other is None else {*self.calls, other}
        ready = wait_for(workers, max(0.0, min([POLL_SECONDS, *deadlines])))
        return not ready or other in ready

    def close(self) -> None:
        """Drops all calls and kills their processes."""
        while self.calls:
            self.calls.popitem()[0].kill()
