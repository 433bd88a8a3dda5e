"""The reward of a mix of data sources: each row is scored by the function of its own source.

It knows that the column `source_reward` names that function. It does NOT know what any of them measures.
"""

from __future__ import annotations

from typing import Any

from tunix_like.rewards.registry import resolve
from tunix_like.rewards.scoring import score


def by_source(
    prompts: list[str], completions: list[str], source_reward: list[str], **columns: Any
) -> list[float | None]:
    """The reward of each completion by the function that its row's column `source_reward` names; each function is
    called once, with its own rows.

    Raises:
      UserError: a function failed or returned what is no reward, named.
    """
    out: list[float | None] = [None] * len(completions)
    for name in dict.fromkeys(source_reward):
        own = [i for i, each in enumerate(source_reward) if each == name]
        rows = {column: [values[i] for i in own] for column, values in columns.items()}
        found = score([(name, resolve(name), 1.0)], [prompts[i] for i in own], [completions[i] for i in own], rows)
        for i, value in zip(own, found.total.tolist(), strict=True):
            out[i] = value
    return out
