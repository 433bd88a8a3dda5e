"""Reward functions, their registry, and the scoring of a batch of completions.

Public names: `REWARDS`, `ANSWERS`, `register_reward_fn`, `resolve`, `verl_compatible`, `Scores`, `score`,
`check_arguments`, `check_form`, `pooled`, `close_pools`.
"""

from __future__ import annotations

from tunix_like.rewards import by_source, math, maze, text
from tunix_like.rewards.calls import check_form
from tunix_like.rewards.pool import close_pools, pooled
from tunix_like.rewards.registry import ANSWERS, REWARDS, register_reward_fn, resolve, verl_compatible
from tunix_like.rewards.scoring import Scores, check_arguments, score

__all__ = [
    "ANSWERS",
    "REWARDS",
    "Scores",
    "check_arguments",
    "check_form",
    "close_pools",
    "pooled",
    "register_reward_fn",
    "resolve",
    "score",
    "verl_compatible",
]

register_reward_fn("maze")(maze.maze)
register_reward_fn("gsm8k", math.vote)(math.gsm8k)
register_reward_fn("gsm8k_lenient", math.vote)(math.gsm8k_lenient)
register_reward_fn("exact_match", str.strip)(text.exact_match)
register_reward_fn("by_source")(by_source.by_source)
