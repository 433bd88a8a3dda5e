"""Checks that configured settings have an effect on environments that are passed to a learner as Python objects."""

from __future__ import annotations

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.environments.outcomes import Environments
from tunix_like.environments.program import Program
from tunix_like.errors import UserError


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
    for key in ("workers", "timeout_seconds", "memory_gb"):
        value = getattr(config, key)
        own = getattr(environments, key, None)
        if value in (getattr(EnvironmentConfig(), key), own):
            continue
        owner = "Program(...)" if isinstance(environments, Program) else "EnvironmentPool('FILE.py:Class', ...)"
        why = "these environments do not run in an EnvironmentPool" if not own else f"the pool has {own:g}"
        raise UserError(
            f"environment_config.{key}: it has no effect, because {why}; give {key} to {owner}, or remove it."
        )
