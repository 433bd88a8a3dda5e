"""Rows to batches of tokenised prompts, through grain: shuffled by seed, resumable, over-long prompts left out.

It knows the tokenizer and the limits of a prompt; it does not know where rows come from or what is done with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain.python as grain

from tunix_like.errors import UserError
from tunix_like.tokenizer import Tokenizer

SCANNED_ROWS = 20_000
"""Rows tokenised before the start, to say how many prompts are too long."""


class Prompt(NamedTuple):
    """A row, rendered and tokenised; `columns` are the row without its prompt."""

    text: str
    tokens: list[int]
    columns: dict[str, Any]


def render(row: Any, tokenizer: Tokenizer) -> Prompt:
    """Renders a row's `prompt`: text as it is, messages through the chat template.

    Raises:
      UserError: no `prompt` column, or one that is neither text nor messages, or is empty.
    """
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = f"it has {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
        raise UserError(f"a data row needs a 'prompt' column (text or messages); {has}.")
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, Sequence) and prompt):
        raise UserError(f"a data row's 'prompt' must be text or a list of messages, got {prompt!r:.80}.")
    text, tokens = tokenizer.encode_prompt(prompt, apply_chat_template=not isinstance(prompt, str))
    if not tokens:
        raise UserError(f"the prompt {prompt!r:.80} has no tokens; leave the row out.")
    return Prompt(text, tokens, {name: value for name, value in row.items() if name != "prompt"})


def check_prompts(
    rows: Sequence[Any] | grain.MapDataset, tokenizer: Tokenizer, max_prompt_length: int, overlong: str, what: str
) -> int:
    """Tokenises up to `SCANNED_ROWS` rows and counts the prompts longer than `max_prompt_length` tokens.

    What a grain filter has taken out of a `MapDataset` stands there as None, and is no row.

    Raises:
      UserError: no rows, no prompt that fits, or (`overlong="error"`) one that does not, naming the row.
    """
    if len(rows) == 0:
        raise UserError(f"the {what} data is empty.")
    count = min(len(rows), SCANNED_ROWS)
    long = 0
    for index in range(count):
        row = rows[index]
        if row is None and isinstance(rows, grain.MapDataset):
            continue
        length = len(render(row, tokenizer).tokens)
        if length > max_prompt_length:
            long += 1
            if overlong == "error":
                raise UserError(
                    f"{what} row {index}: its prompt has {length} tokens, rollout.max_prompt_length is "
                    f"{max_prompt_length}. Raise it, or set data.overlong_prompts=skip."
                )
    if long == count:
        raise UserError(
            f"all {count} {what} prompts are longer than rollout.max_prompt_length={max_prompt_length}; raise it."
        )
    return long


def prompt_batches(
    rows: Any,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    max_prompt_length: int,
    seed: int,
    shuffle: bool,
    forever: bool,
) -> Iterator[list[Prompt]]:
    """Batches of `batch_size` prompts, each at most `max_prompt_length` tokens; an incomplete last batch is dropped.

    Args:
      rows: a sequence or a grain `MapDataset` (shuffled anew each epoch when `shuffle`), a grain `IterDataset` (as it
        comes), or any other iterable (as it comes; its place cannot be saved).
      forever: start over after each epoch.

    Returns:
      an iterator; a `grain.DatasetIterator` (whose state can be saved) unless `rows` is a plain iterable.
    """
    fits = lambda prompt: len(prompt.tokens) <= max_prompt_length  # noqa: E731
    if isinstance(rows, Sequence | grain.MapDataset):
        source = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
        source = source.seed(seed)
        source = source.shuffle() if shuffle else source
        source = source.repeat() if forever else source
        stream = source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    elif isinstance(rows, grain.IterDataset):
        stream = rows
    elif isinstance(rows, Iterable):
        return _plain_batches(rows, tokenizer, batch_size, fits, forever)
    else:
        raise UserError(f"the data must be a sequence, an iterable or a grain dataset, got {type(rows).__name__}.")
    prompts = stream.map(lambda row: render(row, tokenizer)).filter(fits)
    return iter(prompts.batch(batch_size, drop_remainder=True, batch_fn=list))


def _plain_batches(
    rows: Iterable[Any], tokenizer: Tokenizer, batch_size: int, fits: Any, forever: bool
) -> Iterator[list[Prompt]]:
    def endless() -> Iterator[Prompt]:
        while True:
            found = False
            for row in rows:
                prompt = render(row, tokenizer)
                if fits(prompt):
                    found = True
                    yield prompt
            if not (forever and found):
                return

    prompts = endless()
    while len(batch := list(itertools.islice(prompts, batch_size))) == batch_size:
        yield batch
