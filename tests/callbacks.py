"""A callback that passes rows of metrics to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix_like import Callback, RunControl


class OnRow(Callback):
    """Calls `function(row)` with each row. Shows that it shows progress, as a display of the user does."""

    shows_progress = True

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        self.function(row)
