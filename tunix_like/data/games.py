"""Generates rows for the environments `guess`, in which the model guesses a hidden number, and `maze_steps`, in which
it makes one move per turn in a maze.

The column `answer` (for SFT) contains a whole game in which every turn is random among the sensible ones: guesses that
agree with the earlier replies, moves that no wall blocks. Each word is one token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunix_like.data.maze import grids
from tunix_like.data.source import HIDDEN_COLUMN, STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.errors import UserError
from tunix_like.tasks.guess import HIGHER, INVALID, LOWER, MOST_GUESSES, NUMBERS
from tunix_like.tasks.maze import MOST_MOVES, MOVES
from tunix_like.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

DEFAULT_GAMES = 8192
_GAME_BYTES = 100  # size of the answer

END = "END"
"""The word that ends a turn. Its token is the end-of-sequence token, but is not marked as special. In an SFT answer,
the word is therefore encoded as this token, and the answer can have several turns."""


def load_guess(config: DataConfig) -> DataSource:
    """Generates games in which a hidden number is guessed, random in training (seed `data.seed`), 0, 1, 2 and so on if
    held out. The held-out numbers also occur in training, because the model should learn a method that finds any
    number."""
    eval_size = NUMBERS if config.eval_size is None else config.eval_size
    train_size = DEFAULT_GAMES if config.train_size is None else config.train_size
    if eval_size > NUMBERS:
        raise UserError(f"data.eval_size={eval_size}: there are only {NUMBERS} numbers to guess; lower it.")
    check_generated(config, train_size + eval_size, STRING_BYTES + _GAME_BYTES)
    rng = random.Random(config.seed)
    # `random()` gives the same sequence on every Python version; `randrange` does not guarantee that.
    games = [game(int(rng.random() * NUMBERS), rng) for _ in range(train_size)]
    held_out = [game(number, rng) for number in range(eval_size)]
    words = _tokenizer(["GUESS", HIGHER, LOWER, INVALID, *map(str, range(NUMBERS))])
    return DataSource(MappedRows(games, guess_row), MappedRows(held_out, guess_row), words, reward="exact_match")


def game(number: int, rng: random.Random) -> tuple[int, str]:
    """Returns `number` and the text of a random game with this hidden number. Each guess is uniform among the numbers
    that the earlier replies leave possible."""
    low = 0
    high = NUMBERS - 1
    words: list[str] = []
    for turn in range(MOST_GUESSES):
        guess = low + int(rng.random() * (high - low + 1))
        words.append(str(guess))
        if guess == number or turn == MOST_GUESSES - 1:
            break
        words += [END, HIGHER if guess < number else LOWER]
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return number, " ".join(words)


def guess_row(played: tuple[int, str]) -> Record:
    """Returns the row of a game: `prompt`, `number` (hidden from the policy) and `answer` (a random game, for SFT)."""
    number, text = played
    return {"prompt": "GUESS", "number": number, "answer": text}


def load_maze_steps(config: DataConfig) -> DataSource:
    """Generates the same mazes as the data source `maze`. Raises the same errors as `maze.grids`."""
    train, held_out = grids(config)
    counts = range(2, len(MOVES) + 1)
    views = ["+".join(chosen) for count in counts for chosen in itertools.combinations(MOVES, count)]
    words = _tokenizer(["WALK", *MOVES, *views])
    return DataSource(MappedRows(train, maze_row), MappedRows(held_out, maze_row), words, reward="exact_match")


def maze_row(grid: str) -> Record:
    """Builds the row of a maze: `prompt`, `answer` (a random walk, for SFT) and the grid in the column `hidden`.
    `answer` begins with the first view (the open moves at a position), which in RL the environment adds to the
    prompt."""
    return {"prompt": "WALK", "answer": random_walk(grid), HIDDEN_COLUMN: grid}


def random_walk(grid: str) -> str:
    """Returns a random walk through a maze as text: the open moves at each position, and the move that was made there.
    Each move is uniform among the open moves. For equal grids, the walks are equal."""
    rng = random.Random(grid)
    rows = grid.split("\n")
    row = 1
    column = 1
    words = []
    for _ in range(MOST_MOVES):
        moves = [move for move, (down, right) in MOVES.items() if rows[row + down][column + right] != "#"]
        move = moves[int(rng.random() * len(moves))]
        words += ["+".join(moves), move, END]
        row, column = row + 2 * MOVES[move][0], column + 2 * MOVES[move][1]
        if rows[row][column] == "G":
            break
    return " ".join(words[:-1])


def _tokenizer(words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with one token per word, which adds `<bos>` in front of a text and ends with `END`."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<unk>", END, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<bos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return Tokenizer(backend, bos_token="<bos>", eos_token=END, pad_token="<pad>")
