"""A user's own function, named in a configuration as a file or an importable module.

It knows where a function comes from, and how to say what it returned or raised. It runs nothing but the module that is
named, and does not call the function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import file_problem


def is_place(name: str) -> bool:
    """Whether a name means a function somewhere (`FILE.py:function`, `package.module:function`,
    `package.module.function`), not one that is registered."""
    return ":" in name or "." in name


def is_own(function: Callable[..., Any]) -> bool:
    """Whether a function is a user's, and not one of this package."""
    return not str(getattr(function, "__module__", "")).startswith("tunix_like.")


def kind_of(value: Any) -> str:
    """What a user's function returned, in words: its shape, its length or its type."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    if isinstance(value, int | float) or shape == ():
        return "one number"
    return f"an object of type {type(value).__name__}" if shape is None else f"an array of shape {list(shape)}"


def said_of(error: Exception) -> str:
    """What a user's function raised, in a line, with the place where it did; to be called where it was caught, in the
    function that made the call."""
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the first below ours
    where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    hint = ": it is traced by jax, write jnp.where and not `if`" if "Tracer" in type(error).__name__ else ""
    return f"{f'{type(error).__name__}: {error}'.splitlines()[0].rstrip('.'):.300}{where}{hint}"


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function behind `path/to/file.py:function`, `package.module:function` or `package.module.function`.

    Args:
      what: what the function is to be, for the messages, e.g. "Reward".

    Raises:
      UserError: a file or module that is missing or fails to load, or a function that it lacks (with the list of those
        it has).
    """
    place, _, wanted = name.rpartition(":" if ":" in name else ".")
    label = f"{what} '{name}'"
    module = _load_file(Path(place), label) if place.endswith(".py") else _import(place, label)
    function = getattr(module, wanted, None)
    if not callable(function):
        found = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_") and value.__module__ == module.__name__
        )
        raise UserError(f"{label}: {place} has no function '{wanted}'; it has: {', '.join(found) or 'none'}.")
    return function


def _load_file(path: Path, label: str) -> ModuleType:
    """The module in a file, run once per process however many of its functions are named."""
    if problem := file_problem(path):
        raise UserError(f"{label}: the file {path.absolute()} {problem}; write path/to/file.py:function.")
    full = path.resolve()
    key = f"tunix_like_user_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look a module up by its name
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
            "A file is written with its ending, as path/to/file.py:function."
        ) from error
