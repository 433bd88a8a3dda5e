"""Checks that configured settings have an effect on environments that are passed to a learner as Python objects."""

from __future__ import annotations

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.errors import UserError
from tunix_like.rollout.environments.outcomes import Environments
from tunix_like.rollout.environments.pool import EnvironmentPool


def check_effect(config: EnvironmentConfig, environments: Environments, made: bool) -> None:
    """Checks that all keys that are set in `config` have an effect on `environments`.

    Args:
      made: whether the learner made the environments itself, from a class or from functions. False if the learner was
        given an `Environments` object, as in a run from a YAML file.

    Raises:
      UserError: a key has no effect.
    """
    for key in ("name", "tools", "arguments"):
        if made and getattr(config, key) is not None:
            raise UserError(f"environment_config.{key}: it has no effect together with environment=...; remove it.")
    pool = environments if isinstance(environments, EnvironmentPool) else None
    for key in ("workers", "timeout_seconds", "memory_gb"):
        value = getattr(config, key)
        if value == getattr(EnvironmentConfig(), key) or (pool is not None and value == getattr(pool, key)):
            continue
        why = "these environments do not run in an EnvironmentPool"
        if pool is not None:
            why = f"the pool has {getattr(pool, key):g}"
        raise UserError(
            f"environment_config.{key}: it has no effect, because {why}; give {key} to "
            "EnvironmentPool('FILE.py:Class', ...), or remove it."
        )
