"""Generates short strings to reverse (`abcd>` to `dcba`): a minimal text task for smoke tests with a tiny model.

By default, a string has two to four letters, and each letter is one of eight. There are 4,672 such strings, and the
vocabulary has 13 tokens. This task is so small that the model earns rewards after a short warm-up by SFT. Longer
strings need a longer warm-up.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tunix_like.data.source import STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

LETTERS = "abcdefgh"
SHORTEST = 2
DEFAULT_LONGEST = 4
DEFAULT_TRAIN = 2000
DEFAULT_EVAL = 64


def load(config: DataConfig) -> DataSource:
    """Generates random strings of 2 to `data.text_length` letters, with the seed `data.seed`.

    All lengths are equally likely. The held-out strings are distinct and are generated first. Training strings can
    repeat, but no training string equals a held-out string.

    Raises:
      UserError: `data.text_length` is below 2, `data.eval_size` exceeds half of the possible strings, or the rows would
        take too much memory.
    """
    longest = DEFAULT_LONGEST if config.text_length is None else config.text_length
    if longest < SHORTEST:
        raise UserError(f"data.text_length={longest} must be at least {SHORTEST}.")
    existing = sum(len(LETTERS) ** length for length in range(SHORTEST, longest + 1))
    eval_size = min(DEFAULT_EVAL, existing // 2) if config.eval_size is None else config.eval_size
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    if eval_size > existing // 2:
        raise UserError(
            f"data.eval_size={eval_size} is more than half of the {existing} possible strings of {SHORTEST} to "
            f"{longest} letters; lower it or raise data.text_length."
        )
    check_generated(config, train_size + eval_size, longest + STRING_BYTES)
    rng = random.Random(config.seed)
    held_out: dict[str, None] = {}
    while len(held_out) < eval_size:
        held_out[_draw(rng, longest)] = None
    train: list[str] = []
    while len(train) < train_size:
        text = _draw(rng, longest)
        if text not in held_out:
            train.append(text)
    return DataSource(MappedRows(train, record), MappedRows(list(held_out), record), tokenizer(), reward="exact_match")


def _draw(rng: random.Random, longest: int) -> str:
    # `random()` gives the same sequence on every Python version; `choice` does not guarantee that.
    length = SHORTEST + int(rng.random() * (longest - SHORTEST + 1))
    return "".join(LETTERS[int(rng.random() * len(LETTERS))] for _ in range(length))


def record(text: str) -> Record:
    """Builds the row for the string `text`: `prompt`, `answer` (reversed, for SFT and for the reward) and `text`."""
    return {"prompt": f"{text}>", "answer": text[::-1], "text": text}


def tokenizer() -> Tokenizer:
    """Builds the tokenizer of this task. Each character is one token, and `<bos>` is added in front of a text."""
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", ">", *LETTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()  # no spaces between the characters
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return Tokenizer(backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
