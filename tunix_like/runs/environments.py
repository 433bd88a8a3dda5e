"""Builds the environments of a config, and passes their tools to the chat template."""

from __future__ import annotations

import dataclasses
import os

from tunix_like.config.schema import Config, EnvironmentConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.data.verifiers import NAME as VERIFIERS
from tunix_like.data.verifiers import settings_of
from tunix_like.errors import UserError
from tunix_like.rollout.environments.adapters import as_environment
from tunix_like.rollout.environments.local import LocalEnvironments
from tunix_like.rollout.environments.openenv import OpenEnv
from tunix_like.rollout.environments.outcomes import Environments
from tunix_like.rollout.environments.pool import EnvironmentPool
from tunix_like.rollout.environments.registry import environment_place, resolve, resolve_tools
from tunix_like.rollout.environments.verifiers import VerifiersEnvironments
from tunix_like.runtime.user_code import is_own

MOST_WORKERS = 4
"""Default of `rewards.workers`, and of `environment.workers` for environments and tools of the user. If the machine has
fewer CPU cores, the number of cores is the default."""

MOST_WAITING = 32
"""Default of `environment.workers` for `openenv` and `verifiers`. Environments of `openenv` run on a server, so their
steps need no CPU core of this machine."""

READ_BY_VERIFIERS = ("max_turns", "mode", "workers", "timeout_seconds")
"""Keys of the config section `environment` that have an effect with `data.name: verifiers`."""


def has_environment(config: Config) -> bool:
    """Returns whether the config has an environment: `environment.name`, `environment.tools` or `data.name=verifiers`.

    Raises:
      UserError: both `environment.name` and `environment.tools` are set, `environment.tools` is an empty list, other
        keys of the section `environment` are set without an environment, a key is not valid for `verifiers`, or
        `verifiers` is a part of a mix.
    """
    section = config.environment
    if config.data.name == VERIFIERS:
        _check_verifiers(section)
        return True
    if any(each.get("name") == VERIFIERS for each in config.data.sources or ()):
        raise UserError("data.sources: verifiers cannot be part of a mix; set data.name=verifiers.")
    if section.name is not None and section.tools is not None:
        raise UserError("environment.tools: environment.name is set too; set one of them.")
    if section.tools is not None and not section.tools:
        raise UserError("environment.tools: the list is empty; name at least one function, as FILE.py:function.")
    if section.name is not None or section.tools is not None:
        return True
    for field in dataclasses.fields(EnvironmentConfig):
        if getattr(section, field.name) != field.default:
            raise UserError(
                f"environment.{field.name}: it needs an environment; set environment.name or environment.tools."
            )
    return False


def environments_of(config: Config) -> Environments | None:
    """Returns the environments of a config; None if the config sets no environment.

    The environment of each trajectory runs in a process of its own, with two exceptions. All environments of
    `verifiers` run in one process. If `environment.workers` is unset, the environments of this library except `openenv`
    run in the training process. Such an environment does not hang or crash, and its episode takes less time than the
    start of a process.

    Raises:
      UserError: the environment or a tool cannot be used, or a time or memory limit is set that has no effect.
    """
    if not has_environment(config):
        return None
    section = config.environment
    if config.data.name == VERIFIERS:
        workers = MOST_WAITING if section.workers is None else section.workers
        return VerifiersEnvironments(settings_of(config.data), section.timeout_seconds, workers)
    name, tools = section.name, section.tools or []
    place: str | list[str]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    if name is not None:
        try:
            factory = resolve(name)
        except UserError as error:
            raise UserError(f"environment.name: {error}") from error
        if factory is OpenEnv:
            workers = MOST_WAITING
        elif section.workers is None and not is_own(factory):
            _check_unlimited(section)
            return LocalEnvironments(as_environment(factory, section.arguments))
        place = environment_place(name, factory)
    else:
        try:
            functions = zip(tools, resolve_tools(tools), strict=True)
        except UserError as error:
            raise UserError(f"environment.tools: {error}") from error
        place = [environment_place(tool, function, "Tool") for tool, function in functions]
    return EnvironmentPool(
        place,
        arguments=section.arguments,
        workers=workers if section.workers is None else section.workers,
        timeout_seconds=section.timeout_seconds,
        memory_gb=section.memory_gb,
    )


def _check_verifiers(section: EnvironmentConfig) -> None:
    """Raises UserError if a key of the section `environment` is set that `verifiers` environments do not read."""
    for field in dataclasses.fields(EnvironmentConfig):
        if field.name not in READ_BY_VERIFIERS and getattr(section, field.name) != field.default:
            read = ", ".join(READ_BY_VERIFIERS)
            raise UserError(
                f"environment.{field.name}: data.name=verifiers does not read it; it reads {read}. The environment "
                "itself is set by data.path and data.arguments. Remove this key."
            )


def _check_unlimited(section: EnvironmentConfig) -> None:
    """Raises UserError if a time or memory limit is set. Environments in the training process have no limits."""
    for key in ("timeout_seconds", "memory_gb"):
        if getattr(section, key) != getattr(EnvironmentConfig(), key):
            raise UserError(
                f"environment.{key}: {section.name} runs in the training process, where it has no limits; set "
                f"environment.workers too, e.g. 4, or remove environment.{key}."
            )


def with_tools(tokenizer: Tokenizer, environments: Environments | None) -> Tokenizer:
    """Returns the tokenizer, with the schemas of the environments' tools for its chat template."""
    tools = () if environments is None else environments.tools
    return tokenizer.with_template_variables({"tools": [dict(tool) for tool in tools]}) if tools else tokenizer
