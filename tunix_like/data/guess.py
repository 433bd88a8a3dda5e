"""Generates rows for the environment `guess`, in which the model guesses a hidden number.

The column `answer` (for SFT) contains a game with random guesses, each of which agrees with the earlier replies.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tunix_like.data.source import STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.data.words import END, word_tokenizer
from tunix_like.errors import UserError

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

NUMBERS, MOST_GUESSES = 64, 7  # the same as in the environment; a test compares them
HIGHER, LOWER, INVALID = "HIGHER", "LOWER", "INVALID"
PROMPT = "GUESS"
DEFAULT_TRAIN = 8192
_GAME_BYTES = 100  # size of the answer


def load(config: DataConfig) -> DataSource:
    """Generates games in which a hidden number is guessed. The hidden numbers of the training rows are random, with the
    seed `data.seed`. The hidden numbers of the held-out rows are 0, 1, 2 and so on.

    All rows have the same prompt. The held-out numbers also occur in training, because the model should learn a method
    that finds any number.

    Raises:
      UserError: `data.eval_size` is larger than the number of possible hidden numbers, or the rows would take too much
        memory.
    """
    eval_size = NUMBERS if config.eval_size is None else config.eval_size
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    if eval_size > NUMBERS:
        raise UserError(f"data.eval_size={eval_size}: there are only {NUMBERS} numbers to guess; lower it.")
    check_generated(config, train_size + eval_size, STRING_BYTES + _GAME_BYTES)
    rng = random.Random(config.seed)
    # `random()` gives the same sequence on every Python version; `randrange` does not guarantee that.
    games = [game(int(rng.random() * NUMBERS), rng) for _ in range(train_size)]
    held_out = [game(number, rng) for number in range(eval_size)]
    return DataSource(MappedRows(games, record), MappedRows(held_out, record), tokenizer(), reward="exact_match")


def game(number: int, rng: random.Random) -> tuple[int, str]:
    """Returns `number` and the text of a random game with this hidden number. Each guess is uniform among the numbers
    that the earlier replies leave possible."""
    low, high = 0, NUMBERS - 1
    words: list[str] = []
    for turn in range(MOST_GUESSES):
        guess = low + int(rng.random() * (high - low + 1))
        words.append(str(guess))
        if guess == number or turn == MOST_GUESSES - 1:
            break
        words += [END, HIGHER if guess < number else LOWER]
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return number, " ".join(words)


def record(played: tuple[int, str]) -> Record:
    """Returns the row of a game: `prompt`, `number` (hidden from the policy) and `answer` (a random game, for SFT)."""
    number, text = played
    return {"prompt": PROMPT, "number": number, "answer": text}


def tokenizer() -> Tokenizer:
    """Builds the tokenizer of this task, with one token per number and one token per word."""
    return word_tokenizer([PROMPT, HIGHER, LOWER, INVALID, *map(str, range(NUMBERS))])
