"""One rollout batch, several reward functions, one number per completion.

It knows how the functions are added up and what counts as unscored. It does NOT know where functions come from, or
advantages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_like.errors import UserError
from tunix_like.rewards.calls import arguments_of, call_in_process
from tunix_like.rewards.pool import PooledFunction
from tunix_like.runtime.visible import visible

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tunix_like.types import RewardFunction


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rewards of n completions.

    Attributes:
      total: [n] weighted sum of the functions; NaN where unscored.
      by_function: [n] of each function, unweighted, by its name; NaN where that function gave None or NaN, or failed.
      timeouts: [n] where a function did not return in time.
      errors: [n] where a function raised, returned what is no reward, or brought its worker down.
      first_failure: why, and the whole prompt and completion, of the first of these; None where there is none.
    """

    total: NDArray[np.float64]
    by_function: dict[str, NDArray[np.float64]]
    timeouts: NDArray[np.bool_]
    errors: NDArray[np.bool_]
    first_failure: str | None

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[n] False where any function gave None or NaN, or failed."""
        return ~np.isnan(self.total)

    def pick(self, rows: NDArray[np.int_]) -> Scores:
        """The given completions, in the given order."""
        by_function = {name: values[rows] for name, values in self.by_function.items()}
        return Scores(self.total[rows], by_function, self.timeouts[rows], self.errors[rows], self.first_failure)

    def join(self, other: Scores) -> Scores:
        """These and then the others, of the same functions."""
        by_function = {
            name: np.concatenate([values, other.by_function[name]]) for name, values in self.by_function.items()
        }
        return Scores(
            np.concatenate([self.total, other.total]),
            by_function,
            np.concatenate([self.timeouts, other.timeouts]),
            np.concatenate([self.errors, other.errors]),
            self.first_failure or other.first_failure,
        )


def check_arguments(functions: Sequence[tuple[str, RewardFunction, float]], columns: Collection[str]) -> None:
    """Raises the UserError that `score` would for rows with these columns, before there is anything to score."""
    names = [name for name, _, _ in functions]
    if len(set(names)) != len(names):
        raise UserError(f"rewards.functions names one function twice ({', '.join(names)}); give one entry its weight.")
    taken = sorted({"prompts", "completions"} & set(columns))
    if taken:
        raise UserError(
            f"A data column must not be called '{taken[0]}': reward functions get the batch under that name."
        )
    for name, function, _ in functions:
        arguments_of(name, function, ["prompts", "completions", *columns])


def score(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    group_size: int = 1,
) -> Scores:
    """Asks each function for every completion and adds the results up. A function that fails for a completion leaves it
    unscored: it is called again with fewer of them, down to one, to find out for which it does.

    Args:
      functions: (name, function, weight) of each; one of `pooled` runs in its workers, the others here.
      prompts: [n] rendered prompts, one per completion.
      completions: [n] texts; `group_size` neighbours are of one prompt.
      columns: further columns of the rows, each [n]; a function gets those that it has a parameter for, or all of
        them when it takes `**kwargs`.

    Raises:
      UserError: a function needs a column that is not there, or workers are to be sent one that cannot be pickled.
    """
    check_arguments(functions, columns)
    given, count = {"prompts": prompts, "completions": completions, **columns}, len(completions)
    total, by_function = np.zeros(count), {}
    timeouts, errors = np.zeros(count, bool), np.zeros(count, bool)
    first: str | None = None
    for name, function, weight in functions:
        arguments = {key: given[key] for key in arguments_of(name, function, given)}
        if isinstance(function, PooledFunction):
            marks = function.marks(name, arguments, count, group_size)
        else:
            marks = call_in_process(name, function, arguments, count, group_size)
        by_function[name] = marks.rewards
        total += weight * marks.rewards
        for i, failure in marks.failures.items():
            (timeouts if failure.kind == "timeout" else errors)[i] = True
        if first is None and marks.failures:
            i = min(marks.failures)
            reason = visible(marks.failures[i].reason)  # what a function says may hold what a model wrote
            first = f"{reason}\nPrompt: {prompts[i]!r}\nCompletion: {completions[i]!r}"
    return Scores(total, by_function, timeouts, errors, first)
