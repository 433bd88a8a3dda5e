"""Reversing short strings (`abcd>` to `dcba`): the smallest text job that a tiny model learns, for smoke runs.

Eight letters and at most four of them by default: a string is then one of 4,672, a random guess is right often enough
for rewards to appear after a short warm-up, and the vocabulary stays at 13. More letters or longer strings make the
warm-up longer and teach nothing else. It does NOT read any file.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tunix_like.data.source import STRING_BYTES, DataSource, MappedRows, Record, check_generated
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

LETTERS = "abcdefgh"
SHORTEST, DEFAULT_LONGEST = 2, 4
DEFAULT_TRAIN, DEFAULT_EVAL = 2000, 64


def load(config: DataConfig) -> DataSource:
    """Random strings of 2 to `data.text_length` letters, every length equally often, by `data.seed`.

    The held-out strings are distinct and drawn first; training strings may repeat and are never one of them.

    Raises:
      UserError: a `data.text_length` below 2, or more held-out strings than half of all that exist.
    """
    longest = DEFAULT_LONGEST if config.text_length is None else config.text_length
    if longest < SHORTEST:
        raise UserError(f"data.text_length={longest} must be at least {SHORTEST}.")
    existing = sum(len(LETTERS) ** length for length in range(SHORTEST, longest + 1))
    eval_size = min(DEFAULT_EVAL, existing // 2) if config.eval_size is None else config.eval_size
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    if eval_size > existing // 2:
        raise UserError(
            f"data.eval_size={eval_size} is more than half of the {existing} strings of {SHORTEST} to {longest} "
            "letters; lower it or raise data.text_length."
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
    # `random()` draws the same on every Python version, which `choice` does not promise.
    length = SHORTEST + int(rng.random() * (longest - SHORTEST + 1))
    return "".join(LETTERS[int(rng.random() * len(LETTERS))] for _ in range(length))


def record(text: str) -> Record:
    """The row of one string: `prompt`, `answer` (what SFT trains on and the reward compares with) and `text`."""
    return {"prompt": f"{text}>", "answer": text[::-1], "text": text}


def tokenizer() -> Tokenizer:
    """One token a character, `<bos>` in front."""
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
