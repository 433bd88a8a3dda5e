"""Fingerprints of the reward functions and of the training rows of a run. A resumed run compares them with those of its
checkpoint, because settings alone do not show that code or data has changed.

Fingerprints are equal in all processes and on all platforms.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import grain.python as grain

from tunix_like.rewards.calls import GroupFunction
from tunix_like.rollout.rollouts import WeightedReward

INPUTS = "inputs"
"""Key of the fingerprints in the identity of a run (`Trainer.identity`)."""

READ_ROWS = 10_000
"""Maximum number of rows that the fingerprint of the rows reads. Of more rows, evenly spaced ones are read."""


def fingerprints(rows: Any, rewards: Sequence[WeightedReward] = ()) -> dict[str, str]:
    """Returns the fingerprint of the rows (if their number is known) and of the code of each reward function."""
    found = {}
    if isinstance(rows, Sequence | grain.MapDataset):
        found["the training rows"] = of_rows(rows)
    for name, function, _ in rewards:
        if (code := of_code(function)) is not None:
            found[f"the code of the reward function '{name}'"] = code
    return found


def of_rows(rows: Sequence[Any] | grain.MapDataset) -> str:
    """Returns a fingerprint of the number and the content of rows, in their order."""
    count = len(rows)
    read = min(count, READ_ROWS)
    digest = hashlib.sha256(str(count).encode())
    for i in range(read):
        digest.update(_text(rows[i * count // read]).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]


def of_code(function: Any) -> str | None:
    """Returns a fingerprint of the source code of a function; None if there is no code of the user.

    The fingerprint includes the functions, classes and constants (numbers, texts, tuples, patterns) that the function
    names, also indirectly. Code of this package and of other installed packages is left out, as is state: the
    attributes of objects, and variables that the code assigns with `global` or `nonlocal`, such as a counter of calls.
    Spaces and comments count.
    """
    code = _Code(_package(function))
    code.add("function", function)
    parts = {name: text for name, text in code.parts.items() if code.places.get(name) not in code.assigned}
    return hashlib.sha256(_text(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16] if parts else None


_CONSTANTS = (bool, int, float, str, bytes, type(None), frozenset, re.Pattern)


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys of several types, or a value that contains itself
        return type(value).__name__


def _plain(value: Any) -> Any:
    """Converts a value that JSON lacks. An object of unknown type is replaced by the name of its type."""
    if hasattr(value, "tolist"):  # arrays and scalars of numpy
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(_text, value))
    if isinstance(value, bytes):
        return value.hex()
    return [value.pattern, value.flags] if isinstance(value, re.Pattern) else type(value).__name__


def _package(value: Any) -> str:
    inner = value.func if isinstance(value, functools.partial) else value
    return str(getattr(inner, "__module__", None) or type(inner).__module__).partition(".")[0]


class _Code:
    """Collects the code and the constants that a function of the user depends on, by name, in `parts`.

    Args:
      package: the top package of the function, whose code is included even if it is installed.

    Attributes:
      places: for each of `parts` that is a global variable, the identity of its module's namespace and its name.
      assigned: the global variables that the code assigns.
    """

    def __init__(self, package: str):
        self.parts = dict[str, str]()
        self.places = dict[str, tuple[int, str]]()
        self.assigned = set[tuple[int, str]]()
        self._package = package
        self._seen = set[int]()

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, _CONSTANTS) or (
            isinstance(value, tuple) and all(isinstance(v, _CONSTANTS) for v in value)
        ):
            self.parts[name] = _text(value)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            for key, argument in [*enumerate(value.args), *value.keywords.items()]:
                self.add(f"{name}({key})", argument)
            self.add(name, value.func)
        elif isinstance(value, GroupFunction):
            self.add(name, value.code)
        elif isinstance(value, MethodType):
            self.add(name, value.__func__)
        elif isinstance(value, FunctionType):
            self._add_function(name, value)
        elif isinstance(value, type):
            for base in filter(self._is_own, value.__mro__):
                for key, member in vars(base).items():
                    if not key.startswith("__") or isinstance(member, FunctionType):
                        self.add(f"{name}.{key}", getattr(member, "__func__", member))
        elif not isinstance(value, ModuleType):
            self.add(name, getattr(value, "__wrapped__", type(value)))  # a cached function, or an object

    def _add_function(self, name: str, function: FunctionType) -> None:
        own = self._is_own(function)
        if own and (source := _source(function)) is not None:
            self.parts[name] = source
        cells = [cell for cell in function.__closure__ or () if not _is_empty(cell)]
        nonlocals = _assigned(function.__code__, "STORE_DEREF")
        for key, cell in zip(function.__code__.co_freevars, cells, strict=False):
            if callable(cell.cell_contents) or (own and key not in nonlocals):
                self.add(f"{name}[{key}]", cell.cell_contents)
        if not own:
            return
        defaults = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        for place, default in defaults:
            self.add(f"{name}({place})", default)
        self.assigned |= {(id(function.__globals__), key) for key in _assigned(function.__code__, "STORE_GLOBAL")}
        names = sorted({each for code in _codes(function.__code__) for each in code.co_names})
        for key in filter(function.__globals__.__contains__, names):
            value = function.__globals__[key]
            self.places[f"{name}/{key}"] = id(function.__globals__), key
            self.add(f"{name}/{key}", value)
            if isinstance(value, ModuleType) and self._is_own(value):
                for attribute in filter(vars(value).__contains__, names):
                    self.places[f"{name}/{key}.{attribute}"] = id(vars(value)), attribute
                    self.add(f"{name}/{key}.{attribute}", vars(value)[attribute])

    def _is_own(self, value: Any) -> bool:
        """Returns whether a function, class or module is code of the user, and not of an installed package."""
        module = value.__name__ if isinstance(value, ModuleType) else str(value.__module__)
        top = module.partition(".")[0]
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if top == "tunix_like" or top in sys.stdlib_module_names:
            return False
        return top == self._package or not re.search(r"[/\\](site|dist)-packages[/\\]", file)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _assigned(code: CodeType, operation: str) -> set[str]:
    """Returns the variables that a function assigns with the bytecode `operation`."""
    return {
        str(each.argval) for inner in _codes(code) for each in dis.get_instructions(inner) if each.opname == operation
    }


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _source(function: FunctionType) -> str | None:
    """Returns the source code of a function; None if it is not known. Of a lambda, whose lines contain other code too,
    only the expression."""
    code = function.__code__
    if code.co_name != "<lambda>":
        try:
            return textwrap.dedent(inspect.getsource(function)).rstrip()
        except (OSError, TypeError):
            return None
    places: list[Any] = [place for place in code.co_positions() if None not in place and place[2:] != (0, 0)]
    lines = [line.encode() for line in linecache.getlines(code.co_filename, function.__globals__)]
    if not places or len(lines) < max(place[1] for place in places):
        return None
    first, start = min((place[0], place[2]) for place in places)
    last, end = max((place[1], place[3]) for place in places)
    chosen = lines[first - 1 : last]
    chosen[-1] = chosen[-1][:end]
    return b"".join([chosen[0][start:], *chosen[1:]]).decode()
