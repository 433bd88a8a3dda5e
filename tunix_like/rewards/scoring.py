"""Scores a rollout batch: calls every reward function and adds the weighted rewards of each completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_like.errors import UserError
from tunix_like.rewards.calls import GroupFunction, arguments_of, call_in_process
from tunix_like.runtime import trace
from tunix_like.runtime.moment import NAMES, START, Moment
from tunix_like.runtime.visible import visible

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tunix_like.types import RewardFunction


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rewards of n completions.

    Attributes:
      total: [n] weighted sum over the reward functions that apply to the completion (those that did not return None);
        NaN if none of them applies, or one returned NaN or failed.
      by_function: function name -> [n] unweighted rewards; NaN where the function returned None or NaN, or failed.
      failed: [n] True where a function returned NaN or failed. Other completions without a total have only functions
        that do not apply.
      timeouts: [n] True where a function did not return in time.
      errors: [n] True where a function raised, returned an invalid reward, or crashed its worker.
      first_failure: reason, full prompt and full completion of the first failure; None if there was no failure.
    """

    total: NDArray[np.float64]
    by_function: dict[str, NDArray[np.float64]]
    failed: NDArray[np.bool_]
    timeouts: NDArray[np.bool_]
    errors: NDArray[np.bool_]
    first_failure: str | None

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Mask of shape [n]: False for completions without a total."""
        return ~np.isnan(self.total)

    def pick(self, rows: NDArray[np.int_]) -> Scores:
        """Returns the scores of the completions with the indices `rows`, in the order of `rows`."""
        by_function = {name: values[rows] for name, values in self.by_function.items()}
        return Scores(
            self.total[rows], by_function, self.failed[rows], self.timeouts[rows], self.errors[rows], self.first_failure
        )

    def join(self, other: Scores) -> Scores:
        """Returns these scores followed by the scores `other`, which must be from the same reward functions."""
        by_function = {
            name: np.concatenate([values, other.by_function[name]]) for name, values in self.by_function.items()
        }
        return Scores(
            np.concatenate([self.total, other.total]),
            by_function,
            np.concatenate([self.failed, other.failed]),
            np.concatenate([self.timeouts, other.timeouts]),
            np.concatenate([self.errors, other.errors]),
            self.first_failure or other.first_failure,
        )


def check_arguments(
    functions: Sequence[tuple[str, RewardFunction, float]], columns: Collection[str], moment: Collection[str] = NAMES
) -> None:
    """Raises UserError if a function needs a column that does not exist, and is not in `moment` either, a column is
    called `prompts` or `completions`, or two functions have the same name."""
    names = [name for name, _, _ in functions]
    if len(set(names)) != len(names):
        raise UserError(
            f"rewards.functions names one function twice ({', '.join(names)}); keep one entry and set its weight."
        )
    taken = sorted({"prompts", "completions"} & set(columns))
    if taken:
        raise UserError(
            f"A data column must not be called '{taken[0]}': reward functions receive the batch under that name; "
            "rename the column."
        )
    for name, function, _ in functions:
        adds = function.adds if isinstance(function, GroupFunction) else ()
        arguments_of(name, function, {"prompts", "completions", *columns, *adds}, moment)


def score(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    group_size: int = 1,
    sources: Sequence[Any] | None = None,
    moment: Moment = START,
) -> Scores:
    """Scores every completion with every function and returns the weighted sums of the functions that apply to it.

    If a function fails, it is called again with fewer completions, down to one, to find the completions for which it
    fails. These completions stay unscored.

    Args:
      functions: (name, function, weight) triples. Functions made by `pooled` run in worker processes; all other
        functions run in this process.
      prompts: [n] rendered prompts, one per completion.
      completions: [n] texts; every `group_size` consecutive texts belong to one prompt.
      columns: further columns of the rows, each [n]; a function receives the columns that have the names of its
        parameters, or all columns if it accepts `**kwargs`.
      sources: [n] prompts before rendering, for functions that are `unrendered`; defaults to `prompts`.

    Raises:
      UserError: see `check_arguments`; or a column for a worker process cannot be pickled.
    """
    check_arguments(functions, columns, moment)
    given = {"prompts": prompts, "completions": completions, **columns}
    values = {**moment, **given}
    count = len(completions)
    total = np.zeros(count)
    by_function = {}
    abstained = np.ones(count, bool)
    failed = np.zeros(count, bool)
    timeouts, errors = np.zeros(count, bool), np.zeros(count, bool)
    first: str | None = None
    for name, function, weight in functions:
        arguments = {key: values[key] for key in arguments_of(name, function, given, moment)}
        with trace.span(name):
            if isinstance(function, GroupFunction):
                if function.unrendered and sources is not None:
                    arguments["prompts"] = sources
                results = function.score_groups(name, arguments, count, group_size)
            else:
                results = call_in_process(name, function, arguments, count, group_size)
        by_function[name] = results.rewards
        total += weight * np.where(results.abstained, 0.0, results.rewards)
        abstained &= results.abstained
        failed |= np.isnan(results.rewards) & ~results.abstained
        for i, failure in results.failures.items():
            (timeouts if failure.kind == "timeout" else errors)[i] = True
        if first is None and results.failures:
            i = min(results.failures)
            reason = visible(results.failures[i].reason)  # the reason may quote text that the model wrote
            first = f"{reason}\nPrompt: {prompts[i]!r}\nCompletion: {completions[i]!r}"
    total[abstained] = np.nan
    return Scores(total, by_function, failed, timeouts, errors, first)
