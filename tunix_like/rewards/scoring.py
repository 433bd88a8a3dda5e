"""One rollout batch, several reward functions, one number per completion.

It knows how a reward function is called and what it may return. It does NOT know where functions come from, groups,
or advantages, and it runs them in this process, without a deadline.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_like.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tunix_like.types import RewardFunction

LARGEST = 1e15
"""Rewards beyond this are refused: sums and squares of them lose every digit in float32."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rewards of n completions.

    Attributes:
      total: [n] weighted sum of the functions; NaN where unscored.
      scored: [n] False where any function gave None or NaN.
      by_function: [n] of each function, unweighted, by its name; NaN where that function gave None or NaN.
    """

    total: NDArray[np.float64]
    scored: NDArray[np.bool_]
    by_function: dict[str, NDArray[np.float64]]


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
        _arguments(name, function, dict.fromkeys(["prompts", "completions", *columns]))


def score(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Scores:
    """Calls each function once with the whole batch and adds the results up.

    Args:
      functions: (name, function, weight) of each.
      prompts: [n] rendered prompts, one per completion.
      completions: [n] texts.
      columns: further columns of the rows, each [n]; a function gets those that it has a parameter for, or all of
        them when it takes `**kwargs`.

    Raises:
      UserError: naming the function (and the first completion at fault): it raised (kept as `__cause__`), needs a
        column that is not there, returned a wrong number of values, or something other than a finite number, None or
        NaN, or a number beyond 1e15 in size.
    """
    check_arguments(functions, columns)
    total = np.zeros(len(completions))
    by_function = {}
    for name, function, weight in functions:
        given = {"prompts": list(prompts), "completions": list(completions), **{k: list(v) for k, v in columns.items()}}
        arguments = _arguments(name, function, given)
        try:
            values = function(**arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"Reward function '{name}' raised {type(error).__name__}: {error}. Return None for a completion that "
                "cannot be scored."
            ) from error
        by_function[name] = _checked(name, values, completions)
        total += weight * by_function[name]
    return Scores(total, ~np.isnan(total), by_function)


def _arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the batch's lists that the function accepts, by keyword."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in needed if p.name not in given or p.kind is p.POSITIONAL_ONLY]
    if missing:
        raise UserError(
            f"Reward function '{name}' needs an argument '{missing[0]}', which is no column of the rows; there are: "
            f"{', '.join(sorted(given))}. Its form is f(prompts, completions, **columns)."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}


def _checked(name: str, values: Any, completions: Sequence[str]) -> NDArray[np.float64]:
    """The values of one function as float64, NaN for unscored."""
    if hasattr(values, "tolist"):  # numpy and jax arrays
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise UserError(f"Reward function '{name}' must return one number per completion; it returned {_show(values)}.")
    if len(values) != len(completions):
        raise UserError(f"Reward function '{name}' returned {len(values)} values for {len(completions)} completions.")
    rewards = np.empty(len(values))
    for i, value in enumerate(values):
        number = value.item() if getattr(value, "ndim", None) == 0 else value  # scalars of numpy and jax
        problem = None
        try:
            rewards[i] = math.nan if number is None else float(number)
        except OverflowError:
            rewards[i] = math.inf
        except (TypeError, ValueError):
            problem = "is not a number"
        if isinstance(number, str | bytes):  # float() reads them
            problem = "is not a number"
        elif problem is None and abs(rewards[i]) > LARGEST:  # infinities too; false for NaN
            problem = f"is not within +-{LARGEST:.0e}"
        if problem is not None:
            raise UserError(
                f"Reward function '{name}': value {i}, {_show(value)}, {problem}. "
                f"Completion {i} is {_show(completions[i])}."
            )
    return rewards


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
