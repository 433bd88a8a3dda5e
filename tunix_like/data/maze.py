"""Generates perfect mazes with Prim's algorithm, solves them by breadth-first search and draws them in a terminal.

A maze of side n (odd, walls included) is a spanning tree of the (n-1)/2 x (n-1)/2 grid of cells. START is at (1, 1) and
GOAL is at (n-2, n-2). The path between them is unique. A grid is a string of n rows of `#`, `.`, `S`, `G`, joined by
newlines. The task is from arXiv 2602.02710, section 6.2. Its reward is in `rewards/maze.py`.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING

from tunix_like.data.source import STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.errors import UserError
from tunix_like.tasks.maze import MOVES, walk
from tunix_like.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

__all__ = [
    "DEFAULT_SIZE",
    "VOCABULARY",
    "draw",
    "grid_of",
    "grids",
    "load",
    "load_pairs",
    "make",
    "record",
    "solve",
    "tokenizer",
    "with_pair",
]

_CELL_TOKENS = {"#": "WALL", ".": "PATH", "S": "START", "G": "GOAL"}
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
_NAMED = ["GRID_START", "GRID_END", "PATH_START", "DONE", "PATH", "WALL", "GOAL", "START", "NEWLINE", *MOVES]
VOCABULARY = [*_SPECIAL, *_NAMED, *(f"<reserved_{i}>" for i in range(15))]
"""The 32 tokens of the maze tokenizer, in the order of their ids."""

DEFAULT_SIZE = 9
DEFAULT_TRAIN = 8000
DEFAULT_EVAL = 256


def load(config: DataConfig) -> DataSource:
    """Generates random mazes with the seed `data.seed`."""
    train, held_out = grids(config)
    return DataSource(
        MappedRows(train, record),
        MappedRows(held_out, record),
        tokenizer(),
        reward="maze",
        draw=lambda row, completion: draw(row["grid"], completion),
    )


def load_pairs(config: DataConfig) -> DataSource:
    """Generates the mazes of `load`, each with a right and a wrong walk: the columns `chosen` and `rejected`."""
    source = load(config)
    size = DEFAULT_SIZE if config.maze_size is None else config.maze_size
    check_generated(config, len(source.train) + len(source.eval), 8 * size * (size + 1) + 5 * STRING_BYTES)
    train, held_out = (list(map(with_pair, rows)) for rows in (source.train, source.eval))
    return dataclasses.replace(source, train=train, eval=held_out)


def with_pair(row: Record) -> Record:
    """Adds to the row of a maze the columns `chosen`, its answer, and `rejected`, a walk that leaves the right path at
    a random junction and then goes on without turning back, until a dead end or the length of the answer.

    On a path without junctions, the wrong walk stops one move before GOAL.
    """
    grid = row["grid"].split("\n")
    right = row["answer"].split()[:-1]
    rng = random.Random(row["grid"])

    def onward(walk: list[str]) -> list[str]:
        """Returns the moves after `walk` that do not turn back."""
        cells = [(1, 1)]
        for move in walk:
            cells.append((cells[-1][0] + MOVES[move][0], cells[-1][1] + MOVES[move][1]))
        beyond = {move: (cells[-1][0] + down, cells[-1][1] + across) for move, (down, across) in MOVES.items()}
        return [move for move, (y, x) in beyond.items() if grid[y][x] != "#" and (y, x) not in cells[-2:]]

    junctions = [place for place in range(len(right)) if len(onward(right[:place])) > 1]
    wrong = right[:-1]
    if junctions:
        wrong = right[: junctions[int(rng.random() * len(junctions))]]
        choices = [move for move in onward(wrong) if move != right[len(wrong)]]
        while choices and len(wrong) < len(right):
            wrong.append(choices[int(rng.random() * len(choices))])
            choices = onward(wrong)
    return {**row, "chosen": row["answer"], "rejected": " ".join([*wrong, "DONE"])}


def grids(config: DataConfig) -> tuple[list[str], list[str]]:
    """Generates the mazes of the training rows and of the held-out rows as text grids, with the seed `data.seed`. The
    held-out grids are generated first, and no training grid equals a held-out grid."""
    size = DEFAULT_SIZE if config.maze_size is None else config.maze_size
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    eval_size = DEFAULT_EVAL if config.eval_size is None else config.eval_size
    if size < 5 or size % 2 == 0:
        raise UserError(f"data.maze_size={size} must be odd and at least 5 (walls count).")
    log10 = _log10_distinct(size)
    if math.log10(max(1, train_size + eval_size)) > log10 + 1e-9:
        raise UserError(
            f"data.maze_size={size}: only {round(10**log10)} distinct mazes exist, but {train_size} for training and "
            f"{eval_size} held out are requested; raise data.maze_size or lower data.train_size and data.eval_size."
        )
    check_generated(config, train_size + eval_size, size * (size + 1) + STRING_BYTES)
    rng = random.Random(config.seed)
    held_out = _distinct(size, eval_size, rng, set())
    train = _distinct(size, train_size, rng, set(held_out))
    assert not set(train) & set(held_out)
    return train, held_out


def _log10_distinct(size: int) -> float:
    """Returns log10 of the number of distinct mazes of side `size`. By Kirchhoff's theorem, this is the number of
    spanning trees of an m x m grid with m = (size - 1) / 2."""
    m = (size - 1) // 2
    cosines = [2 - 2 * math.cos(math.pi * i / m) for i in range(m)]
    logs = [math.log10(a + b) for i, a in enumerate(cosines) for j, b in enumerate(cosines) if i or j]
    return sum(logs) - 2 * math.log10(m)


def _distinct(size: int, count: int, rng: random.Random, taken: set[str]) -> list[str]:
    """Generates `count` distinct mazes that are not in `taken`. This is slow if almost all possible mazes are taken."""
    grids: dict[str, None] = {}
    while len(grids) < count:
        grid = make(size, rng)
        if grid not in taken:
            grids[grid] = None
    return list(grids)


def make(size: int, rng: random.Random) -> str:
    """Generates one maze with Prim's algorithm: starting from a random cell, opens random walls between the maze and
    the remaining cells. Every maze has a positive probability."""
    cells = bytearray(b"#" * (size * size))
    neighbours = _neighbours(size)
    # `random()` gives the same sequence on every Python version; `choice` does not guarantee that.
    first = list(neighbours)[int(rng.random() * len(neighbours))]
    cells[first] = ord(".")
    frontier = list(neighbours[first])
    while frontier:
        i = int(rng.random() * len(frontier))
        wall, cell = frontier[i]
        frontier[i] = frontier[-1]
        frontier.pop()
        if cells[cell] == ord("#"):
            cells[wall] = cells[cell] = ord(".")
            frontier.extend(step for step in neighbours[cell] if cells[step[1]] == ord("#"))
    cells[size + 1], cells[-size - 2] = ord("S"), ord("G")
    text = cells.decode()
    return "\n".join(text[i : i + size] for i in range(0, size * size, size))


_NEIGHBOURS: dict[int, dict[int, list[tuple[int, int]]]] = {}


def _neighbours(size: int) -> dict[int, list[tuple[int, int]]]:
    """Returns for each cell the pairs `(wall in between, neighbour)`, as indices into the grid without newlines."""
    if size not in _NEIGHBOURS:
        inside = range(1, size - 1, 2)
        _NEIGHBOURS[size] = {
            row * size + column: [
                ((row + down) * size + column + right, (row + 2 * down) * size + column + 2 * right)
                for down, right in MOVES.values()
                if 0 < row + 2 * down < size - 1 and 0 < column + 2 * right < size - 1
            ]
            for row in inside
            for column in inside
        }
    return _NEIGHBOURS[size]


def solve(grid: str) -> list[str]:
    """Returns the shortest sequence of moves from START to GOAL, by breadth-first search."""
    width = grid.index("\n") + 1
    steps = {down * width + right: move for move, (down, right) in MOVES.items()}  # as distances in the text
    start = width + 1
    arrived = {start: 0}  # the step with which each cell was reached
    queue = [start]
    for cell in queue:
        if grid[cell] == "G":
            break
        for step in steps:
            if cell + step not in arrived and grid[cell + step] != "#":
                arrived[cell + step] = step
                queue.append(cell + step)
    else:
        raise UserError(f"The maze has no path from START to GOAL:\n{grid}")
    moves: list[str] = []
    while step := arrived[cell]:
        moves.append(steps[step])
        cell -= step
    return moves[::-1]


def record(grid: str) -> Record:
    """Builds the row of a maze: `prompt`, `answer` (the moves from START to GOAL and DONE, for SFT) and `grid`."""
    rows = (" ".join([*(_CELL_TOKENS[cell] for cell in row), "NEWLINE"]) for row in grid.split("\n"))
    prompt = " ".join(["GRID_START", *rows, "GRID_END", "PATH_START"])
    return {"prompt": prompt, "answer": " ".join([*solve(grid), "DONE"]), "grid": grid}


def grid_of(prompt: str) -> str | None:
    """Parses the grid from a prompt that `record` made; returns None for any other text."""
    cells = {word: cell for cell, word in _CELL_TOKENS.items()} | {"NEWLINE": "\n"}
    first, *words = prompt.split() or [""]
    if first != "GRID_START" or words[-2:] != ["GRID_END", "PATH_START"]:
        return None
    grid = "".join(cells.get(word, "?") for word in words[:-2]).removesuffix("\n")
    rows = grid.split("\n")
    whole = {len(row) for row in rows} == {len(rows)} and grid.count("S") == grid.count("G") == 1
    if not whole or "?" in grid or len(rows) < 5 or rows[1][1] != "S":
        return None
    border = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    return grid if set(border) == {"#"} else None  # closed border: no walk can leave the grid


def tokenizer() -> Tokenizer:
    """Builds the tokenizer of mazes. Each word is one token, and `<bos>` is added in front of a text. Only `<pad>`,
    `<bos>` and `<eos>` are special tokens, which decoding drops."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def draw(grid: str, completion: str) -> str:
    """Draws a maze and the path of a completion for a terminal without colours, with two characters per cell.

    Walls are full blocks, S is START, G is GOAL, and dots are the path. A path that does not reach GOAL ends in x.
    """
    path, reached = walk(grid, completion)
    marks = dict.fromkeys(path, "••")
    if not reached:
        marks[path[-1]] = "x "
    symbols = {"#": "██", ".": "  ", "S": "S ", "G": "G "}
    lines = []
    for r, row in enumerate(grid.split("\n")):
        marked = [marks.get((r, c), symbols[cell]) if cell == "." else symbols[cell] for c, cell in enumerate(row)]
        lines.append("".join(marked).rstrip())
    return "\n".join(lines)
