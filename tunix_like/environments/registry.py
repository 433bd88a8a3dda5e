"""Registers environments by name, and loads environments and tools from a user's file or module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tunix_like.environments.adapters import as_environment
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import check_new_name, load_function, place_of

_F = TypeVar("_F", bound=Callable[..., Any])

ENVIRONMENTS: dict[str, Callable[..., Any] | str] = {"openenv": "tunix_like.openenv.environment:OpenEnv"}
"""All registered environments by name: classes, functions that make environments, or `MODULE:NAME` of one of these in
an extension, which is imported when it is used."""

_METHODS = ("reset", "step", "outcomes", "finish", "close")

_OTHERWISE = "run it in this process with LocalEnvironments"


def register_environment(name: str) -> Callable[[_F], _F]:
    """Returns a decorator that registers an environment under `name`.

    The decorated object is a class, or a function that makes an environment; or a class whose objects run the
    environments of all trajectories (see `Environments`).

    Raises:
      UserError: the name is already registered, or contains a colon (reserved for files and modules), or the class
        cannot be an environment.
    """

    def register(factory: _F) -> _F:
        check_new_name("environment", name, ENVIRONMENTS)
        as_environment(factory)
        ENVIRONMENTS[name] = factory
        return factory

    return register


def runs_trajectories(factory: Any) -> bool:
    """Returns whether `factory` is a class whose objects implement `Environments`."""
    return isinstance(factory, type) and all(callable(getattr(factory, method, None)) for method in _METHODS)


def resolve(name: str) -> Callable[..., Any]:
    """Returns the class or function that a name from the configuration denotes, and checks that it can make
    environments.

    Args:
      name: a registered name, `path/to/file.py:Class`, or `package.module:Class`.

    Raises:
      UserError: the name is unknown, the file or module is missing, fails to load or does not define the class, or the
        class cannot be an environment (see `adapters.check_class`).
    """
    factory = name if ":" in name else ENVIRONMENTS.get(name)
    if factory is None:
        raise UserError(
            f"Environment '{name}' is unknown. {nearest(name, [*ENVIRONMENTS, 'program'])} "
            "Write a class of your own as path/to/file.py:Class or package.module:Class."
        )
    if isinstance(factory, str):
        factory = load_function(factory, "Environment")
    if not inspect.iscoroutinefunction(factory):  # an agent (see `program.py`)
        as_environment(factory)
    return factory


def resolve_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Returns the functions for the names of `environment.tools`, and checks that these functions can be tools.

    Raises:
      UserError: a file, module or function is missing or fails to load, or a function cannot be a tool (see
        `tools.schema_of`).
    """
    for name in names:
        if ":" not in name:
            raise UserError(f"Tool '{name}': write path/to/file.py:function or package.module:function.")
    functions = [load_function(name, "Tool") for name in names]
    as_environment(functions)
    return functions


def environment_place(name: str, factory: Callable[..., Any], what: str = "Environment") -> str:
    """Returns the location from which `EnvironmentPool` imports an environment or a tool. `what`, "Environment" or
    "Tool", is used in the error message.

    Raises:
      UserError: another process cannot import `factory`.
    """
    return place_of(name, factory, what, _OTHERWISE)
