"""Checks the arguments of a learner that concern environments, and makes the `Player`, which runs the environments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tunix_like.algorithms.turns import BY_CRITIC
from tunix_like.config.schema import AlgorithmConfig, EnvironmentConfig, RolloutConfig
from tunix_like.environments.local import LocalEnvironments
from tunix_like.environments.outcomes import Environments
from tunix_like.environments.program import Program
from tunix_like.environments.registry import runs_trajectories
from tunix_like.environments.settings import check_effect
from tunix_like.environments.trajectories import Player
from tunix_like.errors import UserError, check_type
from tunix_like.rewards.turns import TurnReward
from tunix_like.rollout.episodes import REWARD
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Engine


def make_player(
    environment: Any, config: EnvironmentConfig | None, tokenizer: Tokenizer, rollout: RolloutConfig
) -> Player | None:
    """Makes the `Player` that runs the environments of a learner, from the learner's argument `environment`. Returns
    None if `environment` is None.

    The tokenizer of the player passes the schemas of the tools to the chat template.

    Raises:
      UserError: `environment` cannot make environments, `config` is given without `environment`, or a key of `config`
        has no effect.
    """
    if config is not None:
        check_type("environment_config", config, EnvironmentConfig, "give a tunix_like.EnvironmentConfig(...)")
    if environment is None:
        if config not in (None, EnvironmentConfig()):
            raise UserError("environment_config: it needs an environment; pass environment=... too.")
        return None
    if isinstance(environment, str):
        raise UserError(
            f"environment: got the text {environment!r}; pass the class, or EnvironmentPool({environment!r})."
        )
    if runs_trajectories(environment):
        environment = environment()
    running: Environments
    if inspect.iscoroutinefunction(environment):
        running = Program(environment)
    else:
        running = environment if isinstance(environment, Environments) else LocalEnvironments(environment)
    config = config or EnvironmentConfig()
    check_effect(config, running, made=running is not environment)
    if (make := getattr(running, "make_player", None)) is not None:
        player: Player = make(config, tokenizer, rollout)
        return player
    return Player(running, config, with_tools(tokenizer, running), rollout.eos_tokens or tokenizer.eos_ids)


def with_tools(tokenizer: Tokenizer, environments: Environments | None) -> Tokenizer:
    """Returns the tokenizer, with the schemas of the environments' tools for its chat template."""
    tools = () if environments is None else environments.tools
    return tokenizer.with_template_variables({"tools": [dict(tool) for tool in tools]}) if tools else tokenizer


def check_reward_names(player: Player | None, rewards: Sequence[str]) -> None:
    """Raises UserError if there are environments and a reward function has the name of the environment's reward."""
    if player is not None and REWARD in rewards:
        raise UserError(f"reward_fns: the name '{REWARD}' is reserved for the environment's reward; use another name.")


def check_credit(algorithm: AlgorithmConfig, environments: bool) -> None:
    """Raises UserError for settings of turns without an environment, or without `algorithm.credit=turn`."""
    if algorithm.credit == "turn" and not environments:
        raise UserError("algorithm.credit: turn needs an environment, which has several turns; set environment.name.")
    for name in ("gamma", "turn_baseline", "turn_coef"):
        if algorithm.credit != "turn" and getattr(algorithm, name) is not None:
            raise UserError(f"algorithm.{name}: only algorithm.credit=turn reads it; unset it.")


def check_turn_rewards(
    rewards: Sequence[tuple[str, Any, float]], algorithm: AlgorithmConfig, environments: bool
) -> None:
    """Raises UserError for reward functions of turns without an environment, or for potentials that nothing reads."""
    for name, function, _ in rewards:
        if not isinstance(function, TurnReward):
            continue
        if not environments:
            raise UserError(
                f"reward function '{name}': it scores turns (per), and completions have a single one without an "
                "environment; set environment.name, or leave per unset."
            )
        if function.potential and algorithm.credit != "turn":
            raise UserError(f"reward function '{name}': only algorithm.credit=turn reads potentials; set it.")
        if function.potential and algorithm.advantage_estimator == BY_CRITIC:
            raise UserError(f"reward function '{name}': '{BY_CRITIC}' has a critic in place of potentials; remove it.")


def check_turns(environments: bool, engine: Engine | None) -> None:
    """Raises UserError if there are environments and `generate` of the user's engine has no parameter `responder`."""
    if not environments or engine is None:
        return
    parameters = inspect.signature(engine.generate).parameters.values()
    if not any(each.name == "responder" or each.kind is each.VAR_POSITIONAL for each in parameters):
        raise UserError(
            f"engine {type(engine).__name__}: `generate` has no parameter `responder`, which environments need."
        )
