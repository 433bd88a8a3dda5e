"""Generates rows for the environment `maze_steps`, in which the model makes one move per turn in a maze.

The column `answer` (for SFT) contains a random walk, in which no move is blocked by a wall.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from tunix_like.data.maze import grids
from tunix_like.data.source import HIDDEN_COLUMN, DataSource, MappedRows, Record
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.data.words import END, word_tokenizer
from tunix_like.rewards.maze import MOVES

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

MOST_MOVES = 16  # the same as in the environment; a test compares them
PROMPT = "WALK"


def load(config: DataConfig) -> DataSource:
    """Generates the same mazes as the data source `maze`. Raises the same errors as `maze.grids`."""
    train, held_out = grids(config)
    return DataSource(MappedRows(train, record), MappedRows(held_out, record), tokenizer(), reward="exact_match")


def record(grid: str) -> Record:
    """Builds the row of a maze: `prompt`, `answer` (a random walk, for SFT) and the grid in the column `hidden`.

    A view is a list of the open moves at a position. In RL, the environment adds the first view to the prompt. In SFT,
    the prompt has no view, so `answer` begins with the first view.
    """
    return {"prompt": PROMPT, "answer": random_walk(grid), HIDDEN_COLUMN: grid}


def random_walk(grid: str) -> str:
    """Returns a random walk through a maze as text: the open moves at each position, and the move that was made there.
    Each move is uniform among the open moves. For equal grids, the walks are equal."""
    rng = random.Random(grid)
    rows, row, column = grid.split("\n"), 1, 1
    words = []
    for _ in range(MOST_MOVES):
        moves = [move for move, (down, right) in MOVES.items() if rows[row + down][column + right] != "#"]
        move = moves[int(rng.random() * len(moves))]
        words += ["+".join(moves), move, END]
        row, column = row + 2 * MOVES[move][0], column + 2 * MOVES[move][1]
        if rows[row][column] == "G":
            break
    return " ".join(words[:-1])


def tokenizer() -> Tokenizer:
    """Builds the tokenizer of this task, with one token per move and one token per set of open moves."""
    counts = range(2, len(MOVES) + 1)
    views = ["+".join(chosen) for count in counts for chosen in itertools.combinations(MOVES, count)]
    return word_tokenizer([PROMPT, *MOVES, *views])
