"""Runs reward functions in worker processes with a deadline and a memory limit.

Each call runs in a worker, which is a separate Python interpreter (`worker.py`). A worker that times out, exits or
exceeds the memory limit is killed together with its child processes and replaced, so a failing function does not stop
the run.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix_like.errors import UserError
from tunix_like.rewards.calls import FunctionRewards, GroupFunction, check_form, copy_rewards, slices
from tunix_like.rewards.environment_state import state_of
from tunix_like.rewards.registry import label_of
from tunix_like.runtime import trace
from tunix_like.runtime.user_code import place_of
from tunix_like.workers.failures import Failure, FailureKind
from tunix_like.workers.messages import packed
from tunix_like.workers.process import Process, Worker
from tunix_like.workers.supervisor import LOADING, Supervisor

PATIENCE = 10
"""Limits the total time of failed calls in a batch to `PATIENCE * (timeout_seconds + start time of a worker)` per
worker. At the limit, the remaining completions of the batch stay unscored."""


class PooledFunction(GroupFunction):
    """A reward function that runs in the workers of a pool; created by `pooled`."""

    def __init__(self, name: str, function: Callable[..., Any], place: str, pool: Pool):
        self.__name__ = name
        self.function = function
        self.place = place
        self.pool = pool
        self.__signature__ = inspect.signature(function)

    @property
    def code(self) -> Any:
        return self.function

    def close(self) -> None:
        self.pool.close()

    def score_groups(self, name: str, arguments: Mapping[str, Any], count: int, group_size: int) -> FunctionRewards:
        """Scores `count` completions with one call of the reward function per group of `group_size` completions. If the
        call for a group fails, the function is called once per completion of the group."""
        return self.pool.score_groups(self.place, name, arguments, count, group_size)


def pooled(
    functions: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
    *,
    workers: int,
    timeout_seconds: float = 30.0,
    memory_gb: float = 4.0,
) -> dict[str, PooledFunction]:
    """Wraps reward functions so that they run in `workers` separate processes. Returns the wrapped functions by name.

    The processes (workers) start at the first call of a function. A worker imports each function by name, so a function
    must be defined at the top level of a module, or of a file that was given as `FILE.py:function`.

    Args:
      functions: a mapping of names to functions, or a sequence of functions (their names are then their `__name__`).
      workers: number of processes.
      timeout_seconds: time limit of a call. A call scores one group, or one completion of a group whose call failed.
      memory_gb: memory limit of a worker in GB (10^9 bytes). A worker that uses more is stopped (Linux only).

    Raises:
      UserError: another process cannot import a function, or a function is not a valid reward function (it is a
        generator).
    """
    named = functions if isinstance(functions, Mapping) else {_name_of(function): function for function in functions}
    if len(named) < len(functions):
        raise UserError("pooled: two reward functions have the same __name__; give a mapping of names to functions.")
    for name, function in named.items():
        check_form(name, function)
    places = {name: place_of(name, function) for name, function in named.items()}
    pool = Pool(list(places.values()), workers, timeout_seconds, memory_gb)
    return {name: PooledFunction(label_of(name), function, places[name], pool) for name, function in named.items()}


def close_pools(functions: Iterable[Callable[..., Any]]) -> None:
    """Ends the worker processes and connections of `functions`. The next call of a function makes new ones."""
    for function in functions:
        if isinstance(function, GroupFunction):
            function.close()


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


@dataclasses.dataclass
class _Call:
    """One call of a reward function: the indices of the completions that it scores (`rows`), and its start, a value of
    `time.perf_counter`, which includes the start of a worker if one is needed."""

    rows: range
    start: float = 0.0


class Pool:
    """Distributes calls of reward functions over worker processes. Not thread-safe."""

    def __init__(self, places: Sequence[str], workers: int, timeout_seconds: float, memory_gb: float):
        self.places = list(places)
        self.workers = workers
        self.supervisor = Supervisor("rewards", timeout_seconds, memory_gb)
        self.idle: list[Worker] = []
        self.start_seconds = 0.0  # the longest start time of a worker so far

    def close(self) -> None:
        """Kills all worker processes of the pool."""
        self.supervisor.close()
        while self.idle:
            self.idle.pop().kill()

    def score_groups(
        self, place: str, name: str, arguments: Mapping[str, Any], count: int, group_size: int
    ) -> FunctionRewards:
        """Scores `count` completions with one function of the pool, in one call per group.

        Args:
          place: where the workers import the function from: `FILE.py:NAME` or `MODULE:NAME`; one of `self.places`.
          name: name of the function in messages.
          arguments: as in `GroupFunction.score_groups`.
          group_size: number of consecutive completions per call.
        """
        batch = _Batch(self, place, name, arguments, count)
        groups = deque(_Call(range(i, min(i + group_size, count))) for i in range(0, count, group_size))
        try:
            batch.run(groups)
        except BaseException:
            self.close()  # otherwise late answers would be read as answers of the next batch
            raise
        return batch.results


class _Batch:
    """Scores one batch of completions with one reward function, in calls that the pool's worker processes execute."""

    def __init__(self, pool: Pool, place: str, name: str, arguments: Mapping[str, Any], count: int):
        self.pool = pool
        self.place = place
        self.name = name
        self.arguments = arguments
        self.results = FunctionRewards.empty(count)
        self.wasted = 0.0  # worker seconds spent in failed calls
        self.queue: deque[_Call] = deque()

    def run(self, calls: deque[_Call]) -> None:
        self.queue = calls
        pool = self.pool
        supervisor = self.pool.supervisor
        while self.queue or supervisor.calls:
            if self.wasted > PATIENCE * pool.workers * (supervisor.timeout_seconds + pool.start_seconds):
                took = f"its failed calls took {self.wasted:.0f} s of worker time in this batch"
                reason = f"Reward function '{self.name}' was not called: {took}, which exceeds the limit."
                while self.queue:
                    self.results.failures.update(dict.fromkeys(self.queue.popleft().rows, Failure("timeout", reason)))
            while self.queue and len(supervisor.calls) < pool.workers:
                self._hand_out(self.queue.popleft())
            supervisor.wait()
            for worker, call, answer in supervisor.look():
                self._take(worker, call.tag, call.what == LOADING, answer)

    def _hand_out(self, call: _Call) -> None:
        call.start = time.perf_counter()
        while self.pool.idle:
            worker = self.pool.idle.pop()
            if worker.ended is None and worker.connection.is_quiet():
                return self._send(worker, call)
            worker.kill()
        self.pool.supervisor.load(Process("tunix_like.rewards.worker", self.pool.places, "reward worker"), call)

    def _send(self, worker: Worker, call: _Call) -> None:
        part = slices(self.arguments, call.rows)
        if "environments" in part:
            part["environments"] = [state_of(each) for each in part["environments"]]
        subject = f"Reward function '{self.name}': a column ({', '.join(part)})"
        parts = (self.place, self.name, len(call.rows)), (part,)
        request = b"".join(packed(each, subject, "set rewards.workers=0") for each in parts)
        self.pool.supervisor.call(worker, request, call, "the call")

    def _take(self, worker: Worker, call: _Call, loading: bool, answer: Mapping[str, Any] | Failure) -> None:
        """Handles the end of a call, or of the start of the worker that is to execute the call."""
        if isinstance(answer, Failure):
            worker.kill()
            return self._failed(call, answer.kind, f"Reward function '{self.name}': {answer.reason}")
        if loading:
            self.pool.start_seconds = max(self.pool.start_seconds, time.perf_counter() - call.start)
            return self._send(worker, call)
        usable = True
        try:
            self._record(call, answer)
        except (KeyError, IndexError, TypeError, ValueError):  # the user's code can write to the socket
            usable = False
            reason = f"Reward function '{self.name}': its process sent {answer!r:.200}, which is not an answer."
            self._failed(call, "error", reason)
        if usable and not self.pool.supervisor.is_too_large(worker):
            self.pool.idle.append(worker)
        else:
            worker.kill()

    def _record(self, call: _Call, answer: Mapping[str, Any]) -> None:
        if "failure" in answer:
            kind, reason = answer["failure"]
            self._failed(call, kind, reason, answer["of_all"])
        else:
            failures = {i: Failure(kind, reason) for i, kind, reason in answer["failures"]}
            rewards = np.array(answer["rewards"], float)  # None becomes NaN
            abstained = np.array([value is None for value in answer["rewards"]])
            copy_rewards(self.results, call.rows, FunctionRewards(rewards, failures, abstained))
            self._trace(call, failed=False)

    def _failed(self, call: _Call, kind: FailureKind, reason: str, of_all: bool = False) -> None:
        """Handles a failed call of the reward function. Records the failure if the call had a single completion, or if
        the failure concerns all completions of the call (`of_all`). Otherwise schedules one call per completion."""
        self.wasted += time.perf_counter() - call.start
        self._trace(call, failed=True)
        if of_all or len(call.rows) == 1:
            self.results.failures.update(dict.fromkeys(call.rows, Failure(kind, reason)))
        else:
            self.queue.extend(_Call(range(i, i + 1)) for i in call.rows)

    def _trace(self, call: _Call, failed: bool) -> None:
        end = time.perf_counter()
        count = len(call.rows)
        trace.add_call("reward calls", self.name, call.start, end, failed=failed, completions=count)
