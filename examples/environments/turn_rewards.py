"""Reward functions of turns (`per: turn` and `per: potential` in rewards.functions)."""

import functools
import re

from tunix_like.environments.maze_steps import MazeSteps
from tunix_like.tasks.maze import MOVES


def near_goal(conversation, hidden):
    """A potential for maze_steps: 0.9 to the power of the moves that are left from the cell in which a turn begins."""
    cells = [cell_after(messages, grid) for messages, grid in zip(conversation, hidden, strict=True)]
    return [0.9 ** left(grid)[cell] for cell, grid in zip(cells, hidden, strict=True)]


def cell_after(messages, hidden):
    walk = MazeSteps()
    walk.reset(hidden)
    for message in messages:
        if message["role"] == "assistant":
            walk.step(message["content"])
    return walk.row, walk.column


@functools.lru_cache(maxsize=4096)
def left(hidden):
    """The number of moves from each cell to the goal."""
    rows = hidden.split("\n")
    goal = next((r, row.index("G")) for r, row in enumerate(rows) if "G" in row)
    found = {goal: 0}
    queue = [goal]
    for r, c in queue:
        for down, right in MOVES.values():
            cell = r + 2 * down, c + 2 * right
            if rows[r + down][c + right] != "#" and cell not in found:
                found[cell] = found[r, c] + 1
                queue.append(cell)
    return found


def calls(completions):
    """1 for a turn that calls the calculator, else None: the function does not apply."""
    return [1.0 if re.search(r"<tool_call>", text) else None for text in completions]
