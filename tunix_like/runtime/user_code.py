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
from collections.abc import Callable, Collection, Mapping
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
    """Raises UserError if a name is in `registry` or has `reserved` characters, which mark a file or a module."""
    if name in registry:
        raise UserError(f"{what} '{name}' is already registered; choose another name.")
    if any(character in name for character in reserved):
        marks = " or ".join(f"'{character}'" for character in reserved)
        raise UserError(f"{what} '{name}': names with {marks} are reserved for files and modules; choose another name.")


def is_own(function: Callable[..., Any]) -> bool:
    """Returns whether a function is user code and not part of this package."""
    return not str(getattr(function, "__module__", "")).startswith("tunix_like.")


def check_arguments(
    key: str,
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    positional: int = 0,
    named: Collection[str] = (),
) -> None:
    """Raises UserError if a function or class cannot be called with the arguments that the config key `key` has.

    Args:
      positional, named: number of positional arguments, and names of arguments, that the call has besides.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # some classes of extension modules have no signature
        return
    free = [each for each in parameters[positional:] if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    known = {each.name: each.default for each in free if each.name not in named}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if unknown := [argument for argument in arguments if argument not in known and not takes_all]:
        raise UserError(f"{key}: '{name}' has no parameter '{unknown[0]}'; it has: {', '.join(known) or 'none'}.")
    required = [each for each, default in known.items() if default is inspect.Parameter.empty]
    if missing := [each for each in required if each not in arguments]:
        raise UserError(f"{key}: '{name}' needs a value for {', '.join(missing)}; set {key}.{missing[0]}.")


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


def describe_error(error: BaseException) -> str:
    """Describes an exception of a user function in one line, with file and line number. Must be called in the function
    that called the user function."""
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the frame of the user function, which our frame called
    where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    hint = (
        ": the function is traced by jax, write jnp.where instead of `if`" if "Tracer" in type(error).__name__ else ""
    )
    return f"{f'{type(error).__name__}: {error}'.splitlines()[0].rstrip('.'):.300}{where}{hint}"


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Loads `path/to/file.py:function`, `package.module:function` or `package.module.function`. `what` is the kind of
    function, for messages, e.g. "Reward"."""
    place, _, wanted = name.rpartition(":" if ":" in name else ".")
    label = f"{what} '{name}'"
    module = _load_file(Path(place), label) if place.endswith(".py") else _import(place, label)
    function = getattr(module, wanted, None)
    if not callable(function):
        classes = what.endswith(("Environment", "Engine", "Callback"))
        functions = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) or (classes and inspect.isclass(value))
            if not key.startswith("_") and value.__module__ == module.__name__
        )
        raise UserError(f"{label}: {place} has no function '{wanted}'; it has: {', '.join(functions) or 'none'}.")
    return function


IN_THIS_PROCESS = "run it in this process (rewards.workers=0, or without `pooled`)"


def place_of(
    name: str, function: Callable[..., Any], what: str = "Reward function", otherwise: str = IN_THIS_PROCESS
) -> str:
    """Returns the location from which another process imports a function or class: `/absolute/file.py:function` or
    `module:function`.

    Args:
      what: the kind of user code, for the error message.
      otherwise: what to do if the code cannot be moved to an importable file, for the error message.

    Raises:
      UserError: another process cannot import the function or class.
    """
    if ":" in name:
        file, _, attribute = name.rpartition(":")
        return f"{Path(file).resolve()}:{attribute}" if file.endswith(".py") else name
    module = getattr(function, "__module__", None)
    attribute = getattr(function, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(str(module)), attribute, None) is function:
        file = str(sys.modules[str(module)].__file__)
        return f"{file}:{attribute}" if str(module).startswith("tunix_like_user_") else f"{module}:{attribute}"
    raise UserError(
        f"{what} '{name}' cannot run in a worker, which imports it by name: it is a closure, a lambda, a method, or is "
        f"defined in the main script. Move it to the top level of a file that is imported, or {otherwise}."
    )


def _load_file(path: Path, label: str) -> ModuleType:
    """A module is run once per process, even if several of its functions are used."""
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
    except BaseException as error:
        del sys.modules[key]
        raise _failed(f"{label}: {path} failed to load", error) from error
    return module


def _import(place: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except BaseException as error:
        cure = "A file needs its ending: path/to/file.py:function."
        raise _failed(f"{label}: module {place} failed to import", error, cure) from error


def _failed(what: str, error: BaseException, cure: str = "") -> BaseException:
    """Returns the exception to raise after the import of user code. A script that parses arguments or ends with
    `sys.exit` when it is imported would end the run as if it were done."""
    if isinstance(error, KeyboardInterrupt):
        return error
    if isinstance(error, SystemExit):
        cure = "An import must not end the program: put what a script does below `if __name__ == '__main__':`."
    return UserError(f"{what}: {type(error).__name__}: {error}. {cure}".rstrip())
