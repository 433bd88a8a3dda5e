"""Reward functions, and the scores of a batch of completions.

Start with `scoring.py`: `score` calls the functions of a run and adds their weighted rewards. `calls.py` calls one
function and finds the completions at which it fails, `pool.py` does so in worker processes, and `services.py` for
functions that wait for servers, such as `judge.py`. `turns.py` marks functions that score turns. `registry.py` finds a
function by name, file or module; those of this library are in `math.py`, `maze.py`, `reasoning_gym.py` and
`built_in.py`.
"""

from __future__ import annotations

from tunix_like.rewards import built_in, math, maze, reasoning_gym
from tunix_like.rewards.calls import check_form
from tunix_like.rewards.judge import Judge
from tunix_like.rewards.pool import close_pools, pooled
from tunix_like.rewards.registry import ANSWERS, REWARDS, register_reward_fn, resolve, verl_compatible
from tunix_like.rewards.scoring import Scores, check_arguments, score
from tunix_like.rewards.served_reward_model import ServedRewardModel
from tunix_like.rewards.services import Limits, waiting
from tunix_like.rewards.turns import per_turn

__all__ = [
    "ANSWERS",
    "REWARDS",
    "Judge",
    "Limits",
    "Scores",
    "ServedRewardModel",
    "check_arguments",
    "check_form",
    "close_pools",
    "per_turn",
    "pooled",
    "register_reward_fn",
    "resolve",
    "score",
    "verl_compatible",
    "waiting",
]

register_reward_fn("maze")(maze.maze)
register_reward_fn("gsm8k", math.vote)(math.gsm8k)
register_reward_fn("gsm8k_lenient", math.vote)(math.gsm8k_lenient)
register_reward_fn("last_number", math.last_number_of)(math.last_number)
register_reward_fn("reasoning_gym", reasoning_gym.final_answer)(reasoning_gym.reasoning_gym)
register_reward_fn("exact_match", str.strip)(built_in.exact_match)
register_reward_fn("by_source")(built_in.by_source)
