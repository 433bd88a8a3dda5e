"""Calls one reward function: selects its arguments, checks its return values and finds the completions for which it
fails.

The functions run in this process without a deadline; `pool.py` runs them in workers with deadlines.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tunix_like.errors import UserError
from tunix_like.runtime.moment import NAMES, UNKNOWN, asked_numbers
from tunix_like.tasks.results import LARGEST_REWARD
from tunix_like.workers.failures import Failure, explain

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WrongCount(UserError):
    """A reward function did not return one value per completion, so its values cannot be assigned to completions."""


class FunctionRewards(NamedTuple):
    """The results of one reward function for n completions.

    Attributes:
      rewards: [n]; NaN where the function returned None or NaN, or failed.
      failures: the failures by index of the completion. A completion for which the function returned None or NaN has
        the reward NaN but no entry here.
      abstained: [n]; True where the function returned None: it does not apply to this completion.
    """

    rewards: NDArray[np.float64]
    failures: dict[int, Failure]
    abstained: NDArray[np.bool_]

    @staticmethod
    def empty(count: int) -> FunctionRewards:
        """Returns the results for `count` completions that have no reward yet."""
        return FunctionRewards(np.full(count, np.nan), {}, np.zeros(count, bool))

    def set(self, i: int, value: Any, what: str) -> None:
        """Sets the reward of a completion to a value that a function returned. `what` begins the message about a wrong
        value."""
        self.rewards[i], problem = number_of(value)
        self.abstained[i] = value is None
        if problem is not None:
            self.failures[i] = Failure("error", f"{what} {problem}.")

    def values(self) -> list[float | None]:
        """Returns the rewards as a function returns them: None where it abstained."""
        return [None if none else x for none, x in zip(self.abstained, self.rewards.tolist(), strict=True)]


class GroupFunction(abc.ABC):
    """A reward function that scores groups of completions itself, in worker processes or with calls that wait.

    Attributes:
      unrendered: whether its `prompts` are those before rendering: texts or lists of messages.
      adds: columns that its calls get beside those of the data.
    """

    __name__: str
    unrendered = False
    adds: tuple[str, ...] = ()

    @property
    @abc.abstractmethod
    def code(self) -> Any:
        """The function, or texts, that determine the rewards; a resumed run compares them with those before."""

    @abc.abstractmethod
    def score_groups(self, name: str, arguments: Mapping[str, Any], count: int, group_size: int) -> FunctionRewards:
        """Scores `count` completions, in groups of `group_size`.

        Args:
          name: name of the function in messages.
          arguments: the arguments of the function by name; each is a sequence with one item per completion, or a number
            of the run (see `is_number`).
        """

    def close(self) -> None:  # noqa: B027
        """Frees processes and connections. A later call makes new ones."""

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any] | float
    ) -> list[float | None]:
        """Returns the rewards of the completions of one group; None for a completion to which the function does not
        apply, NaN for one for which it fails."""
        given = {"prompts": prompts, "completions": completions, **columns}
        count = len(completions)
        arguments = {key: given[key] for key in arguments_of(self.__name__, self, given)}
        return self.score_groups(self.__name__, arguments, count, max(count, 1)).values()


def check_form(name: str, function: Any) -> None:
    """Checks that an object can be called as a reward function.

    Raises:
      UserError: the object is not callable, has no signature, or is a generator function.
    """
    if not callable(function):
        raise UserError(
            f"Reward function '{name}' is {_show(function)}, which is not callable; the expected signature is "
            "f(prompts, completions, **columns)."
        )
    forms = (function, function.__call__)  # the __call__ of an object may be the generator function
    if any(map(inspect.isgeneratorfunction, forms)) or any(map(inspect.isasyncgenfunction, forms)):
        raise UserError(
            f"Reward function '{name}' is a generator (it has a yield); return a list with one number per completion."
        )
    try:
        inspect.signature(function)
    except ValueError:  # some built-in functions of Python have no signature
        raise UserError(
            f"Reward function '{name}' does not accept keyword arguments; the expected signature is "
            "f(prompts, completions, **columns)."
        ) from None


def arguments_of(
    name: str, function: Callable[..., Any], columns: Collection[str], moment: Collection[str] = ()
) -> list[str]:
    """Returns the columns (including `prompts` and `completions`) that the function accepts as keyword arguments, and
    the names in `moment` that it asks for.

    Raises:
      UserError: the function requires a column that does not exist, or is not a valid reward function.
    """
    check_form(name, function)
    parameters = inspect.signature(function).parameters.values()
    asked = asked_numbers(function, moment, columns)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in needed if p.name not in (*columns, *asked) or p.kind is p.POSITIONAL_ONLY]
    if missing and moment and missing[0] in {*NAMES} - {*moment}:
        raise UserError(f"Reward function '{name}' needs an argument '{missing[0]}': {UNKNOWN}")
    if missing:
        cure = " data.answer_template builds it from other columns, e.g. '{column}'." if missing[0] == "answer" else ""
        raise UserError(
            f"Reward function '{name}' needs an argument '{missing[0]}', but the rows have no such column; they have: "
            f"{', '.join(sorted(columns))}.{cure} The expected signature is f(prompts, completions, **columns)."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return [*columns, *asked]
    return [p.name for p in parameters if p.name in columns or p.name in asked]


def is_number(argument: Any) -> bool:
    """Returns whether an argument of a reward function is one number for all completions, as those of the moment of the
    run are, and not a sequence with a value for each."""
    return isinstance(argument, int | float)


def call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], count: int) -> FunctionRewards:
    """Calls a reward function once for `count` completions. The function gets a copy of each list, and can be async.

    A returned None means that the function does not apply to the completion, NaN that the completion cannot be scored.
    Any other value must be a number with an absolute value of at most 1e15;
    otherwise a failure is recorded for its completion.

    Raises:
      WrongCount: the function returned a wrong number of values, or not a list.
      Exception: any exception that the function raises.
    """
    given = {key: value if is_number(value) else list(value) for key, value in arguments.items()}
    values = result_of(function(**given))
    if hasattr(values, "tolist"):  # numpy and jax arrays
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise WrongCount(
            f"Reward function '{name}' must return one number per completion; it returned {_show(values)}."
        )
    if len(values) != count:
        raise WrongCount(f"Reward function '{name}' returned {len(values)} values for {count} completions.")
    results = FunctionRewards.empty(count)
    for i, value in enumerate(values):
        results.set(i, value, f"Reward function '{name}': value {i}, {_show(value)},")
    return results


def given_text(value: Any, column: str, prompt: Any) -> str:
    """Returns the correct answer of a row as text.

    Raises:
      UserError: it is missing (None, NaN or an empty text). The message names the column and the prompt of the row.
    """
    missing = value is None or value != value or (isinstance(value, str) and not value.strip())
    if missing:
        raise UserError(
            f"column '{column}' is empty in the row with the prompt {prompt!r:.200}; write the correct answer there."
        )
    return str(value)


def result_of(value: Any) -> Any:
    """Returns the result of an awaitable, which runs in an event loop of its own; any other value unchanged.

    A notebook runs its cells inside an event loop, in which no second loop can run. The new loop is then in a thread.
    """
    if not inspect.isawaitable(value):
        return value

    async def wait(value: Awaitable[Any]) -> Any:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait(value))
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait(value)).result()


def number_of(value: Any) -> tuple[float, str | None]:
    """Converts a value that a reward function returned. Returns the reward (NaN if there is none) and the problem with
    the value (None if the value is valid)."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # scalars of numpy and jax
    if number is None:
        return math.nan, None
    if isinstance(number, str | bytes):  # float() would parse them
        return math.nan, "is not a number"
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    except (TypeError, ValueError):
        return math.nan, "is not a number"
    if abs(reward) > LARGEST_REWARD:  # also true for infinities; false for NaN
        return math.nan, f"is not within +-{LARGEST_REWARD:.0e}"
    return reward, None


def call_in_process(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any], count: int, group_size: int
) -> FunctionRewards:
    """Scores `count` completions with a reward function in this process. Finds the completions for which it fails.

    The function is called once with all completions. If this call fails, the function is called once per group. If the
    call of a group fails, the function is called once per completion of the group. Only completions that fail in a call
    of their own stay unscored. If the function returns a wrong number of values for a group, the whole group stays
    unscored.
    """
    results = FunctionRewards.empty(count)

    def attempt(rows: range) -> None:
        try:
            part = call(name, function, slices(arguments, rows), len(rows))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit and asyncio.CancelledError
            reason = explain(name, error)
            of_all = isinstance(error, WrongCount) and len(rows) <= group_size
        else:
            return copy_rewards(results, rows, part)
        if of_all or len(rows) == 1:
            return results.failures.update(dict.fromkeys(rows, Failure("error", reason)))
        finer = group_size if len(rows) > group_size else 1
        for start in range(rows.start, rows.stop, finer):
            attempt(range(start, min(start + finer, rows.stop)))

    if count:
        attempt(range(count))
    return results


def copy_rewards(results: FunctionRewards, rows: range, part: FunctionRewards) -> None:
    """Copies the results `part`, which are those of the completions with the indices `rows`, into `results`."""
    results.rewards[rows.start : rows.stop] = part.rewards
    results.abstained[rows.start : rows.stop] = part.abstained
    results.failures.update({rows[i]: failure for i, failure in part.failures.items()})


def slices(arguments: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Returns, of every column in `arguments`, the values of the completions with the indices `rows`, and the numbers
    of the run."""
    return {key: each if is_number(each) else each[rows.start : rows.stop] for key, each in arguments.items()}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
