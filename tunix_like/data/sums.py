"""Sums of two small numbers as chats, for a pretrained model: it often knows how to add, and rarely replies with the
number alone.

A row has the columns `prompt` (messages), `answer` (for SFT) and `gold` (the sum, for the reward).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tunix_like.data.source import DataSource, MappedRows, Record
from tunix_like.errors import UserError

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

SMALLEST = 2
LARGEST = 30
DEFAULT_EVAL = 64
QUESTION = "What is {} + {}? Reply with the number only."


def load(config: DataConfig) -> DataSource:
    """Returns all sums of two numbers from `SMALLEST` to `LARGEST`, in an order drawn with the seed `data.seed`: first
    `data.eval_size` held-out ones, then those to train on. A pair of numbers in the other order is the same sum."""
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
    random.Random(config.seed).shuffle(pairs)
    eval_size = DEFAULT_EVAL if config.eval_size is None else config.eval_size
    most = len(pairs) - eval_size
    train_size = most if config.train_size is None else config.train_size
    if most < 1 or train_size > most:
        raise UserError(
            f"data.train_size and data.eval_size: there are {len(pairs)} different sums, fewer than "
            f"{train_size + eval_size if most > 0 else eval_size + 1}; lower them."
        )
    train = pairs[eval_size : eval_size + train_size]
    return DataSource(MappedRows(train, record), MappedRows(pairs[:eval_size], record), None, reward="last_number")


def record(pair: tuple[int, int]) -> Record:
    total = str(sum(pair))
    return {"prompt": [{"role": "user", "content": QUESTION.format(*pair)}], "answer": total, "gold": total}
