"""Copies of environments for reward functions with the parameter `environments`, as in TRL.

The processes of environments and of reward functions import this module, so it does not import jax.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

MOST = 200_000
"""Maximum size of the copied attributes of one environment: characters, and one for each value."""


class EnvironmentState(types.SimpleNamespace):
    """The attributes of an environment at the end of its trajectory, without methods, because the environment is in
    another process."""

    def __getattr__(self, name: str) -> Any:
        why = self.__dict__.get("_problem") or (
            f"this copy of an environment of another process has no '{name}', only attributes of numbers, text, lists "
            "and dicts"
        )
        raise AttributeError(why)


def state_of(environment: Any) -> Any:
    """Returns a copy of an environment that can be sent to another process. Returns a value of a data column, which can
    have the name `environments` too, unchanged."""
    if environment is None or isinstance(environment, EnvironmentState | str | int | float | list | dict):
        return environment
    return EnvironmentState(**plain_attributes(environment))


def failed_state(reason: str) -> EnvironmentState:
    """Returns a copy of an environment that failed. Each access to an attribute raises AttributeError."""
    return EnvironmentState(_problem=f"the environment of this trajectory has failed: {reason.splitlines()[0]:.500}")


def plain_attributes(environment: Any) -> dict[str, Any]:
    """Returns copies of the attributes of an object and of its class that JSON can represent, by name. Properties are
    not evaluated. An attribute that would make the result larger than `MOST` is left out."""
    attributes: dict[str, Any] = {}
    for kind in reversed(type(environment).__mro__[:-1]):
        attributes |= vars(kind)
    attributes |= getattr(environment, "__dict__", {})
    plain = {}
    room = MOST
    for name, value in attributes.items():
        if not name.startswith("__"):
            try:
                copied, left = _copied(value, room)
            except ValueError:
                continue
            plain[name] = copied
            room = left
    return plain


def _copied(value: Any, room: int) -> tuple[Any, int]:
    """Copies a value. Returns the copy and the room that is left. Raises ValueError if the value is not plain or too
    large."""
    if hasattr(value, "tolist") and getattr(value, "size", math.inf) <= room:  # numpy
        value = value.tolist()
    room -= 1 + (len(value) if isinstance(value, str) else 0)
    if room < (len(value) if isinstance(value, Mapping | list | tuple) else 0):
        raise ValueError
    if value is None or isinstance(value, bool | int | float | str):
        return value, room
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        copy = {}
        for name, each in value.items():
            copy[name], room = _copied(each, room - len(name))
        return copy, room
    if isinstance(value, list | tuple):
        items = []
        for each in value:
            item, room = _copied(each, room)
            items.append(item)
        return items, room
    raise ValueError
