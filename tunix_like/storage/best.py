"""Which saved step of a run is best by one metric of its evaluations.

It knows rows of metrics and numbers of steps: no file of a checkpoint, no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.storage.metrics import rows as metric_rows

STEP_KEY = "step"


class Best:
    """The best of a run's steps by a metric of which more is better; of equal ones the earliest.

    Its values are those of the rows of metrics. A row is on disk before the checkpoint of its step, and is cut where a
    run goes back behind it: so nothing else is kept of which step is best, and no kill can leave it wrong.

    Args:
      metric: name of a column of the rows, `eval/pass@1`.
      step_key: name of their column of steps.
    """

    def __init__(self, metric: str, step_key: str = STEP_KEY) -> None:
        self.metric, self.step_key = metric, step_key
        self._values: dict[int, float] = {}

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes note of the rows that have the metric; what is no number (null, NaN) is best of nothing."""
        for row in rows:
            step, value = row.get(self.step_key), row.get(self.metric)
            if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value):
                self._values[step] = float(value)

    def among(self, steps: Sequence[int]) -> int | None:
        """The best of `steps`, or None where none of them has a value."""
        return max(
            (step for step in sorted(steps) if step in self._values), key=lambda step: self._values[step], default=None
        )

    def said(self, step: int) -> str:
        return f"{self.metric} {self._values[step]:.4g} at step {step}"


def best_of(run: Path, metric: str) -> Best:
    """What the rows of a run folder say."""
    best = Best(metric)
    best.learn(metric_rows(run))
    return best
