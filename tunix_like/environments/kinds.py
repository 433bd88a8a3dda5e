"""Makes the environments of a config. There are several kinds: classes, functions as tools, OpenEnv servers, ..."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tunix_like.config.schema import Config, EnvironmentConfig
from tunix_like.environments.adapters import as_environment
from tunix_like.environments.adapters import kind_of as interface_of
from tunix_like.environments.local import LocalEnvironments
from tunix_like.environments.outcomes import Environments
from tunix_like.environments.pool import EnvironmentPool
from tunix_like.environments.program import Program
from tunix_like.environments.registry import environment_place, resolve, resolve_tools, runs_trajectories
from tunix_like.errors import UserError
from tunix_like.runtime.user_code import check_arguments, is_own, load_function

MOST_WORKERS = 4
"""Default of `rewards.workers`, and of `environment.workers` for environments and tools of the user. If the machine has
fewer CPU cores, the number of cores is the default."""

MOST_WAITING = 32
"""Default of `environment.workers` for environments whose calls wait for another process or server, and so need no CPU
core."""

KEYS = frozenset(field.name for field in dataclasses.fields(EnvironmentConfig))
LIMITS = frozenset({"workers", "timeout_seconds", "memory_gb"})


class EnvironmentKind(NamedTuple):
    """A way to run environments.

    Attributes:
      make: makes the environments of a config: a function, or `MODULE:FUNCTION` of an extension, which is imported when
        it is used.
      reads: the keys of the section `environment` that have an effect.
      key: the key whose value is the name of the kind: `environment.name`, or `data.name` if the environments belong to
        a data source.
    """

    make: Callable[[Config], Environments] | str
    reads: Collection[str] = KEYS - {"tools"}
    key: str = "environment.name"


def kind_of(config: Config) -> EnvironmentKind | None:
    """Returns the kind of the environments of a config; None if the config has no environment.

    Raises:
      UserError: `environment.name` and `environment.tools` are set both, `environment.tools` is an empty list, a key of
        the section `environment` has no effect, or a data source with environments is a part of a mix.
    """
    section = config.environment
    of_sources = {name for name, kind in KINDS.items() if kind.key == "data.name"}
    for name in of_sources & {each.get("name") for each in config.data.sources or ()}:
        raise UserError(f"data.sources: {name} cannot be part of a mix; set data.name={name}.")
    if config.data.name in of_sources:
        return _checked(KINDS[config.data.name], section, f"data.name={config.data.name}")
    if section.name is not None and section.tools is not None:
        raise UserError("environment.tools: environment.name is set too; set one of them.")
    if section.tools is not None and not section.tools:
        raise UserError("environment.tools: the list is empty; name at least one function, as FILE.py:function.")
    if section.tools is not None:
        return _checked(TOOLS, section, "environment.tools")
    if section.name is not None:
        kind = OWN if section.name in of_sources else KINDS.get(section.name, OWN)
        return _checked(kind, section, f"environment.name={section.name}")
    for key in changed_keys(section):
        raise UserError(f"environment.{key}: it needs an environment; set environment.name or environment.tools.")
    return None


def environments_of(config: Config) -> Environments | None:
    """Returns the environments of a config; None if the config has no environment.

    Raises:
      UserError: the environment or a tool cannot be used, or a key has no effect.
    """
    kind = kind_of(config)
    if kind is None:
        return None
    make = load_function(kind.make, "Environment") if isinstance(kind.make, str) else kind.make
    environments: Environments = make(config)
    return environments


def gives_no_rewards(config: Config) -> bool:
    """Whether the environment of a config consists of tools only: functions, or a class of tools without
    `get_reward`."""
    if kind_of(config) is not OWN:
        return bool(config.environment.tools)
    factory = resolve(str(config.environment.name))
    return isinstance(factory, type) and interface_of(factory) == "tools" and not hasattr(factory, "get_reward")


def changed_keys(section: EnvironmentConfig) -> list[str]:
    """Returns the keys whose values are not the defaults."""
    return [key.name for key in dataclasses.fields(section) if getattr(section, key.name) != key.default]


def _checked(kind: EnvironmentKind, section: EnvironmentConfig, name: str) -> EnvironmentKind:
    """Returns `kind`. Raises UserError if a key is set that it does not read."""
    for key in changed_keys(section):
        if key not in kind.reads:
            read = ", ".join(field.name for field in dataclasses.fields(section) if field.name in kind.reads)
            if kind.key == "data.name":
                read += "; data.path and data.arguments set the environment itself"
            raise UserError(f"environment.{key}: {name} does not read it; it reads {read}. Remove this key.")
    return kind


def _own(config: Config) -> Environments:
    """Makes the environments of a class.

    Each trajectory has an object of the class in a process of its own or, for classes of this library and with
    `environment.workers=0`, in this process. A class that runs all trajectories itself (see `Environments`) is used as
    it is.
    """
    section = config.environment
    assert section.name is not None
    try:
        factory = resolve(section.name)
    except UserError as error:
        raise UserError(f"environment.name: {error}") from error
    if inspect.iscoroutinefunction(factory):
        return _agent(factory, section)
    if runs_trajectories(factory):
        _checked(EnvironmentKind(_own, KEYS - LIMITS - {"tools"}), section, f"environment.name={section.name}")
        check_arguments("environment.arguments", section.name, factory, section.arguments or {})
        environments: Environments = factory(**(section.arguments or {}))
        return environments
    if section.workers == 0 or (section.workers is None and not is_own(factory)):
        _check_unlimited(section)
        return LocalEnvironments(as_environment(factory, section.arguments))
    return _pool(environment_place(section.name, factory), section)


def _tools(config: Config) -> Environments:
    """Makes the environments whose tools are functions of the user."""
    section = config.environment
    names = section.tools or []
    try:
        functions = resolve_tools(names)
    except UserError as error:
        raise UserError(f"environment.tools: {error}") from error
    if section.workers == 0:
        _check_unlimited(section)
        return LocalEnvironments(functions)
    return _pool([environment_place(*each, "Tool") for each in zip(names, functions, strict=True)], section)


def _openenv(config: Config) -> Environments:
    """Makes environments of `OpenEnv`, whose steps run on a server."""
    section = config.environment
    check_waiting(section)
    assert section.name is not None
    return _pool(environment_place(section.name, resolve(section.name)), section, MOST_WAITING)


def _program(config: Config) -> Environments:
    """Makes the environment whose trajectories a command plays."""
    section = config.environment
    arguments = section.arguments or {}
    check_arguments("environment.arguments", "program", Program, arguments, named=("arguments", *LIMITS))
    return _programs(section, **arguments)


def _agent(function: Callable[..., Any], section: EnvironmentConfig) -> Environments:
    """Makes the environment whose trajectories an async function plays. Some of `environment.arguments` are those of
    `Program`, the others those of the function."""
    arguments = section.arguments or {}
    own = {name: value for name, value in arguments.items() if name in ("columns", "one_conversation")}
    rest = {name: value for name, value in arguments.items() if name not in own}
    _checked(EnvironmentKind(_own, PROGRAM_KEYS), section, f"environment.name={section.name}")
    return _programs(section, command=function, arguments=rest, **own)


def _programs(section: EnvironmentConfig, **arguments: Any) -> Program:
    check_waiting(section)
    limits = {name: getattr(section, name) for name in LIMITS}
    return Program(**arguments, **limits)


def _pool(place: str | list[str], section: EnvironmentConfig, workers: int | None = None) -> EnvironmentPool:
    """Makes a pool; `workers` is the default of `environment.workers`."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers
    return EnvironmentPool(
        place,
        arguments=section.arguments,
        workers=workers if section.workers is None else section.workers,
        timeout_seconds=section.timeout_seconds,
        memory_gb=section.memory_gb,
    )


def check_waiting(section: EnvironmentConfig) -> None:
    """Raises UserError if `environment.workers` is 0. The calls of these environments wait for another process or
    server."""
    if section.workers == 0:
        raise UserError("environment.workers: got 0, but calls that wait for a server need 1 or more; or unset it.")


def _check_unlimited(section: EnvironmentConfig) -> None:
    """Raises UserError if a time or memory limit is set. Environments in the training process have no limits."""
    for key in changed_keys(section):
        if key in LIMITS and key != "workers":
            raise UserError(
                f"environment.{key}: {section.name or 'tools'} runs in the training process, where it has no limits; "
                f"set environment.workers, e.g. to 4, or remove environment.{key}."
            )


PROGRAM_KEYS = frozenset({"name", "arguments", "max_turns", "mode", *LIMITS})

KINDS: dict[str, EnvironmentKind] = {
    "openenv": EnvironmentKind(_openenv),
    "program": EnvironmentKind(_program, PROGRAM_KEYS),
    "verifiers": EnvironmentKind(
        "tunix_like.verifiers.environments:make", ("max_turns", "mode", "workers", "timeout_seconds"), "data.name"
    ),
}
"""The kinds that have a name. `environment.name` can also name a class, and `environment.tools` functions."""

OWN = EnvironmentKind(_own)
TOOLS = EnvironmentKind(_tools, KEYS - {"name", "arguments"})
