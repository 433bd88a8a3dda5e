"""Reads parameters that change during training: `{start: 0, end: 1, steps: 200}`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tunix_like.config.keys import number_problem, shortened
from tunix_like.errors import UserError

_FIELDS = ("start", "end", "steps")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A linear schedule: `start` at step 1, `end` from step `steps` on. With `whole`, values are rounded to the nearest
    integer, halves up."""

    start: float
    end: float
    steps: int
    whole: bool

    def __call__(self, step: int) -> float:
        """Returns the value of a training step; the first step is 1."""
        done = min(max(step - 1, 0), self.steps - 1) / (self.steps - 1)
        value = self.start + (self.end - self.start) * done if done < 1 else self.end
        return math.floor(value + 0.5) if self.whole else float(value)

    def __str__(self) -> str:
        return f"{self.start:g} to {self.end:g} over {self.steps} steps"


def read_schedule(values: Mapping[Any, Any], name: str, whole: bool) -> Schedule:
    """Converts the mapping of a config to a schedule.

    Args:
      name: dotted name of the key, for messages.
      whole: whether the parameter is an integer.

    Raises:
      UserError: a field is missing, unknown, or has a wrong type or value.
    """
    if set(values) != set(_FIELDS):
        raise UserError(
            f"{name}: got {shortened(dict(values))}; a schedule has the keys start, end and steps, e.g. "
            "{start: 1, end: 4, steps: 200}."
        )
    for field in _FIELDS:
        value = values[field]
        kinds = (int,) if whole or field == "steps" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "an integer" if kinds == (int,) else "a number"
            raise UserError(f"{name}.{field}: got {shortened(value)}; it must be {kind}.")
        if problem := number_problem(value):
            raise UserError(f"{name}.{field}: got {shortened(value)}; {problem}.")
    if values["steps"] < 2:
        raise UserError(f"{name}.steps: got {values['steps']}; it must be at least 2: step 1 has the value start.")
    return Schedule(values["start"], values["end"], values["steps"], whole)
