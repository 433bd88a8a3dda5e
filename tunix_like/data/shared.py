"""Warns once of faults in the rows of a run: prompts that are in both the training rows and the held-out rows (found by
hashes of the prompts), and text prompts for a tokenizer with a chat template."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain.python as grain

from tunix_like.data.source import HIDDEN_COLUMN
from tunix_like.errors import UserError
from tunix_like.runtime import progress
from tunix_like.runtime.processes import by_first
from tunix_like.text.tokenizer import Tokenizer

logger = logging.getLogger("tunix_like")

MOST_COMPARED = 1_000_000
"""Maximum number of training rows, and of held-out rows, to compare. A row takes about 20 microseconds to parse."""

_warned = contextvars.ContextVar("warned", default=False)


class Overlap(NamedTuple):
    """`both` of `held_out` compared held-out prompts are also among the first `compared` of `rows` training prompts."""

    both: int
    held_out: int
    compared: int
    rows: int


def warn_shared(train: Any, held_out: Any) -> None:
    """Warns if held-out prompts are also in the training data. Does nothing inside `rows_warned_once`."""
    if _warned.get():
        return
    with progress.task("comparing training and evaluation prompts"):
        result = by_first(lambda: shared_prompts(train, held_out))
    if result is None or not (shared := Overlap(*result)).both:
        return
    part = (
        ""
        if shared.compared == shared.rows
        else f" (the first {shared.compared} of its {shared.rows} rows were compared)"
    )
    logger.warning(
        "%d of %d held-out prompts are also in the training data%s: an evaluation on them measures memorised rows. "
        "Remove them from the training rows or from the held-out rows.",
        shared.both, shared.held_out, part,
    )  # fmt: skip


def warn_text_prompts(rows: Any, tokenizer: Tokenizer) -> None:
    """Warns if the first prompt is text and the tokenizer has a chat template, which text does not get. Does nothing
    inside `rows_warned_once`."""
    if _warned.get() or tokenizer.chat_template is None or not isinstance(rows, Sequence | grain.MapDataset):
        return
    row = None
    with contextlib.suppress(UserError, IndexError):  # the first is told elsewhere
        row = rows[0]
    if isinstance(row, Mapping) and isinstance(row.get("prompt"), str):
        logger.warning(
            "the prompts are text, so the model gets them without its chat template, which an instruct model expects: "
            "set data.apply_chat_template=true (in Python: prompts of messages), or false if text is meant."
        )


@contextlib.contextmanager
def rows_warned_once(train: Any, held_out: Any) -> Iterator[None]:
    """Warns once (`warn_shared`) for the block, because SFT and RL use the same rows. The other warnings of this module
    are those of `runs.build.assemble`, which knows the settings of the data."""
    warn_shared(train, held_out)
    token = _warned.set(True)
    try:
        yield
    finally:
        _warned.reset(token)


def shared_prompts(train: Any, held_out: Any) -> Overlap | None:
    """Counts the held-out rows whose prompt and column `hidden` also occur in training. Returns None if there is
    nothing to compare: an iterator can be read only once, and if all training rows have one prompt, prompts do not tell
    problems apart. Rows without a readable prompt are not counted."""
    if not isinstance(train, Sequence | grain.MapDataset) or held_out is None or not len(held_out):
        return None
    held = min(len(held_out), MOST_COMPARED)
    left = Counter(key for i in range(held) if (key := _key(held_out, i)) is not None)
    compared = min(len(train), MOST_COMPARED)
    trained = Counter(key for i in range(compared) if (key := _key(train, i)) is not None)
    if len(trained) == 1 < trained.total():
        return None
    return Overlap(sum(left[key] for key in trained), held, compared, len(train))


def _key(rows: Any, place: int) -> int | None:
    """Returns a 64-bit hash of the columns `prompt` and `hidden` of a row; None for a row without a prompt."""
    try:
        row = rows[place]
    except UserError:
        return None
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if prompt is None:
        return None
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
    return hash((text, repr(row.get(HIDDEN_COLUMN))))
