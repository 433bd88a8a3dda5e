"""Describes why foreign code failed."""

from __future__ import annotations

import sys
import traceback
from typing import Literal, NamedTuple

from tunix_like.errors import UserError

LONGEST_REASON = 20_000
"""Maximum number of characters of a failure reason. An exception message may contain megabytes."""

FailureKind = Literal["timeout", "error", "unavailable", "misconfigured"]

_CALLERS = {__name__.partition(".")[0], "jaxtyping", *sys.stdlib_module_names}
"""Packages whose code calls the user's code: this library, checks of types, and e.g. `asyncio`."""


class Failure(NamedTuple):
    """The reason why a reward function failed for a completion, or why an environment failed.

    Attributes:
      kind: `timeout` or `error`. An environment can also be `unavailable` or `misconfigured` (see
        `EnvironmentUnavailable` and `EnvironmentMisconfigured` in `tunix_like.errors`).
    """

    kind: FailureKind
    reason: str


def explain(name: str, error: BaseException, what: str = "Reward function") -> str:
    """Describes the exception `error` of the user's function `name`, with the user's part of the traceback.

    Args:
      what: the kind of user code, such as "Reward function"; the description begins with this text.
    """
    if isinstance(error, UserError):
        return str(error)[:LONGEST_REASON]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _CALLERS:
        trace = trace.tb_next
    trace = trace or error.__traceback__  # a function of this library failed
    raised = "".join(traceback.format_exception_only(error)).strip()
    text = f"{what} '{name}' raised {raised}"
    if trace is not None:
        text = f"{text[: LONGEST_REASON // 2]}\n{''.join(traceback.format_exception(error.with_traceback(trace)))}"
    return text[:LONGEST_REASON].strip()
