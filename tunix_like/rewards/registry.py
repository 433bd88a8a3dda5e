"""Reward functions by name: the registry, a user's own file, and functions written for verl.

It knows where a function comes from. It does NOT call reward functions (`scoring.py` does) or know what they measure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tunix_like.errors import UserError, nearest
from tunix_like.rewards.calls import check_form
from tunix_like.runtime.user_code import load_function

if TYPE_CHECKING:
    from tunix_like.types import RewardFunction

_F = TypeVar("_F", bound=Callable[..., Any])

REWARDS: dict[str, RewardFunction] = {}
"""Every registered reward function, by name."""

ANSWERS: dict[str, Callable[[str], Hashable | None]] = {}
"""By the name of a reward: what a completion answers, for majority votes. Equal answers vote alike; None is no vote."""


def register_reward_fn(name: str, answer: Callable[[str], Hashable | None] | None = None) -> Callable[[_F], _F]:
    """Decorator that makes a reward function known as `name`.

    Args:
      answer: what a completion answers (see `ANSWERS`), for maj@k; None: there is no maj@k of this reward.

    Raises:
      UserError: the name is taken, or holds a colon (those are files and modules).
    """
    if ":" in name:
        raise UserError(
            f"register_reward_fn: the name '{name}' must not hold a colon; 'FILE.py:function' means a file."
        )

    def register(function: _F) -> _F:
        if name in REWARDS:
            raise UserError(f"register_reward_fn: the name '{name}' is taken; choose another.")
        REWARDS[name] = function
        if answer is not None:
            ANSWERS[name] = answer
        return function

    return register


def resolve(name: str) -> RewardFunction:
    """The reward function behind a name of the configuration.

    Args:
      name: a registered name, `path/to/file.py:function`, or `package.module:function`.

    Raises:
      UserError: an unknown name, a file or module that is missing or fails to load, or a function that it lacks (with
        the list of those it has).
    """
    if ":" not in name:
        if name not in REWARDS:
            raise UserError(
                f"Reward function '{name}' is unknown. {nearest(name, REWARDS)} "
                "Your own is written as path/to/file.py:function."
            )
        return REWARDS[name]
    return load_function(name, "Reward")


def verl_compatible(function: Callable[..., Any]) -> RewardFunction:
    """Makes a reward function of one written for verl, which scores one completion at a time.

    Both of verl's forms are taken: `compute_score(completion, ground_truth)` by position, and by keyword any of
    `data_source, solution_str, ground_truth, extra_info`. The ground truth is the column `ground_truth`, else that of
    the column `reward_model`, else `gold`, else `answer`. A returned dict counts by its `score`.

    The function made raises a UserError when none of these columns is there.

    Raises:
      UserError: what is given is no function, async, or a generator.
    """
    check_form(getattr(function, "__name__", repr(function)), function)
    parameters = inspect.signature(function).parameters
    by_keyword = "solution_str" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
        truths = _ground_truths(columns, getattr(function, "__name__", repr(function)))
        scores = []
        for i, completion in enumerate(completions):
            if by_keyword:
                given = {"solution_str": completion, "ground_truth": truths[i]}
                given |= {name: columns[name][i] if name in columns else None for name in ("data_source", "extra_info")}
                result = function(**{k: v for k, v in given.items() if accepts_all or k in parameters})
            else:
                result = function(completion, truths[i])
            scores.append(result["score"] if isinstance(result, Mapping) else result)
        return scores

    # not functools.wraps: `__wrapped__` would make callers see the wrapped function's parameters
    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def _ground_truths(columns: Mapping[str, Any], name: str) -> list[Any]:
    if "ground_truth" in columns:
        return columns["ground_truth"]
    if "reward_model" in columns:
        return [each["ground_truth"] for each in columns["reward_model"]]
    for column in ("gold", "answer"):
        if column in columns:
            return columns[column]
    raise UserError(
        f"Reward function {name} (verl_compatible) needs a column 'ground_truth', 'reward_model', 'gold' or 'answer'; "
        f"the rows have: {', '.join(sorted(columns)) or 'none'}."
    )
