"""Selects the best saved step of a run by an evaluation metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.storage.metrics import rows as metric_rows

STEP_KEY = "step"


class Best:
    """Selects the best training step of a run by a metric (higher is better). If several steps have the best value, the
    earliest is selected.

    The values come from the rows of `metrics.jsonl`. The row of a step is written before its checkpoint, and is removed
    if the run resumes from an earlier step. Nothing else is stored, so a killed process cannot leave a wrong state.

    Args:
      metric: name of a column of the rows, e.g. `eval/pass@1`.
      step_key: name of the column with the step number.
    """

    def __init__(self, metric: str, step_key: str = STEP_KEY) -> None:
        self.metric, self.step_key = metric, step_key
        self._values: dict[int, float] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the values of the evaluation metric in `rows`. Missing, null and non-finite values are ignored."""
        for row in rows:
            step, value = row.get(self.step_key), row.get(self.metric)
            if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value):
                self._values[step] = float(value)

    def among(self, steps: Sequence[int]) -> int | None:
        """Returns the step of `steps` with the highest value of the evaluation metric; None if no step has a value."""
        return max(
            (step for step in sorted(steps) if step in self._values), key=lambda step: self._values[step], default=None
        )

    def describe(self, step: int) -> str:
        """Returns the name and the value of the evaluation metric at a training step as text, for a message."""
        return f"{self.metric} {self._values[step]:.4g} at step {step}"


def best_of(run: Path, metric: str) -> Best:
    """Returns a selector of the best training step by `metric`, with the values from `metrics.jsonl` in the run folder
    `run`."""
    best = Best(metric)
    best.add(metric_rows(run))
    return best
