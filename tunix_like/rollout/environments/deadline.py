"""Stores the time limit of the current call of an environment, for environments that wait for a service."""

from __future__ import annotations

import math
import time

_end = math.inf


def set_limit(seconds: float) -> None:
    """Sets the time limit of the call that begins now. Environments in the training process have no time limit."""
    global _end
    _end = time.monotonic() + seconds


def patience(most: float) -> float:
    """Returns the seconds for which the current call may wait for a service: at most `most`, and at most 3/4 of the
    remaining time. Returns 0 if the call has no time limit: such calls run one after the other, so a wait in one call
    delays all later calls."""
    return 0.0 if _end == math.inf else max(0.0, min(most, 0.75 * (_end - time.monotonic())))
