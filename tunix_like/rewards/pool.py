"""Runs reward functions in worker processes with a deadline and a memory limit.

Each call runs in a worker, which is a separate Python interpreter (`worker.py`). A worker that times out, exits or
exceeds the memory limit is killed together with its child processes and replaced, so a failing function does not stop
the run.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import selectors
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunix_like.errors import UserError
from tunix_like.rewards.calls import Failure, FunctionRewards, arguments_of, check_form, copy_rewards, slices
from tunix_like.rewards.process import WorkerProcess

START_SECONDS = 120
"""Maximum seconds for a worker to start and to load the functions."""

PATIENCE = 10
"""Limits the total time of failed calls in a batch to `PATIENCE * (timeout_seconds + start time of a worker)` per
worker. At the limit, the remaining completions of the batch stay unscored."""

POLL_SECONDS = 0.2
"""Interval of the memory checks while workers are busy."""


class PooledFunction:
    """A reward function that runs in the workers of a pool; created by `pooled`."""

    def __init__(self, name: str, function: Callable[..., Any], place: str, pool: Pool):
        self.__name__, self.place, self.pool = name, place, pool
        self.__signature__ = inspect.signature(function)

    def score_groups(
        self, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
    ) -> FunctionRewards:
        """Scores `count` completions with one call of the reward function per group of `group_size` completions. If the
        call for a group fails, the function is called once per completion of the group."""
        return self.pool.score_groups(self.place, name, arguments, count, group_size)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """Returns the rewards of the completions of one group; NaN for a completion for which the function fails."""
        given, count = {"prompts": prompts, "completions": completions, **columns}, len(completions)
        arguments = {key: given[key] for key in arguments_of(self.__name__, self, given)}
        return list(self.score_groups(self.__name__, arguments, count, max(count, 1)).rewards.tolist())


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
      UserError: another process cannot import a function, or a function is not a valid reward function (it is async or
        a generator).
    """
    named = functions if isinstance(functions, Mapping) else {_name_of(function): function for function in functions}
    if len(named) < len(functions):
        raise UserError("pooled: two reward functions have the same __name__; give a mapping of names to functions.")
    for name, function in named.items():
        check_form(name, function)
    places = {name: place_of(name, function) for name, function in named.items()}
    pool = Pool(list(places.values()), workers, timeout_seconds, memory_gb)
    return {name: PooledFunction(name, function, places[name], pool) for name, function in named.items()}


def close_pools(functions: Iterable[Callable[..., Any]]) -> None:
    """Stops the worker processes of those `functions` that `pooled` returned. The next call of such a function starts
    new processes."""
    for function in functions:
        if isinstance(function, PooledFunction):
            function.pool.close()


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


IN_THIS_PROCESS = "run it in this process (rewards.workers=0, or without `pooled`)"


def place_of(
    name: str, function: Callable[..., Any], what: str = "Reward function", otherwise: str = IN_THIS_PROCESS
) -> str:
    """Returns the location from which another process imports a function or class: `/absolute/file.py:function` or
    `module:function`.

    Args:
      what: the kind of user code, for the error message.
      otherwise: what to do if the code cannot be moved to an importable file, for the error message.

    Raises:
      UserError: another process cannot import the function or class.
    """
    if ":" in name:
        file, _, attribute = name.rpartition(":")
        return f"{Path(file).resolve()}:{attribute}" if file.endswith(".py") else name
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(str(module)), attribute, None) is function:
        file = str(sys.modules[str(module)].__file__)
        return f"{file}:{attribute}" if str(module).startswith("tunix_like_user_") else f"{module}:{attribute}"
    raise UserError(
        f"{what} '{name}' cannot run in a worker, which imports it by name: it is a closure, a lambda, a method, or is "
        f"defined in the main script. Move it to the top level of a file that is imported, or {otherwise}."
    )


@dataclasses.dataclass
class _Call:
    """One call of a reward function: the indices of the completions that it scores (`rows`), and the `time.monotonic`
    values of its start (`given`) and of its deadline."""

    rows: range
    given: float = 0.0
    deadline: float = 0.0


class _Slot:
    """The state of one of the pool's worker processes. `worker` is None if the process is not running. `ready` is True
    when it has loaded the functions. `call` is the call of a reward function that it executes, or None."""

    worker: WorkerProcess | None = None
    ready = False
    call: _Call | None = None


class Pool:
    """Distributes calls of reward functions over worker processes. Not thread-safe."""

    def __init__(self, places: Sequence[str], workers: int, timeout_seconds: float, memory_gb: float):
        self.places, self.workers = list(places), workers
        self.timeout_seconds, self.memory_bytes = timeout_seconds, int(memory_gb * 1e9)
        self._slots = [_Slot() for _ in range(workers)]
        self._start_seconds = 0.0  # the longest start time of a worker so far
        # also runs at interpreter exit if `close` was not called
        self._finalizer = weakref.finalize(self, _kill_all, self._slots)

    def close(self) -> None:
        """Kills all worker processes of the pool."""
        _kill_all(self._slots)

    def score_groups(
        self, place: str, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
    ) -> FunctionRewards:
        """Scores `count` completions with one function of the pool, in one call per group.

        Args:
          place: where the workers import the function from: `FILE.py:NAME` or `MODULE:NAME`; one of `self.places`.
          name: name of the function in messages.
          arguments: the arguments of the function by name; each is a sequence with one item per completion.
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

    def __init__(self, pool: Pool, place: str, name: str, arguments: Mapping[str, Sequence[Any]], count: int):
        self.pool, self.place, self.name, self.arguments = pool, place, name, arguments
        self.results = FunctionRewards(np.full(count, np.nan), {})
        self.wasted = 0.0  # worker seconds spent in failed calls
        self.queue: deque[_Call] = deque()

    def run(self, calls: deque[_Call]) -> None:
        self.queue = calls
        slots = self.pool._slots
        while self.queue or any(slot.call for slot in slots):
            if self.queue and self.wasted > self._patience():
                self._give_up()
            for slot in slots:
                if self.queue and slot.call is None:
                    self._hand_out(slot, self.queue.popleft())
            if busy := [slot for slot in slots if slot.call is not None]:
                self._wait(busy)

    def _patience(self) -> float:
        pool = self.pool
        return PATIENCE * pool.workers * (pool.timeout_seconds + pool._start_seconds)

    def _give_up(self) -> None:
        reason = (
            f"Reward function '{self.name}' was not called: its failed calls took {self.wasted:.0f} s of worker time "
            "in this batch, which exceeds the limit."
        )
        for call in self.queue:
            self.results.failures.update(dict.fromkeys(call.rows, Failure("timeout", reason)))
        self.queue.clear()

    def _hand_out(self, slot: _Slot, call: _Call) -> None:
        now = time.monotonic()
        if slot.worker is not None and not slot.worker.alive:
            slot.worker.kill()
            slot.worker = None
        if slot.worker is None:
            slot.worker, slot.ready = WorkerProcess(self.pool.places), False
        call.given, call.deadline = now, now + (self.pool.timeout_seconds if slot.ready else START_SECONDS)
        slot.call = call
        slot.worker.send(self._request(call.rows))

    def _request(self, rows: range) -> bytes:
        part = slices(self.arguments, rows)
        try:
            return pickle.dumps((self.place, self.name, part, len(rows)))
        except Exception as error:
            raise UserError(
                f"Reward function '{self.name}': a column ({', '.join(part)}) cannot be sent to a worker "
                f"({type(error).__name__}: {error}); set rewards.workers=0."
            ) from error

    def _wait(self, busy: list[_Slot]) -> None:
        """Waits until a worker process that executes a call sends or can receive data, until the deadline of a call, or
        for `POLL_SECONDS`. Then checks all worker processes that execute a call."""
        nearest = min(slot.call.deadline for slot in busy if slot.call) - time.monotonic()
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                assert slot.worker is not None
                slot.worker.register(selector)
            selector.select(max(min(nearest, POLL_SECONDS), 0))
        for slot in busy:
            self._look_at(slot)

    def _look_at(self, slot: _Slot) -> None:
        worker, call, pool = slot.worker, slot.call, self.pool
        assert worker is not None and call is not None
        alive = worker.alive  # checked before `pump`, so that output written just before an exit is still read
        answer, now, size = worker.pump(), time.monotonic(), worker.memory()
        if answer is not None and not slot.ready:
            slot.ready, call.deadline = True, now + pool.timeout_seconds
            pool._start_seconds = max(pool._start_seconds, now - call.given)
        elif answer is not None:
            slot.call = None
            if "error" in answer:
                self._failed(call, "error", answer["error"], now, answer["of_all"])
            else:
                failures = {i: Failure(kind, reason) for i, kind, reason in answer["failures"]}
                copy_rewards(self.results, call.rows, FunctionRewards(np.array(answer["rewards"]), failures))
            if size > pool.memory_bytes:
                self._replace(slot)
        elif not alive:
            self._failed(call, "error", f"Reward function '{self.name}': its worker {self._replace(slot)}", now)
        elif size > pool.memory_bytes:
            self._replace(slot)
            limit = f"more than rewards.memory_gb={pool.memory_bytes / 1e9:g} GB"
            self._failed(call, "error", f"Reward function '{self.name}': its worker held {limit} and was stopped.", now)
        elif now > call.deadline:
            self._replace(slot)
            what = (
                f"did not return within rewards.timeout_seconds={pool.timeout_seconds:g} s"
                if slot.ready
                else f"was not loaded by a worker within {START_SECONDS} s"
            )
            self._failed(call, "timeout", f"Reward function '{self.name}' {what}.", now)

    def _replace(self, slot: _Slot) -> str:
        """Kills a worker process of the pool and returns a description of how it ended. A later call starts a new
        worker process in its place."""
        assert slot.worker is not None
        how = slot.worker.kill()
        slot.worker, slot.call = None, None
        return how

    def _failed(
        self, call: _Call, kind: Literal["timeout", "error"], reason: str, now: float, of_all: bool = False
    ) -> None:
        """Handles a failed call of the reward function. Records the failure if the call had a single completion, or if
        the failure concerns all completions of the call (`of_all`). Otherwise schedules one call per completion."""
        self.wasted += now - call.given
        if of_all or len(call.rows) == 1:
            self.results.failures.update(dict.fromkeys(call.rows, Failure(kind, reason)))
        else:
            self.queue.extend(_Call(range(i, i + 1)) for i in call.rows)


def _kill_all(slots: Sequence[_Slot]) -> None:
    for slot in slots:
        if slot.worker is not None:
            slot.worker.kill()
        slot.worker, slot.call = None, None
