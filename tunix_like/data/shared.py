"""Prompts that stand both in the held-out rows and in the training rows of a run.

It compares prompts as they stand in the rows, by their hashes. It knows no tokenizer and no file format.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain.python as grain

from tunix_like.errors import UserError
from tunix_like.runtime import progress
from tunix_like.runtime.processes import by_first

logger = logging.getLogger("tunix_like")

MOST_COMPARED = 1_000_000
"""Training rows, and held-out rows, that are compared; a row takes about 20 microseconds, which is to parse it."""


class Shared(NamedTuple):
    """`both` of `held_out` prompts stand among the first `compared` of `rows` training rows."""

    both: int
    held_out: int
    compared: int
    rows: int


def warn_shared(train: Any, held_out: Any) -> None:
    """Logs a warning where held-out prompts stand in the training data. In a run of several processes the first one
    compares."""
    with progress.task("comparing training and evaluation prompts"):
        told = by_first(lambda: shared_prompts(train, held_out))
    if told is None or not (found := Shared(*told)).both:
        return
    part = (
        "" if found.compared == found.rows else f" (of its {found.rows} rows the first {found.compared} were compared)"
    )
    logger.warning(
        "%d of %d held-out prompts stand in the training data, too%s: an evaluation on them measures what was trained "
        "on. Leave them out of one of the two.",
        found.both, found.held_out, part,
    )  # fmt: skip


def shared_prompts(train: Any, held_out: Any) -> Shared | None:
    """Counts the held-out rows whose prompt is the prompt of a training row, character by character.

    Rows without a prompt, and rows that cannot be made, are not counted.

    Args:
      train: a sequence or a grain `MapDataset`. Other data is not read, as it may be readable only once.

    Returns:
      None where there is nothing to compare.
    """
    if not isinstance(train, Sequence | grain.MapDataset) or held_out is None or not len(held_out):
        return None
    held = min(len(held_out), MOST_COMPARED)
    left = Counter(key for i in range(held) if (key := _key(held_out, i)) is not None)
    compared, count = min(len(train), MOST_COMPARED), 0
    for i in range(compared):
        key = _key(train, i)
        if key is not None:
            count += left.pop(key, 0)
    return Shared(count, held, compared, len(train))


def _key(rows: Any, place: int) -> int | None:
    """A hash of the row's prompt, of 64 bits; None for a row without one."""
    try:
        row = rows[place]
    except UserError:
        return None
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if prompt is None:
        return None
    return hash(prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr))
