"""Builds the reward functions of a config, and runs some of them in worker processes."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from jax.sharding import Mesh

from tunix_like.algorithms.distillation import DISTILLATION
from tunix_like.config.keys import number_problem, shortened
from tunix_like.config.schema import Config, RewardsConfig
from tunix_like.data import DataSource
from tunix_like.environments.kinds import MOST_WORKERS, kind_of
from tunix_like.errors import UserError, check_type, nearest
from tunix_like.rewards import check_arguments, pooled
from tunix_like.rewards import resolve as resolve_reward
from tunix_like.rewards.judge import Judge
from tunix_like.rewards.registry import labels_of
from tunix_like.rewards.served_reward_model import ServedRewardModel
from tunix_like.rewards.services import Limits, PerCompletion, WaitingFunction, scores_one
from tunix_like.rewards.turns import per_turn
from tunix_like.rollout.rollouts import WeightedReward, check_rewards
from tunix_like.runtime.user_code import check_arguments as check_parameters
from tunix_like.training.reward_model import AnswerLikelihood, RewardModel, ScoringModel
from tunix_like.types import RewardFunction

SERVED: dict[str, type[Judge] | type[ServedRewardModel]] = {"judge": Judge, "served_reward_model": ServedRewardModel}
"""Models on servers, by their names in `rewards.functions`. An entry has their arguments, and may occur repeatedly."""


_KEYS = ("name", "weight", "per")
"""Keys of every entry."""

PER = ("completion", "turn", "potential")
"""What a reward function scores: values of `per` in `rewards.functions`."""


class RewardEntry(NamedTuple):
    """An entry of `rewards.functions`. `label` is the name in metrics; `arguments` are those of `SERVED`."""

    name: str
    label: str
    weight: float
    arguments: dict[str, Any]
    per: str = "completion"


def reward_entries(config: Config, default: str | None = None) -> list[RewardEntry]:
    """Returns the entries of `rewards.functions`; if it is unset, `default` with weight 1, or nothing."""
    entries = config.rewards.functions
    if entries is None:
        return [] if default is None else [RewardEntry(default, default, 1.0, {})]
    if not entries:
        raise UserError("rewards.functions: the list is empty; leave it unset to use the reward of the data source.")
    out: list[RewardEntry] = []
    for i, entry in enumerate(entries):
        name = entry.get("name")
        weight = entry.get("weight", 1.0)
        per = entry.get("per", "completion")
        arguments = {key: value for key, value in entry.items() if key not in _KEYS}
        if not isinstance(name, str) or (arguments and name not in SERVED):
            hint = f" {nearest(str(min(arguments)), _KEYS)}" if arguments else ""
            raise UserError(
                f"rewards.functions[{i}]: expected {{name: ...}}, with weight and per if wanted; got {entry}.{hint}"
            )
        if per not in PER:
            raise UserError(f"rewards.functions[{i}].per: got {shortened(per)}. {nearest(str(per), PER)}")
        if name in SERVED:
            check_parameters(f"rewards.functions[{i}]", name, SERVED[name], arguments, named=("limits",))
            for key, value in arguments.items():
                kind, cure = {"opponents": (int, "an integer"), "options": (dict, "a mapping")}.get(
                    key, (str, "a text")
                )
                if value is not None or key not in ("model", "options"):
                    check_type(f"rewards.functions[{i}].{key}", value, kind, f"give {cure}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"rewards.functions[{i}].weight: expected a number, got {shortened(weight)}.")
        if problem := number_problem(weight):
            raise UserError(f"rewards.functions[{i}].weight: got {shortened(weight)}; {problem}.")
        if name not in SERVED and any(other.name == name for other in out):
            raise UserError(f"rewards.functions: {name} is listed twice; list it once.")
        label = labels_of([*(other.name for other in out), name])[-1]
        out.append(RewardEntry(name, label, float(weight), arguments, per))
    return out


def reward_functions(config: Config, source: DataSource, mesh: Mesh | None = None) -> list[WeightedReward]:
    """Returns the reward functions of a config, some of them in worker processes. If `rewards.functions` is unset, that
    of the data source is used, but none with an environment, and none for pairs of completions without an answer."""
    without = config.trains_pairs and "answer" not in source.train[0]
    without |= config.algorithm.advantage_estimator == "reward_model"
    default = None if without or kind_of(config) is not None else source.reward  # an environment gives rewards itself
    entries = reward_entries(config, default)
    functions = [(entry.name, _resolved(entry, config.rewards, mesh), entry.weight) for entry in entries]
    columns = [name for name in source.train[0] if name != "prompt"]
    if config.environment.name is not None:
        columns.append("environments")  # added at the end of trajectories
    try:
        # Two judges have one name and different labels.
        labelled = [
            (entry.label, _of_turns(entry, function), weight)
            for entry, (_, function, weight) in zip(entries, functions, strict=True)
        ]
        check_arguments(labelled, columns)
        check_rewards(source, labelled)
    except UserError:
        if config.algorithm.advantage_estimator == DISTILLATION and config.rewards.functions is None:
            return []  # the reward of the data source is only reported, and its rows lack a column, such as `answer`
        raise
    moved = _in_workers(config.rewards, functions)
    return [
        (entry.label, _of_turns(entry, function), weight)
        for entry, (_, function, weight) in zip(entries, moved, strict=True)
    ]


def _resolved(entry: RewardEntry, config: RewardsConfig, mesh: Mesh | None) -> RewardFunction:
    limits = Limits(config.concurrency, config.timeout_seconds, config.retries)
    if entry.name in SERVED:
        return SERVED[entry.name](**entry.arguments, limits=limits)
    for kind in (RewardModel, AnswerLikelihood):
        if entry.name.startswith(kind.prefix):
            return kind(entry.name.removeprefix(kind.prefix), mesh)
    function: Any = resolve_reward(entry.name)
    return PerCompletion(entry.label, function, limits) if scores_one(function) else function


def _of_turns(entry: RewardEntry, function: RewardFunction) -> RewardFunction:
    return function if entry.per == "completion" else per_turn(function, potential=entry.per == "potential")


RISKY = ("gsm8k", "gsm8k_lenient", "reasoning_gym", "by_source")
"""Registered functions that may hang."""


def _in_workers(config: RewardsConfig, functions: list[WeightedReward]) -> list[WeightedReward]:
    """Moves functions that can hang or crash (those of users and of other packages) into worker processes;
    all of them if `rewards.workers` is set. Reward models, which use the devices of this process, and functions that
    wait stay in it."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if config.workers is None else config.workers
    if not workers:
        return functions

    risky = {name for name, _, _ in functions if ":" in name or name in RISKY}
    own = {name for name, function, _ in functions if isinstance(function, ScoringModel | WaitingFunction)}
    moving = risky if config.workers is None else {name for name, _, _ in functions}
    chosen = {name: function for name, function, _ in functions if name in moving - own}
    if not chosen:
        return functions
    moved = pooled(chosen, workers=workers, timeout_seconds=config.timeout_seconds, memory_gb=config.memory_gb)
    return [(name, moved.get(name, function), weight) for name, function, weight in functions]
