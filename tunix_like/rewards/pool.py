"""Reward functions in processes of their own: with a deadline, and whatever a function does, the run goes on.

Each call goes to a worker, a fresh interpreter (`worker.py`). One that does not answer in time, ends, or grows too
large is killed with all that it started, and another takes its place. It does NOT know how rewards are added up.
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
from tunix_like.rewards.calls import Failure, Marks, arguments_of, check_form, put, slices
from tunix_like.rewards.process import WorkerProcess

START_SECONDS = 120
"""How long a worker may take to start and to load the functions."""

PATIENCE = 10
"""Calls that fail may take this many times `timeout_seconds` (and the seconds that a start takes) of each worker's time
in a batch; what is not scored by then stays unscored."""

POLL_SECONDS = 0.2
"""How often the memory of workers is looked at while they work."""


class PooledFunction:
    """A reward function that runs in the workers of a pool; `pooled` makes it."""

    def __init__(self, name: str, function: Callable[..., Any], place: str, pool: Pool):
        self.__name__, self.place, self.pool = name, place, pool
        self.__signature__ = inspect.signature(function)

    def marks(self, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int) -> Marks:
        """The marks of `count` completions, groups whole; of a group for which the function fails, one by one."""
        return self.pool.marks(self.place, name, arguments, count, group_size)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """Rewards of one group; NaN where the function fails."""
        given, count = {"prompts": prompts, "completions": completions, **columns}, len(completions)
        arguments = {key: given[key] for key in arguments_of(self.__name__, self, given)}
        return list(self.marks(self.__name__, arguments, count, max(count, 1)).rewards.tolist())


def pooled(
    functions: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
    *,
    workers: int,
    timeout_seconds: float = 30.0,
    memory_gb: float = 4.0,
) -> dict[str, PooledFunction]:
    """Reward functions that run in `workers` processes of their own, by name (a sequence: by their `__name__`).

    Workers start at the first call. A worker imports a function anew, so it must stand at the top level of a module or
    of a file that was named as `FILE.py:function`.

    Args:
      timeout_seconds: a call (one group, or one completion of a group that failed) that takes longer is stopped.
      memory_gb: a worker that holds more than so many GB (10^9 bytes) of memory is stopped (Linux).

    Raises:
      UserError: a function that no other process can import, or that is none of rewards (async, a generator).
    """
    named = functions if isinstance(functions, Mapping) else {_name_of(each): each for each in functions}
    if len(named) < len(functions):
        raise UserError("pooled: two reward functions have the same __name__; give a mapping of names to functions.")
    for name, function in named.items():
        check_form(name, function)
    places = {name: place_of(name, function) for name, function in named.items()}
    pool = Pool(list(places.values()), workers, timeout_seconds, memory_gb)
    return {name: PooledFunction(name, function, places[name], pool) for name, function in named.items()}


def close_pools(functions: Iterable[Callable[..., Any]]) -> None:
    """Ends the workers of those functions that have some; they start again when a function is called again."""
    for function in functions:
        if isinstance(function, PooledFunction):
            function.pool.close()


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def place_of(name: str, function: Callable[..., Any]) -> str:
    """Where another process finds a function: `/absolute/file.py:function` or `module:function`.

    Raises:
      UserError: it finds it nowhere.
    """
    if ":" in name:
        file, _, attribute = name.rpartition(":")
        return f"{Path(file).resolve()}:{attribute}" if file.endswith(".py") else name
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(str(module)), attribute, None) is function:
        file = str(sys.modules[str(module)].__file__)
        return f"{file}:{attribute}" if str(module).startswith("tunix_like_user_") else f"{module}:{attribute}"
    raise UserError(
        f"Reward function '{name}' cannot run in a worker, which imports it by name: it is a closure, a lambda, a "
        "method, or defined in the script itself. Move it to the top level of a file that is imported, or run it in "
        "this process (rewards.workers=0, or without `pooled`)."
    )


@dataclasses.dataclass
class _Call:
    """Completions that one call is for, and when (by `time.monotonic`) it was handed out and must be over."""

    rows: range
    given: float = 0.0
    deadline: float = 0.0


class _Slot:
    """A place for a worker, and the call that it works on."""

    worker: WorkerProcess | None = None
    ready = False
    call: _Call | None = None


class Pool:
    """Workers that share the calls of a batch. It is used by one thread at a time."""

    def __init__(self, places: Sequence[str], workers: int, timeout_seconds: float, memory_gb: float):
        self.places, self.workers = list(places), workers
        self.timeout_seconds, self.memory_bytes = timeout_seconds, int(memory_gb * 1e9)
        self._slots = [_Slot() for _ in range(workers)]
        self._start_seconds = 0.0  # the longest start so far
        # at the end of the interpreter too, should nobody call `close`
        self._finalizer = weakref.finalize(self, _kill_all, self._slots)

    def close(self) -> None:
        """Kills all workers."""
        _kill_all(self._slots)

    def marks(
        self, place: str, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
    ) -> Marks:
        """The marks of `count` completions by the function at `place`."""
        batch = _Batch(self, place, name, arguments, count)
        groups = deque(_Call(range(i, min(i + group_size, count))) for i in range(0, count, group_size))
        try:
            batch.run(groups)
        except BaseException:
            self.close()  # their answers would be taken for those of the next batch
            raise
        return batch.marks


class _Batch:
    """One function's calls for one batch."""

    def __init__(self, pool: Pool, place: str, name: str, arguments: Mapping[str, Sequence[Any]], count: int):
        self.pool, self.place, self.name, self.arguments = pool, place, name, arguments
        self.marks = Marks(np.full(count, np.nan), {})
        self.wasted = 0.0  # seconds of workers in calls that failed
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
            f"Reward function '{self.name}' was not called: calls of it that failed took {self.wasted:.0f} s of the "
            "workers' time in this batch, which is all that such calls are given."
        )
        for call in self.queue:
            self.marks.failures.update(dict.fromkeys(call.rows, Failure("timeout", reason)))
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
        """Sleeps until a worker has something to say or a deadline is over, and deals with it."""
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
        alive = worker.alive  # asked first: what a worker says before it ends is read
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
                put(self.marks, call.rows, Marks(np.array(answer["rewards"]), failures))
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
        """Kills the slot's worker; the next call there starts another. Returns how it ended."""
        assert slot.worker is not None
        how = slot.worker.kill()
        slot.worker, slot.call = None, None
        return how

    def _failed(
        self, call: _Call, kind: Literal["timeout", "error"], reason: str, now: float, of_all: bool = False
    ) -> None:
        """Notes it, if it is that of a single completion or of all; else each is tried by itself, after all groups."""
        self.wasted += now - call.given
        if of_all or len(call.rows) == 1:
            self.marks.failures.update(dict.fromkeys(call.rows, Failure(kind, reason)))
        else:
            self.queue.extend(_Call(range(i, i + 1)) for i in call.rows)


def _kill_all(slots: Sequence[_Slot]) -> None:
    for slot in slots:
        if slot.worker is not None:
            slot.worker.kill()
        slot.worker, slot.call = None, None
