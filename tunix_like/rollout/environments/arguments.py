"""Checks the arguments of a learner that concern environments, and makes the `Player`, which runs the environments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tunix_like.config.schema import EnvironmentConfig, RolloutConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError, check_type
from tunix_like.rollout.environments.episodes import REWARD
from tunix_like.rollout.environments.local import LocalEnvironments
from tunix_like.rollout.environments.outcomes import Environments
from tunix_like.rollout.environments.settings import check_effect
from tunix_like.rollout.environments.trajectories import Player
from tunix_like.rollout.environments.verifiers import VerifiersEnvironments
from tunix_like.rollout.environments.verifiers_player import VerifiersPlayer
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
    if isinstance(environment, VerifiersEnvironments):
        eos_ids = rollout.eos_tokens or tokenizer.eos_ids
        return VerifiersPlayer(environment, config or EnvironmentConfig(), tokenizer, eos_ids)
    running = environment if isinstance(environment, Environments) else LocalEnvironments(environment)
    check_effect(config or EnvironmentConfig(), running, made=running is not environment)
    tools = [dict(tool) for tool in running.tools]
    tokenizer = tokenizer.with_template_variables({"tools": tools}) if tools else tokenizer
    return Player(running, config or EnvironmentConfig(), tokenizer, rollout.eos_tokens or tokenizer.eos_ids)


def check_turns(player: Player | None, engine: Engine | None, rewards: Sequence[str]) -> None:
    """Checks that the user's engine and the names of the reward functions can be used with environments.

    Does nothing if `player` is None, i.e. if there are no environments.

    Raises:
      UserError: `generate` of the engine has no parameter `responder`, or a reward function has the name that is
        reserved for the reward of the environment.
    """
    if player is None:
        return
    if REWARD in rewards:
        raise UserError(f"reward_fns: the name '{REWARD}' is reserved for the environment's reward; use another name.")
    if engine is not None:
        parameters = inspect.signature(engine.generate).parameters.values()
        if not any(each.name == "responder" or each.kind is each.VAR_POSITIONAL for each in parameters):
            raise UserError(
                f"engine {type(engine).__name__}: `generate` has no parameter `responder`, which environments need."
            )
