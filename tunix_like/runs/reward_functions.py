"""Builds the reward functions of a config, and runs some of them in worker processes."""

from __future__ import annotations

import os

from tunix_like.config.keys import number_problem, shortened
from tunix_like.config.schema import Config, RewardsConfig
from tunix_like.data import DataSource, check_rewards
from tunix_like.errors import UserError, nearest
from tunix_like.rewards import check_arguments, pooled
from tunix_like.rewards import resolve as resolve_reward
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.runs.environments import MOST_WORKERS, has_environment


def reward_entries(config: Config, default: str | None = None) -> list[tuple[str, float]]:
    """Returns the names and weights of the reward functions in `rewards.functions`. If this key is unset, returns only
    the name `default` with weight 1, or nothing if `default` is None.

    Raises UserError if the list is empty, or if an entry is not valid or occurs twice.
    """
    entries = config.rewards.functions
    if entries is None:
        return [] if default is None else [(default, 1.0)]
    if not entries:
        raise UserError("rewards.functions: the list is empty; leave it unset to use the reward of the data source.")
    out = []
    for i, entry in enumerate(entries):
        unknown = set(entry) - {"name", "weight"}
        if unknown or not isinstance(entry.get("name"), str):
            hint = f" {nearest(str(min(unknown)), ('name', 'weight'))}" if unknown else ""
            raise UserError(
                f"rewards.functions[{i}]: expected {{name: ...}} or {{name: ..., weight: ...}}; got {entry}.{hint}"
            )
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"rewards.functions[{i}].weight: expected a number, got {shortened(weight)}.")
        if problem := number_problem(weight):
            raise UserError(f"rewards.functions[{i}].weight: got {shortened(weight)}; {problem}.")
        out.append((entry["name"], float(weight)))
    if doubled := {name for name, _ in out if [n for n, _ in out].count(name) > 1}:
        raise UserError(f"rewards.functions: {', '.join(sorted(doubled))} is listed twice; list it once.")
    return out


def reward_functions(config: Config, source: DataSource) -> list[WeightedReward]:
    """Returns the reward functions of the config section `rewards`. Some or all of them run in worker processes.

    If `rewards.functions` is unset, the reward function of the data source is used. A run with an environment then has
    no reward functions. Raises UserError if the rows of the source do not have the columns that the functions need.
    """
    default = None if has_environment(config) else source.reward  # an environment gives rewards itself
    functions = [(name, resolve_reward(name), weight) for name, weight in reward_entries(config, default)]
    check_arguments(functions, [name for name in source.train[0] if name != "prompt"])
    check_rewards(source, functions)
    return _in_workers(config.rewards, functions)


def _in_workers(config: RewardsConfig, functions: list[WeightedReward]) -> list[WeightedReward]:
    """Moves reward functions into worker processes.

    If `rewards.workers` is set, all functions are moved. Otherwise only functions that can hang or crash are moved:
    functions that use math-verify, and functions of the user.
    """
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if config.workers is None else config.workers
    if not workers:
        return functions

    risky = {name for name, _, _ in functions if ":" in name or name in ("gsm8k", "gsm8k_lenient", "by_source")}
    chosen = {name: function for name, function, _ in functions if config.workers is not None or name in risky}
    if not chosen:
        return functions
    moved = pooled(chosen, workers=workers, timeout_seconds=config.timeout_seconds, memory_gb=config.memory_gb)
    return [(name, moved.get(name, function), weight) for name, function, weight in functions]
