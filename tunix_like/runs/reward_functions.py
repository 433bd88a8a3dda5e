"""Builds the reward functions of a config, and runs some of them in worker processes."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from tunix_like.config.keys import number_problem, shortened
from tunix_like.config.schema import Config, RewardsConfig
from tunix_like.data import DataSource, check_rewards
from tunix_like.environments.kinds import MOST_WORKERS, kind_of
from tunix_like.errors import UserError, nearest
from tunix_like.rewards import check_arguments, pooled
from tunix_like.rewards import resolve as resolve_reward
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.training.reward_model import PREFIX, RewardModel
from tunix_like.types import RewardFunction


def reward_entries(config: Config, default: str | None = None) -> list[tuple[str, float]]:
    """Returns the names and weights of `rewards.functions`; if it is unset, `default` with weight 1, or nothing."""
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


def reward_functions(config: Config, source: DataSource, mesh: Mesh | None = None) -> list[WeightedReward]:
    """Returns the reward functions of a config, some of them in worker processes. If `rewards.functions` is unset, that
    of the data source is used, but none with an environment, and none for pairs of completions without an answer."""
    without = config.trains_pairs and "answer" not in source.train[0]
    without |= config.algorithm.advantage_estimator == "reward_model"
    default = None if without or kind_of(config) is not None else source.reward  # an environment gives rewards itself
    functions = [(name, _resolved(name, mesh), weight) for name, weight in reward_entries(config, default)]
    columns = [name for name in source.train[0] if name != "prompt"]
    if config.environment.name is not None:
        columns.append("environments")  # added at the end of trajectories
    check_arguments(functions, columns)
    check_rewards(source, functions)
    return _in_workers(config.rewards, functions)


def _resolved(name: str, mesh: Mesh | None) -> RewardFunction:
    return RewardModel(name.removeprefix(PREFIX), mesh) if name.startswith(PREFIX) else resolve_reward(name)


def _in_workers(config: RewardsConfig, functions: list[WeightedReward]) -> list[WeightedReward]:
    """Moves functions that can hang or crash (those of the user, and those that use math-verify) into worker processes;
    all of them if `rewards.workers` is set. Reward models use the devices of this process and stay in it."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if config.workers is None else config.workers
    if not workers:
        return functions

    risky = {name for name, _, _ in functions if ":" in name or name in ("gsm8k", "gsm8k_lenient", "by_source")}
    own = {name for name, function, _ in functions if isinstance(function, RewardModel)}
    moving = risky if config.workers is None else {name for name, _, _ in functions}
    chosen = {name: function for name, function, _ in functions if name in moving - own}
    if not chosen:
        return functions
    moved = pooled(chosen, workers=workers, timeout_seconds=config.timeout_seconds, memory_gb=config.memory_gb)
    return [(name, moved.get(name, function), weight) for name, function, weight in functions]
