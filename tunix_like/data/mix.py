"""Several data sources as one: the rows of all, in the shares that the entries of `data.sources` ask for.

Every row says in the column `data_source` which entry it is of, and in `source_reward` which reward function fits it.
This module knows how sources are put together; it does NOT know what any of them holds, or any estimator.
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
from tunix_like.data.entries import Entry, entries
from tunix_like.data.source import REWARD_COLUMN, SOURCE_COLUMN, DataSource, MappedRows, Record
from tunix_like.data.stream import SCANNED_ROWS, render, usable
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rewards import check_arguments, resolve
from tunix_like.types import RewardFunction

logger = logging.getLogger("tunix_like")

LONGEST_EPOCH = 50_000_000
"""Rows that one pass over a mix may have, repeats included: their order is held in memory, at 8 bytes a row."""


def load(config: DataConfig, load_one: Callable[[DataConfig], DataSource]) -> DataSource:
    """The sources of `data.sources` as one.

    An epoch has every training row at least once, and rows of a source with a larger weight than its number of rows
    gives it again. Training rows whose prompt another source of the same name holds out are left out. Rows stand
    evenly spread, so that any beginning of them has the shares of the whole.

    Args:
      load_one: loads the source of one entry.

    Raises:
      UserError: an entry that is wrong (see `entries`) or whose rows are, named; sources that need different
        tokenizers; weights that make an epoch longer than `LONGEST_EPOCH`.
    """
    found, sources = entries(config), []
    for entry in found:
        try:
            sources.append(load_one(entry.config))
        except UserError as error:
            raise UserError(f"{entry.place} ('{entry.label}'): {error}") from error
    tokenizer = _tokenizer(found, sources)
    sources = [dataclasses.replace(each, train=_not_held_out(found, sources, i)) for i, each in enumerate(sources)]
    counts = epoch_counts([len(each.train) for each in sources], [entry.weight for entry in found])
    parts = {
        entry.label: dataclasses.replace(each, train=Repeated(each.train, count))
        for entry, each, count in zip(found, sources, counts, strict=True)
    }
    tags = _tags(found, sources)
    rewards = {each.reward for each in sources}
    return DataSource(
        Interleaved([MappedRows(part.train, tag) for part, tag in zip(parts.values(), tags, strict=True)]),
        Interleaved([MappedRows(part.eval, tag) for part, tag in zip(parts.values(), tags, strict=True)]),
        tokenizer,
        reward=rewards.pop() if len(rewards) == 1 else "by_source",
        draw=_draw(parts),
        parts=parts,
    )


def _tokenizer(found: Sequence[Entry], sources: Sequence[DataSource]) -> Tokenizer | None:
    """The one tokenizer of a run. Sources of one name bring the same one."""
    bringing = [i for i, each in enumerate(sources) if each.tokenizer is not None]
    if not bringing:
        return None
    first = found[bringing[0]]
    for i, entry in enumerate(found):
        if entry.config.name != first.config.name:
            needs = "brings another one" if i in bringing else "needs that of the model"
            raise UserError(
                f"{first.place} ({first.config.name}) brings its own tokenizer, and {entry.place} "
                f"({entry.config.name}) {needs}: all sources of a run are read by one. Leave one of them out, or write "
                "the rows of a source that brings its own to a file and name that with `name: jsonl`."
            )
    return sources[bringing[0]].tokenizer


def _not_held_out(found: Sequence[Entry], sources: Sequence[DataSource], number: int) -> Sequence[Record]:
    """The training rows of a source, less those that another source of the same name evaluates on.

    Raises:
      UserError: none is left.
    """
    entry, rows = found[number], sources[number].train
    same = [i for i, other in enumerate(found) if other.config.name == entry.config.name and i != number]
    held_out = {repr(sources[i].eval[j]["prompt"]) for i in same for j in range(len(sources[i].eval))}
    if not held_out:
        return rows
    kept = array.array("q", (i for i in range(len(rows)) if repr(rows[i]["prompt"]) not in held_out))
    if not kept:
        raise UserError(
            f"{entry.place} ('{entry.label}'): another source of name={entry.config.name} holds out all of its "
            "training rows; leave one of the two out, or give them rows of their own."
        )
    if len(kept) < len(rows):
        logger.warning(
            "%s ('%s'): %d of its %d training rows are held out by another source of name=%s, and are left out",
            entry.place, entry.label, len(rows) - len(kept), len(rows), entry.config.name,
        )  # fmt: skip
    return rows if len(kept) == len(rows) else MappedRows(kept, _Pick(rows))


def epoch_counts(sizes: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """Rows of each source in an epoch: proportional to the weights to within a row, each at least its size, as few as
    that allows; the sizes themselves without weights.

    Raises:
      UserError: more than `LONGEST_EPOCH` of them.
    """
    known = [float(size) if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
    scale = max(size / weight for size, weight in zip(sizes, known, strict=True))
    if not math.isfinite(scale * sum(known)) or scale * sum(known) > LONGEST_EPOCH:
        raise UserError(
            f"data.sources: with these weights, an epoch that has every row once has {scale * sum(known):.2g} rows; "
            f"at most {LONGEST_EPOCH} are possible. Bring the weights nearer to the numbers of rows "
            f"({', '.join(map(str, sizes))}), or lower train_size in the largest source."
        )
    return [max(size, round(scale * weight)) for size, weight in zip(sizes, known, strict=True)]


def check_parts(source: DataSource, tokenizer: Tokenizer, max_prompt_length: int, needs_answer: bool) -> None:
    """What is checked of a run's rows as a whole, for each source of a mix by itself.

    Args:
      needs_answer: the run begins with supervised fine-tuning.

    Raises:
      UserError: naming a source without a prompt that fits, or without the column that fine-tuning trains on.
    """
    for label, part in source.parts.items():
        if needs_answer and "answer" not in part.train[0]:
            raise UserError(
                f"data source '{label}': its rows have no column 'answer', which SFT trains on; set its "
                "answer_template or sft.max_steps=0, or leave the source out."
            )
        for rows, what in ((part.train, "training"), (part.eval, "evaluation")):
            count = min(len(rows), SCANNED_ROWS)
            first = (render(rows[i], tokenizer, max_prompt_length) for i in range(count))
            if count and not any(usable(prompt, max_prompt_length) for prompt in first):
                them = f"all of its {what} prompts" if count == len(rows) else f"the first {count} {what} prompts"
                raise UserError(
                    f"data source '{label}': {them} are empty or longer than "
                    f"rollout.max_prompt_length={max_prompt_length}; raise it, or leave the source out."
                )


def check_rewards(source: DataSource, functions: Sequence[tuple[str, RewardFunction, float]]) -> None:
    """Raises a UserError naming a source of a mix whose rows lack a column that a reward function (or, for `by_source`,
    the source's own) asks for: in the mix they would have None there."""
    for label, part in source.parts.items():
        columns = [*(name for name in part.train[0] if name != "prompt"), SOURCE_COLUMN, REWARD_COLUMN]
        asked = [(name, resolve(part.reward) if name == "by_source" else each, w) for name, each, w in functions]
        try:
            check_arguments(asked, columns)
        except UserError as error:
            raise UserError(f"data source '{label}': {error}") from error


class Repeated(Sequence[Any]):
    """The first `count` rows of other rows said over and over."""

    def __init__(self, rows: Sequence[Any], count: int) -> None:
        self._rows, self._range = rows, range(count)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in self._range[index]]
        return self._rows[self._range[index] % len(self._rows)]


class Interleaved(Sequence[Any]):
    """All rows of several sources, each source's in its own order and evenly spread: its row `j` of `n` stands about
    `(j + 1/2) / n` of the way down."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = list(parts)
        self._starts = list(itertools.accumulate((len(part) for part in self._parts), initial=0))
        places = [(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in self._parts]
        self._order = np.argsort(np.concatenate(places), kind="stable")  # equal places: in the order of the sources

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self._order[index])
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - self._starts[part]]


@dataclasses.dataclass(frozen=True)
class _Tag:
    """Completes a row of a mix: every column that any source has (None where it has not), and what the row is of."""

    label: str
    reward: str | None
    columns: tuple[str, ...]

    def __call__(self, row: Record) -> Record:
        own = {SOURCE_COLUMN: self.label} | ({} if self.reward is None else {REWARD_COLUMN: self.reward})
        return {**dict.fromkeys(self.columns), **row, **own}


@dataclasses.dataclass(frozen=True)
class _Pick:
    """Row `i` of other rows."""

    rows: Sequence[Record]

    def __call__(self, index: int) -> Record:
        return self.rows[index]


def _tags(found: Sequence[Entry], sources: Sequence[DataSource]) -> list[_Tag]:
    """What completes the rows of each source. Warns where a label takes the place of a column of theirs."""
    shown = [rows[0] for each in sources for rows in (each.train, each.eval) if len(rows)]
    columns = tuple(dict.fromkeys(name for row in shown for name in row))
    for entry, each in zip(found, sources, strict=True):
        if each.train[0].get(SOURCE_COLUMN, entry.label) != entry.label:
            message = "%s: its rows have a column '%s', which is replaced by the label '%s'"
            logger.warning(message, entry.place, SOURCE_COLUMN, entry.label)
    several = len(found) > 1
    return [
        _Tag(entry.label, each.reward if several else None, columns) for entry, each in zip(found, sources, strict=True)
    ]


def _draw(parts: Mapping[str, DataSource]) -> Callable[[Record, str], str] | None:
    """A picture by the row's own source, where all of them can be drawn."""
    draws = {label: part.draw for label, part in parts.items()}
    known = {label: draw for label, draw in draws.items() if draw is not None}
    return None if len(known) < len(draws) else lambda row, completion: known[row[SOURCE_COLUMN]](row, completion)
