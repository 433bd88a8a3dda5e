"""The reward `maze`."""

from __future__ import annotations

from typing import Any

from tunix_like.tasks.maze import walk


def maze(prompts: list[str], completions: list[str], grid: list[str], **_: Any) -> list[float]:
    """Returns 1 for each completion that solves its maze in the column `grid` (see `walk`), else 0."""
    return [float(walk(rows, completion).reached) for rows, completion in zip(grid, completions, strict=True)]
