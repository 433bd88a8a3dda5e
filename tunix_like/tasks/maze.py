"""The rules of the maze: moves, and the path of a completion through its maze."""

from __future__ import annotations

from typing import NamedTuple

MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
"""Offset of each move, as (rows, columns)."""

MOST_MOVES = 16
"""The environment `maze_steps` ends an episode after this many moves."""


class Walk(NamedTuple):
    """The path of a completion through its maze.

    Attributes:
      cells: the visited cells, as (row, column), beginning with the start cell (1, 1).
      reached: whether the completion solves the maze.
    """

    cells: list[tuple[int, int]]
    reached: bool


def walk(grid: str, completion: str) -> Walk:
    """Follows the moves of a completion through its maze.

    A grid is a text of rows joined by newlines. Its characters are `#` (wall), `.` (free cell), `S` (start, at row 1
    and column 1, counted from 0) and `G` (goal).

    The completion solves the maze if and only if it contains the word DONE, every word before DONE is a move, no move
    enters a wall, and the goal cell is reached. Moves after the goal are ignored, and cells may be visited again.
    `Walk.cells` ends at the goal, before the first wall, or before the first word that is not a move.
    """
    rows = grid.split("\n")
    words = completion.split()
    moves = words[: words.index("DONE")] if "DONE" in words else words
    cells = [(1, 1)]
    for move in moves:
        row, column = cells[-1]
        if rows[row][column] == "G" or move not in MOVES:
            break
        row, column = row + MOVES[move][0], column + MOVES[move][1]
        if rows[row][column] == "#":
            break
        cells.append((row, column))
    at_goal = rows[cells[-1][0]][cells[-1][1]] == "G"
    return Walk(cells, at_goal and "DONE" in words and all(move in MOVES for move in moves))
