"""Registers reward functions by name, loads functions from a user's file, and adapts functions written for verl."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tunix_like.errors import UserError, nearest
from tunix_like.rewards.calls import check_form, result_of
from tunix_like.runtime.user_code import check_new_name, load_function

if TYPE_CHECKING:
    from tunix_like.types import RewardFunction

_F = TypeVar("_F", bound=Callable[..., Any])

REWARDS: dict[str, RewardFunction] = {}
"""Every registered reward function, by name."""

ANSWERS: dict[str, Callable[[str], Hashable | None]] = {}
"""Answer extractors, by the name of a reward function. An extractor maps a completion to a hashable answer for majority
votes (maj@k). Equal answers count as one answer. A completion with the answer None does not vote."""


def register_reward_fn(name: str, answer: Callable[[str], Hashable | None] | None = None) -> Callable[[_F], _F]:
    """Returns a decorator that registers a reward function under `name`.

    Args:
      answer: function that returns the answer of a completion as a hashable value for majority votes (maj@k), or None
        if there is no answer. If `answer` is None, maj@k is not reported for this reward function.

    Raises:
      UserError: the name is already registered, or contains a colon (reserved for files and modules).
    """

    def register(function: _F) -> _F:
        check_new_name("reward function", name, REWARDS)
        REWARDS[name] = function
        if answer is not None:
            ANSWERS[name] = answer
        return function

    return register


def resolve(name: str) -> RewardFunction:
    """Returns the reward function for a name from the configuration.

    Args:
      name: a registered name, `path/to/file.py:function`, or `package.module:function`.

    Raises:
      UserError: the name is unknown, the file or module is missing or fails to load, or the file or module does not
        define the function (the message lists the functions that are defined).
    """
    if ":" not in name:
        if name not in REWARDS:
            raise UserError(
                f"Reward function '{name}' is unknown. {nearest(name, REWARDS)} "
                "Write a function of your own as path/to/file.py:function or package.module:function."
            )
        return REWARDS[name]
    return load_function(name, "Reward")


def label_of(name: str) -> str:
    """Returns the name of a reward function in metrics and completions: without the folders of a file or model."""
    return re.sub("[^:/]*/", "", name)


def labels_of(names: Iterable[str]) -> list[str]:
    """Returns the labels of several reward functions; equal ones are numbered from the second on."""
    labels: list[str] = []
    for name in names:
        label = label_of(name)
        number = 1
        while (numbered := label if number == 1 else f"{label}_{number}") in labels:
            number += 1
        labels.append(numbered)
    return labels


def verl_compatible(function: Callable[..., Any]) -> RewardFunction:
    """Adapts a reward function written for verl, which scores one completion at a time.

    Both signatures of verl are supported: `compute_score(completion, ground_truth)` with positional arguments, and any
    of the keyword arguments `data_source, solution_str, ground_truth, extra_info`. The ground truth is taken from the
    first of these columns that exists: `ground_truth`, `reward_model`, `gold`, `answer`. If the function returns a
    dict, its `score` is the reward.

    If the rows have none of these columns, a call of the returned function raises a UserError.

    Raises:
      UserError: `function` is not callable, or is a generator.
    """
    name = getattr(function, "__name__", repr(function))
    check_form(name, function)
    parameters = inspect.signature(function).parameters
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_keyword = accepts_all or "solution_str" in parameters

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
        truths = _ground_truths(columns, name)
        scores = []
        for i, completion in enumerate(completions):
            if by_keyword:
                given = {"solution_str": completion, "ground_truth": truths[i]}
                given |= {name: columns[name][i] if name in columns else None for name in ("data_source", "extra_info")}
                result = result_of(function(**{k: v for k, v in given.items() if accepts_all or k in parameters}))
            else:
                result = result_of(function(completion, truths[i]))
            scores.append(result["score"] if isinstance(result, Mapping) else result)
        return scores

    # functools.wraps is not used: through `__wrapped__`, inspect.signature would return verl's parameters
    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def _ground_truths(columns: Mapping[str, Any], name: str) -> list[Any]:
    if "ground_truth" in columns:
        return columns["ground_truth"]
    if "reward_model" in columns:
        return [fields["ground_truth"] for fields in columns["reward_model"]]
    for column in ("gold", "answer"):
        if column in columns:
            return columns[column]
    raise UserError(
        f"Reward function {name} (verl_compatible) needs a column 'ground_truth', 'reward_model', 'gold' or 'answer'; "
        f"the rows have: {', '.join(sorted(columns)) or 'none'}."
    )
