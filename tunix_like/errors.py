"""The one exception for what a user can put right: a key, a file, a row, a function of theirs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Bad input. The message names the key, file, row or function and says what to do; the CLI prints it without a
    traceback and exits with `status`."""

    status = 2


class NotSaved(UserError):
    """The newest checkpoint could not be written; those before it are whole.

    Attributes:
      stopped: a signal had asked for the end.
    """

    status = 74  # EX_IOERR of sysexits.h
    stopped = False


def check_type(name: str, value: Any, kind: type | tuple[type, ...], cure: str) -> None:
    """Raises UserError where the argument `name` of a Python call is no `kind`; `cure` says what to give."""
    if not isinstance(value, kind):
        raise UserError(f"{name}: got {type(value).__name__}; {cure}.")


def one_line(error: Exception) -> str:
    """What another library raised, cut to a line."""
    first = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {first}".strip(" .")
    return text if len(text) <= 200 else f"{text[:200]}..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid spelling if one is close, and always the list."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Valid: {', '.join(names)}."
