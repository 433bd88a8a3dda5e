"""Combines several data sources into one, in the proportions that the entries of `data.sources` set.

Every row of the mix gets the label of its source in the column `data_source`. If there are several sources, every row
also gets the name of the default reward function of its source in the column `source_reward`.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix_like.config.schema import DataConfig
from tunix_like.config.sources import Entry, entries
from tunix_like.data.source import REWARD_COLUMN, SOURCE_COLUMN, DataSource, MappedRows, Record, RowSequence
from tunix_like.data.stream import SCANNED_ROWS, render, usable
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer

logger = logging.getLogger("tunix_like")

LONGEST_EPOCH = 50_000_000
"""Maximum number of rows in an epoch of a mix, including repeated rows. The stored order takes 8 bytes per row."""


def load(config: DataConfig, load_one: Callable[[DataConfig], DataSource]) -> DataSource:
    """Loads the sources of `data.sources` with `load_one` and combines them into one. An epoch contains every training
    row at least once; a weight above the share of rows repeats rows. A training row is dropped if its prompt is a
    held-out prompt of another source with the same `name`. The rows of each source are spread evenly, so every prefix
    of an epoch has about the same proportions."""
    mix_entries = entries(config)
    sources = []
    for entry in mix_entries:
        try:
            sources.append(load_one(entry.config))
        except UserError as error:
            raise UserError(f"{entry.place} ('{entry.label}'): {error}") from error
    tokenizer = _tokenizer(mix_entries, sources)
    sources = [
        dataclasses.replace(source, train=_not_held_out(mix_entries, sources, i)) for i, source in enumerate(sources)
    ]
    counts = epoch_counts([len(source.train) for source in sources], [entry.weight for entry in mix_entries])
    parts = {
        entry.label: dataclasses.replace(source, train=Repeated(source.train, count))
        for entry, source, count in zip(mix_entries, sources, counts, strict=True)
    }
    tags = _tags(mix_entries, sources)
    rewards = {source.reward for source in sources}
    return DataSource(
        Interleaved([MappedRows(part.train, tag) for part, tag in zip(parts.values(), tags, strict=True)]),
        Interleaved([MappedRows(part.eval, tag) for part, tag in zip(parts.values(), tags, strict=True)]),
        tokenizer,
        reward=rewards.pop() if len(rewards) == 1 else "by_source",
        draw=_draw(parts),
        parts=parts,
    )


def _tokenizer(mix_entries: Sequence[Entry], sources: Sequence[DataSource]) -> Tokenizer | None:
    """Returns the tokenizer that the sources define (equal for sources of the same `name`); None: that of the model is
    used."""
    with_tokenizer = [i for i, source in enumerate(sources) if source.tokenizer is not None]
    if not with_tokenizer:
        return None
    first = mix_entries[with_tokenizer[0]]
    for i, entry in enumerate(mix_entries):
        if entry.config.name != first.config.name:
            needs = "has a different tokenizer" if i in with_tokenizer else "needs the tokenizer of the model"
            raise UserError(
                f"{first.place} ({first.config.name}) has its own tokenizer, and {entry.place} "
                f"({entry.config.name}) {needs}: all sources of a run share one tokenizer. Remove one of them, or "
                "write the rows of a source that has its own tokenizer to a file and load it with `name: jsonl`."
            )
    return sources[with_tokenizer[0]].tokenizer


def _not_held_out(mix_entries: Sequence[Entry], sources: Sequence[DataSource], number: int) -> Sequence[Record]:
    """Returns the training rows of a source without prompts that another source with the same `name` holds out."""
    entry = mix_entries[number]
    rows = sources[number].train
    same = [i for i, other in enumerate(mix_entries) if other.config.name == entry.config.name and i != number]
    held_out = {repr(sources[i].eval[j]["prompt"]) for i in same for j in range(len(sources[i].eval))}
    if not held_out:
        return rows
    kept = array.array("q", (i for i in range(len(rows)) if repr(rows[i]["prompt"]) not in held_out))
    if not kept:
        raise UserError(
            f"{entry.place} ('{entry.label}'): another source of name={entry.config.name} holds out all of its "
            "training rows; remove one of the two sources, or give them different rows."
        )
    if len(kept) < len(rows):
        logger.warning(
            "%s ('%s'): dropped %d of %d training rows, which another source of name=%s holds out",
            entry.place, entry.label, len(rows) - len(kept), len(rows), entry.config.name,
        )  # fmt: skip
    return rows if len(kept) == len(rows) else MappedRows(kept, rows.__getitem__)


def epoch_counts(sizes: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """Returns how many rows of each source an epoch contains: the smallest counts, proportional to `weights` up to
    rounding, with which every one of the `sizes` rows occurs at least once."""
    shares = [float(size) if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
    scale = max(size / share for size, share in zip(sizes, shares, strict=True))
    if not math.isfinite(scale * sum(shares)) or scale * sum(shares) > LONGEST_EPOCH:
        raise UserError(
            f"data.sources: with these weights, an epoch with every row at least once has {scale * sum(shares):.2g} "
            f"rows; at most {LONGEST_EPOCH} are allowed. Set weights closer to the numbers of rows "
            f"({', '.join(map(str, sizes))}), or lower train_size in the largest source."
        )
    return [max(size, round(scale * share)) for size, share in zip(sizes, shares, strict=True)]


def check_parts(source: DataSource, tokenizer: Tokenizer, max_prompt_length: int, needs_answer: bool) -> None:
    """Checks that each source of a mix has usable prompts (1 to `max_prompt_length` tokens) among its first rows and,
    if the run begins with SFT (`needs_answer`), the column `answer`."""
    for label, part in source.parts.items():
        if needs_answer and "answer" not in part.train[0]:
            raise UserError(
                f"data source '{label}': its rows have no column 'answer', which SFT trains on; set its "
                "answer_template or sft.max_steps=0, or remove the source."
            )
        for rows, what in ((part.train, "training"), (part.eval, "evaluation")):
            count = min(len(rows), SCANNED_ROWS)
            first = (render(rows[i], tokenizer, max_prompt_length) for i in range(count))
            if count and not any(usable(prompt, max_prompt_length) for prompt in first):
                which = f"all of its {what} prompts" if count == len(rows) else f"the first {count} {what} prompts"
                raise UserError(
                    f"data source '{label}': {which} are empty or longer than "
                    f"rollout.max_prompt_length={max_prompt_length}; raise it, or remove the source."
                )


class Repeated(RowSequence):
    """A sequence of `count` rows that repeats `rows` cyclically."""

    def __init__(self, rows: Sequence[Any], count: int) -> None:
        self._rows = rows
        self._count = count

    def __len__(self) -> int:
        return self._count

    def _row(self, index: int) -> Any:
        return self._rows[index % len(self._rows)]


class Interleaved(RowSequence):
    """Interleaves the rows of several sources. Each source keeps its order and is spread evenly: row `j` (from
    0) of a source of `n` rows is placed at the fraction `(j + 1/2) / n` of all rows."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = list(parts)
        self._starts = list(itertools.accumulate((len(part) for part in self._parts), initial=0))
        positions = [(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in self._parts]
        self._order = np.argsort(np.concatenate(positions), kind="stable")  # ties: in the order of the sources

    def __len__(self) -> int:
        return len(self._order)

    def _row(self, index: int) -> Any:
        row = int(self._order[index])
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - self._starts[part]]


@dataclasses.dataclass(frozen=True)
class _Tag:
    """Adds the label, the default reward function and the columns of other sources (None) to a row."""

    label: str
    reward: str | None
    columns: tuple[str, ...]

    def __call__(self, row: Record) -> Record:
        tags = {SOURCE_COLUMN: self.label} | ({} if self.reward is None else {REWARD_COLUMN: self.reward})
        return {**dict.fromkeys(self.columns), **row, **tags}


def _tags(mix_entries: Sequence[Entry], sources: Sequence[DataSource]) -> list[_Tag]:
    """Returns for each source the function that adds columns to its rows. Warns if a label replaces another value."""
    first_rows = [rows[0] for source in sources for rows in (source.train, source.eval) if len(rows)]
    columns = tuple(dict.fromkeys(name for row in first_rows for name in row))
    for entry, source in zip(mix_entries, sources, strict=True):
        if source.train[0].get(SOURCE_COLUMN, entry.label) != entry.label:
            message = "%s: the column '%s' of its rows is replaced by the label '%s'"
            logger.warning(message, entry.place, SOURCE_COLUMN, entry.label)
    several = len(mix_entries) > 1
    return [
        _Tag(entry.label, source.reward if several else None, columns)
        for entry, source in zip(mix_entries, sources, strict=True)
    ]


def _draw(parts: Mapping[str, DataSource]) -> Callable[[Record, str], str] | None:
    """Returns a function that draws a row with `draw` of its source; None if one of the sources has none."""
    draws = {label: part.draw for label, part in parts.items()}
    present = {label: draw for label, draw in draws.items() if draw is not None}
    return None if len(present) < len(draws) else lambda row, completion: present[row[SOURCE_COLUMN]](row, completion)
