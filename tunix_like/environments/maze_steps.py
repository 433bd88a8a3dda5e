"""Defines the environment `maze_steps`: the policy makes one move per turn in a maze, and sees only which moves are
open in the current cell."""

from __future__ import annotations

from tunix_like.environments.protocol import EnvStepResult
from tunix_like.tasks.maze import MOST_MOVES, MOVES


class MazeSteps:
    """A walk through a maze. It begins in the cell at row 1 and column 1. Each turn is a move to a neighbouring cell.

    Cells are at odd rows and columns of the grid. Between two neighbouring cells there is a wall or an opening. The
    observation lists the moves that are open, such as `DOWN+RIGHT`. A turn must contain exactly one of the words UP,
    DOWN, LEFT and RIGHT. For any other turn, or if a wall blocks the move, the position stays the same and the turn
    still counts. The reward is 1 when the goal is reached. The `state` of a turn is the cell.
    """

    def reset(self, hidden: str) -> str:
        """Starts a walk. `hidden` is the grid: rows of `#` (wall), `.` (free), `S` (start) and `G` (goal), joined by
        newlines."""
        self.rows = hidden.split("\n")
        self.row = 1
        self.column = 1
        self.turns = 0
        self.blocked = 0
        return f" {self._open()}"

    def step(self, completion: str) -> EnvStepResult:
        """Makes the move that a turn names, and returns the moves that no wall blocks in the new cell."""
        self.turns += 1
        moves = [word for word in completion.split() if word in MOVES]
        if len(moves) == 1 and self._is_open(moves[0]):
            down, right = MOVES[moves[0]]
            self.row, self.column = self.row + 2 * down, self.column + 2 * right
        else:
            self.blocked += 1
        reached = self.rows[self.row][self.column] == "G"
        over = reached or self.turns == MOST_MOVES
        info = {"moves": float(self.turns), "blocked": float(self.blocked), "state": f"{self.row},{self.column}"}
        return EnvStepResult(None if over else self._open(), float(reached), over, info)

    def _is_open(self, move: str) -> bool:
        down, right = MOVES[move]
        return self.rows[self.row + down][self.column + right] != "#"

    def _open(self) -> str:
        return "+".join(move for move in MOVES if self._is_open(move))
