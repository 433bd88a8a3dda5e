"""Stores the time limit of the current call of an environment, for environments that wait for a service."""

from __future__ import annotations

import math
import time

_end = math.inf


def set_limit(seconds: float) -> None:
    """Sets the time limit, in seconds from now, of the current call of an environment. Without a call of this function,
    there is no time limit. Calls of environments in the training process have no time limit."""
    global _end
    _end = time.monotonic() + seconds


def patience(most: float) -> float:
    """Returns the time in seconds for which the current call of an environment may wait for a service.

    The result is at most `most`, and at most 3/4 of the time that remains until the time limit of the call. The result
    is 0 if the call has no time limit. Calls without a time limit run one after the other, so each wait would delay all
    later calls.
    """
    return 0.0 if _end == math.inf else max(0.0, min(most, 0.75 * (_end - time.monotonic())))
