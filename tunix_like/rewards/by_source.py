"""The reward of a mix of data sources: each row is scored by the function of its own source.

It knows that the column `source_reward` names that function. It does NOT know what any of them measures.
"""

from __future__ import annotations

from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.calls import arguments_of, call
from tunix_like.rewards.registry import REWARDS


def by_source(
    prompts: list[str], completions: list[str], source_reward: list[str], **columns: Any
) -> list[float | None]:
    """The reward of each completion by the function that its row's column `source_reward` names; each function is
    called once, with its own rows.

    Raises:
      UserError: a name that is not registered; or a function returned what is no reward, named; called with single
        completions, this is told of the right one.
      Exception: whatever a function raises.
    """
    given = {"prompts": prompts, "completions": completions, **columns}
    out: list[float | None] = [None] * len(completions)
    for name in dict.fromkeys(source_reward):
        if name not in REWARDS:  # a place of a function is not run for being named in data
            raise UserError(
                f"Reward function 'by_source': the column 'source_reward' holds {name!r:.80}, which is no registered "
                "function. Name your own in rewards.functions."
            )
        own, function = [i for i, each in enumerate(source_reward) if each == name], REWARDS[name]
        arguments = {key: [given[key][i] for i in own] for key in arguments_of(name, function, given)}
        found = call(name, function, arguments, len(own))
        if found.failures:
            raise UserError(next(iter(found.failures.values())).reason)
        for i, value in zip(own, found.rewards.tolist(), strict=True):
            out[i] = value
    return out
