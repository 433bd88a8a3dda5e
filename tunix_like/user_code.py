"""A user's own function, named in a configuration as a file or an importable module.

It knows where a function comes from and runs nothing but the module that is named. It does not call the function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix_like.errors import UserError


def is_place(name: str) -> bool:
    """Whether a name means a function somewhere (`FILE.py:function`, `package.module:function`,
    `package.module.function`), not one that is registered."""
    return ":" in name or "." in name


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
    if not path.is_file():
        raise UserError(f"{label}: the file {path.absolute()} does not exist; write path/to/file.py:function.")
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
