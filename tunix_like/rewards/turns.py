"""Reward functions for the turns of trajectories: `per_turn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_like.rewards.calls import FunctionRewards, GroupFunction, call_in_process, is_number
from tunix_like.rewards.pool import PooledFunction

TURNS_PER_CALL = 32
"""Turns that are scored together: a call per turn would take longer than most functions, and would not show that a
function returns a wrong number of values."""

CONVERSATION = "conversation"
"""Column with the messages before each turn, for reward functions of turns."""


class TurnReward(GroupFunction):
    """A reward function whose `completions` are turns; created by `per_turn`."""

    adds = (CONVERSATION,)

    def __init__(self, function: Callable[..., Any], potential: bool):
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.potential = potential
        self.unrendered = getattr(function, "unrendered", False)
        self.__signature__ = inspect.signature(function)

    def with_function(self, function: Callable[..., Any]) -> TurnReward:
        return TurnReward(function, self.potential)

    @property
    def code(self) -> Any:
        return getattr(self.function, "code", self.function)

    def close(self) -> None:
        if isinstance(self.function, GroupFunction):
            self.function.close()

    def score_groups(
        self, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
    ) -> FunctionRewards:
        """Scores the turns in equally large groups; the last turn is repeated to fill the last group. A function that
        groups its calls itself, such as a judge, gets turn by turn."""
        function = self.function
        if isinstance(function, GroupFunction) and not isinstance(function, PooledFunction):
            return function.score_groups(name, arguments, count, group_size)
        size = min(TURNS_PER_CALL, count)
        missing = -count % size
        filled = {
            key: column if is_number(column) else [*column, *[column[-1]] * missing]
            for key, column in arguments.items()
        }
        if isinstance(function, PooledFunction):
            found = function.score_groups(name, filled, count + missing, size)
        else:
            found = call_in_process(name, function, filled, count + missing, size)
        failures = {i: failure for i, failure in found.failures.items() if i < count}
        return FunctionRewards(found.rewards[:count], failures, found.abstained[:count])


def per_turn(function: Callable[..., Any], *, potential: bool = False) -> TurnReward:
    """Returns a reward function that scores each turn of a trajectory, for `reward_fns`.

    `function` gets one item per turn: `completions` has the text of the turn, `prompts` the text before it, the column
    `conversation` the messages before it, and the other columns the values of the row. Its weighted values are added to
    the rewards that the environment gives after these turns; None adds nothing, and with NaN or an exception the whole
    trajectory is unscored.

    Args:
      potential: the values are potentials Phi of the state before each turn, and `completions` are empty texts. Each
        turn gets `gamma Phi(next) - Phi`, with 0 after the end, which keeps the expected gradient. Needs
        `algorithm.credit=turn`; the total reward of a trajectory does not include it.
    """
    return TurnReward(function, potential)


def inner(function: Any) -> Any:
    """Returns the function that a `TurnReward` calls; any other function unchanged."""
    return function.function if isinstance(function, TurnReward) else function


def is_potential(function: Any) -> bool:
    return isinstance(function, TurnReward) and function.potential
