"""Exceptions for errors that the user can fix, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """An invalid input: a config key, a file, a data row or a user function. The message names the input and the
    remedy. The CLI prints the message without a traceback; `status` is its exit status."""

    status = 2


class NotSaved(UserError):
    """The newest checkpoint could not be written; earlier checkpoints are complete.

    Attributes:
      stopped: True if a signal had requested the run to stop.
    """

    status = 74  # EX_IOERR of sysexits.h
    stopped = False


class EngineLost(UserError):
    """The servers that generate completions, or the service of the environments, do not answer, or no completion could
    be scored in several consecutive steps. The state of the run is saved, and the run can be resumed."""

    status = 75  # EX_TEMPFAIL of sysexits.h


class SamplerDrifted(UserError):
    """The log-probabilities of sampler and trainer agreed in the first step, and differ too much in a later one
    (`training.later_logprob_gap`). The state of the run is saved."""


class CallbackFailed(UserError):
    """A callback of `train` raised an error. The last complete step is saved if the run has a folder."""


class EnvironmentUnavailable(UserError):
    """A service that an environment needs cannot be reached. If an environment raises this error, its trajectory is
    not scored. If all trajectories of a batch end with this error, the run stops with `EngineLost`."""


class EnvironmentMisconfigured(UserError):
    """An environment cannot work with the given configuration. The run stops if the `reset` of an environment raises
    this error."""


def check_type(name: str, value: Any, kind: type | tuple[type, ...], cure: str) -> None:
    """Raises UserError if `value`, the argument `name` of a Python call, is not an instance of `kind`.

    `cure` is the remedy that the message names.
    """
    if not isinstance(value, kind):
        raise UserError(f"{name}: got {type(value).__name__}; {cure}.")


def one_line(error: BaseException) -> str:
    """Formats an exception of another library as one line, and truncates it to 200 characters."""
    first = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {first}".strip(" .")
    return text if len(text) <= 200 else f"{text[:200]}..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint for a misspelt name: the closest valid name, if one is close, and the list of valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Valid: {', '.join(names)}."
