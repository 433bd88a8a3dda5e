"""Reward functions that wait for another service: many calls at the same time, each with a deadline and retries.

The calls run in one event loop of this process, in a thread of its own, so clients that belong to a loop can be kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.calls import FunctionRewards, GroupFunction, check_form, is_number
from tunix_like.runtime import trace
from tunix_like.workers.failures import Failure, explain

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
"""Seconds before the first retry, doubled with each further one, and their limit."""

DOWN = 16
"""Calls that fail one after the other, with all their retries, after which the rest of a batch is not called."""

SINGULAR = {"prompts": "prompt", "completions": "completion"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """How a service is called.

    Attributes:
      concurrency: calls at the same time.
      timeout_seconds: deadline of one attempt.
      retries: further attempts after a failed one.
    """

    concurrency: int = 64
    timeout_seconds: float = 30.0
    retries: int = 4


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():  # a reward function can stop the loop, or a task of it can end it by `sys.exit`
            with contextlib.suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, name="waiting rewards", daemon=True).start()
    return loop


class WaitingFunction(GroupFunction):
    """The base of reward functions that wait. A subclass makes the calls and reads their results.

    Attributes:
      counts: attempts (`calls`), those after the first of a call, calls without any answer, and what else a subclass
        counts, since `take_counts`.
    """

    def __init__(self, name: str, limits: Limits | None = None):
        self.__name__ = name
        self.limits = limits or Limits()
        self.counts: collections.Counter[str] = collections.Counter()

    def take_counts(self) -> dict[str, int]:
        """Returns the counts since the last call of this method."""
        counts = self.counts
        self.counts = collections.Counter()
        return {"calls": 0, "retries": 0, "unanswered": 0} | counts

    def explain(self, name: str, error: BaseException) -> str:
        return explain(name, error)

    def wait_for(self, name: str, calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """Awaits all calls and returns the result of each; a `Failure` if its last attempt failed, or if the `DOWN`
        calls before it failed."""
        future = asyncio.run_coroutine_threadsafe(self._all(name, calls), _loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _all(self, name: str, calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
        slots = asyncio.Semaphore(self.limits.concurrency)
        failed = 0

        async def one(call: Callable[[], Awaitable[Any]]) -> Any:
            nonlocal failed
            async with slots:
                if failed >= DOWN:
                    reason = f"Reward '{name}' was not called: the last {failed} calls failed, with all their retries."
                    return Failure("error", reason)
                answered, result = await self._attempts(name, call)
            self.counts["unanswered"] += not answered
            failed = 0 if answered else failed + 1
            return result

        return await asyncio.gather(*map(one, calls))

    async def _attempts(self, name: str, call: Callable[[], Awaitable[Any]]) -> tuple[bool, Any]:
        """Returns whether an attempt had an answer, which can be a `Failure` too, and the answer or the failure."""
        limits = self.limits
        for attempt in range(limits.retries + 1):
            self.counts["calls"] += 1
            self.counts["retries"] += attempt > 0
            wait = 0.0
            again = True
            rejected = False
            start = time.perf_counter()
            failed = True
            try:
                async with asyncio.timeout(limits.timeout_seconds) as deadline:
                    # In a task of its own, which the function may cancel.
                    answer = await asyncio.ensure_future(call())
                    failed = isinstance(answer, Failure)
                    return True, answer
            except BaseException as error:  # of the function, which must not end the loop: a signal reaches no thread
                if (task := asyncio.current_task()) is not None and task.cancelling():  # `wait_for` was interrupted
                    raise
                if deadline.expired():
                    failure = Failure("timeout", f"Reward '{name}' gave no answer within {limits.timeout_seconds:g} s.")
                else:
                    failure = Failure("error", self.explain(name, error))
                    wait, again, rejected = _after(error)
            finally:
                end = time.perf_counter()
                trace.add_call("reward calls", name, start, end, failed=failed, attempt=attempt + 1)
            if not again or attempt == limits.retries:
                break
            delay = min(FIRST_DELAY * 2**attempt, LONGEST_DELAY) * random.uniform(1.0, 1.25)
            await asyncio.sleep(max(delay, wait))
        return rejected, failure


class PerCompletion(WaitingFunction):
    """`async def f(prompt, completion, **columns)`, which scores one completion with the values of its row."""

    def __init__(self, name: str, function: Callable[..., Awaitable[Any]], limits: Limits | None = None):
        super().__init__(name, limits)
        self.function = function
        plural = {one: many for many, one in SINGULAR.items()}
        signature = inspect.signature(function)
        parameters = [each.replace(name=plural.get(each.name, each.name)) for each in signature.parameters.values()]
        self.__signature__ = signature.replace(parameters=parameters)

    @property
    def code(self) -> Any:
        return self.function

    def score_groups(self, name: str, arguments: Mapping[str, Any], count: int, group_size: int) -> FunctionRewards:
        def of_row(i: int) -> dict[str, Any]:
            given = {key: each if is_number(each) else each[i] for key, each in arguments.items()}
            return {SINGULAR.get(key, key): value for key, value in given.items()}

        rows = map(of_row, range(count))
        return as_rewards(name, self.wait_for(name, [functools.partial(self.function, **row) for row in rows]))


def as_rewards(name: str, values: Sequence[Any]) -> FunctionRewards:
    """Returns the rewards of values, one per completion; a value can be a `Failure`."""
    results = FunctionRewards.empty(len(values))
    for i, value in enumerate(values):
        if isinstance(value, Failure):
            results.failures[i] = value
        else:
            results.set(i, value, f"Reward function '{name}': {value!r:.200}")
    return results


def scores_one(function: Callable[..., Any]) -> bool:
    """Returns whether a reward function is async and scores one completion: it has a parameter `completion`."""
    inner: Any = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(inner) and "completion" in inspect.signature(function).parameters


def waiting(
    function: Callable[..., Awaitable[Any]],
    *,
    concurrency: int = Limits.concurrency,
    timeout_seconds: float = Limits.timeout_seconds,
    retries: int = Limits.retries,
) -> PerCompletion:
    """Makes a reward function of `async def f(prompt, completion, **columns)`, which scores one completion, with other
    limits than those that a learner gives it.

    Args:
      concurrency: calls at the same time.
      timeout_seconds: deadline of one attempt.
      retries: further attempts after an exception or at the deadline, with growing pauses. The HTTP errors 4xx of
        openai, httpx and aiohttp are not retried, except 408, 409 and 429; a `Retry-After` is kept.
    """
    name = getattr(function, "__name__", type(function).__name__)
    check_form(name, function)
    if not scores_one(function):
        raise UserError(f"waiting: '{name}' is not an async function with a parameter `completion`.")
    return PerCompletion(name, function, Limits(concurrency, timeout_seconds, retries))


def _after(error: BaseException) -> tuple[float, bool, bool]:
    """Returns the seconds that a server asked to wait before a retry, whether a retry can help, and whether the server
    rejected this one request, for example because a completion is too long for it."""
    response = getattr(error, "response", None)  # of openai and httpx; an error of aiohttp has status and headers
    status = getattr(error, "status", getattr(response, "status_code", None))
    headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
    try:
        wait = min(float(headers.get("retry-after", 0)), LONGEST_DELAY)
    except ValueError:  # a date
        wait = 0.0
    refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 409, 429)
    return wait, not refused and not isinstance(error, UserError), status in (400, 413, 422)
