"""Tests every rule of the maze reward on a maze that is written out."""

import pytest

from tunix_like.rewards import REWARDS
from tunix_like.rewards.maze import maze
from tunix_like.tasks.maze import walk

# The path: DOWN DOWN RIGHT RIGHT. A dead end leads up from (3, 3).
GRID = "#####\n#S#.#\n#.#.#\n#..G#\n#####"
LONG = "#######\n#S#...#\n#.#.#.#\n#...#.#\n#####.#\n#....G#\n#######"


@pytest.mark.parametrize(
    "grid, completion, reward",
    [
        (GRID, "DOWN DOWN RIGHT RIGHT DONE", 1),
        (GRID, "  DOWN\nDOWN RIGHT RIGHT DONE  ", 1),
        (GRID, "DOWN DOWN RIGHT RIGHT", 0),  # DONE does not occur
        (GRID, "DOWN DOWN RIGHT DONE", 0),  # GOAL not reached
        (GRID, "DOWN DOWN RIGHT DONE RIGHT", 0),  # the move comes after DONE
        (GRID, "DOWN RIGHT DOWN DOWN RIGHT RIGHT DONE", 0),  # a wall
        (GRID, "DOWN UP DOWN DOWN RIGHT LEFT RIGHT RIGHT DONE", 1),  # cells may be visited again
        (GRID, "DOWN DOWN RIGHT RIGHT RIGHT RIGHT DONE", 1),  # moves after GOAL are ignored, walls too
        (GRID, "DOWN DOWN RIGHT RIGHT WALL DONE", 0),  # only moves may precede DONE
        (GRID, "DOWN <unk> DOWN RIGHT RIGHT DONE", 0),
        (GRID, "DOWN DOWN RIGHT RIGHT DONE DONE WALL", 1),  # text after DONE does not count
        (GRID, "DONE", 0),
        (GRID, "", 0),
        (GRID, "down down right right DONE", 0),
        (LONG, "DOWN DOWN RIGHT RIGHT UP UP RIGHT RIGHT DOWN DOWN DOWN DOWN DONE", 1),
        (LONG, "DOWN DOWN RIGHT RIGHT RIGHT RIGHT DOWN DOWN DONE", 0),
    ],
)
def test_every_rule_of_the_maze_reward(grid, completion, reward):
    assert REWARDS["maze"](prompts=["p"], completions=[completion], grid=[grid]) == [reward]


def test_batch_uses_the_grid_of_each_row():
    way = "DOWN DOWN RIGHT RIGHT DONE"
    assert maze(["p"] * 3, [way, way, "DONE"], [GRID, LONG, GRID], answer=["x"] * 3) == [1, 0, 0]


def test_cells_of_a_walk():
    assert walk(GRID, "DOWN DOWN RIGHT RIGHT UP DONE").cells == [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3)]
    assert walk(GRID, "DOWN RIGHT RIGHT DONE").cells == [(1, 1), (2, 1)]
    assert walk(GRID, "DOWN WALL DOWN DONE").cells == [(1, 1), (2, 1)]
