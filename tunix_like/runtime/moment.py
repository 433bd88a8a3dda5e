"""The moment of a run at which completions are sampled: the numbers `step` and `progress`, which functions of users get
by the names of their parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

NAMES = ("step", "progress")

Moment = Mapping[str, float]
"""The values of `NAMES`. `progress` is missing if the number of steps of the run is not known."""


def moment_of(step: int, done: int, total: int | None) -> Moment:
    """Returns the moment of step `step` (0: before the first one), when `done` of the `total` steps of the run are
    done."""
    moment: dict[str, float] = {"step": step}
    if total is not None:
        moment["progress"] = min(done / max(total, 1), 1.0)
    return moment


START = moment_of(0, 0, 1)
"""That of a model before training, and of all that is no part of a run."""


def asked_numbers(function: Callable[..., Any], moment: Collection[str], columns: Collection[str]) -> list[str]:
    """Returns the names in `moment` for which a function has a parameter. Left out are columns of the data, and values
    that `functools.partial` has set."""
    called = getattr(function, "function", function)  # of a reward function that wraps another one
    taken = {*columns, *(called.keywords if isinstance(called, functools.partial) else ())}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in named and each.name in {*moment} - taken]


UNKNOWN = "the number of steps of this run is not known, and so is its progress; set training.max_steps."
