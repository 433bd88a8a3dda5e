"""Loads a user function from a file or an importable module, and formats its return values and exceptions for error
messages.

To load a function, its module is executed. The function itself is not called here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import file_problem


def is_place(name: str) -> bool:
    """Returns whether a name is a path to a function (`FILE.py:function`, `package.module:function`,
    `package.module.function`) and not a registered name."""
    return ":" in name or "." in name


def check_new_name(what: str, name: str, registry: Mapping[str, Any], reserved: str = ":") -> None:
    """Checks that a name can be registered.

    Args:
      what: the kind of function, for the error message, e.g. "reward function".
      reserved: characters that the name must not contain, because they mark a file or a module.

    Raises:
      UserError: the name is in `registry`, or contains a reserved character.
    """
    if name in registry:
        raise UserError(f"{what} '{name}' is already registered; choose another name.")
    if any(character in name for character in reserved):
        marks = " or ".join(f"'{character}'" for character in reserved)
        raise UserError(f"{what} '{name}': names with {marks} are reserved for files and modules; choose another name.")


def is_own(function: Callable[..., Any]) -> bool:
    """Returns whether a function is user code and not part of this package."""
    return not str(getattr(function, "__module__", "")).startswith("tunix_like.")


def kind_of(value: Any) -> str:
    """Describes the return value of a user function by its shape, length or type, for an error message."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    if isinstance(value, int | float) or shape == ():
        return "one number"
    return f"an object of type {type(value).__name__}" if shape is None else f"an array of shape {list(shape)}"


def describe_error(error: Exception) -> str:
    """Describes an exception of a user function in one line, with file and line number.

    Must be called in the same function that called the user function and caught the exception.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the frame of the user function, which our frame called
    where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    hint = (
        ": the function is traced by jax, write jnp.where instead of `if`" if "Tracer" in type(error).__name__ else ""
    )
    return f"{f'{type(error).__name__}: {error}'.splitlines()[0].rstrip('.'):.300}{where}{hint}"


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Loads the function `path/to/file.py:function`, `package.module:function` or `package.module.function`.

    Args:
      what: the kind of function, for error messages, e.g. "Reward".

    Raises:
      UserError: the file or module is missing or fails to load, or the module has no such function (the
        message lists the functions of the module).
    """
    place, _, wanted = name.rpartition(":" if ":" in name else ".")
    label = f"{what} '{name}'"
    module = _load_file(Path(place), label) if place.endswith(".py") else _import(place, label)
    function = getattr(module, wanted, None)
    if not callable(function):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) or (what == "Environment" and inspect.isclass(value))
            if not key.startswith("_") and value.__module__ == module.__name__
        )
        raise UserError(f"{label}: {place} has no function '{wanted}'; it has: {', '.join(functions) or 'none'}.")
    return function


def _load_file(path: Path, label: str) -> ModuleType:
    """Loads the module in a file. A module is run once per process, even if several of its functions are used."""
    if problem := file_problem(path):
        raise UserError(f"{label}: the file {path.absolute()} {problem}; write path/to/file.py:function.")
    full = path.resolve()
    key = f"tunix_like_user_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look up a module by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise UserError(f"{label}: {path} failed to load: {type(error).__name__}: {error}") from error
    return module


def _import(place: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise UserError(
            f"{label}: module {place} failed to import: {type(error).__name__}: {error}. "
            "A file needs its ending: path/to/file.py:function."
        ) from error
