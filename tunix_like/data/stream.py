"""Rows to batches of tokenised prompts: shuffled by seed (through grain), resumable, over-long prompts left out.

Where a run has several processes, each loads and tokenises its share of a batch, and all get the whole batch. This
module knows the tokenizer and the limits of a prompt; it does not know where rows come from or what is done with them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain.python as grain
import jax

from tunix_like.config.schema import OVERLONG
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.processes import spread

logger = logging.getLogger("tunix_like")

SCANNED_ROWS = 20_000
"""Rows tokenised before the start, to say how many prompts are skipped."""

_AT_ONCE = 64
"""Rows that are rendered together."""

_COUNTED = 100_000
"""Tokens, up to twice as many of which are counted in a prompt that is too long and may not be."""


class Prompt(NamedTuple):
    """A row, rendered and tokenised; `columns` are the row without its prompt."""

    text: str
    tokens: list[int]
    columns: dict[str, Any]


class Skipped(NamedTuple):
    """How many prompts of the first `scanned` of `rows` rows are longer than `limit` tokens, or without any."""

    rows: int
    scanned: int
    limit: int
    long: int
    empty: int

    @property
    def prompts(self) -> int:
        return self.long + self.empty

    def warn(self, what: str) -> None:
        """Logs a warning where something was skipped; `what` says which prompts they are (training, evaluation)."""
        if self.prompts:
            logger.warning("%d %s prompts, %s", self.rows, what, self)

    def __str__(self) -> str:
        them = "them" if self.scanned == self.rows else f"the first {self.scanned}"
        found = ((self.long, f"longer than {self.limit} tokens"), (self.empty, "without any token"))
        return ", ".join(f"{count} of {them} {what} and skipped" for count, what in found if count)


def usable(prompt: Prompt, max_prompt_length: int) -> bool:
    """Whether it can be sampled from."""
    return 0 < len(prompt.tokens) <= max_prompt_length


def check_overlong(overlong: str) -> None:
    """Raises UserError where `overlong` is none of the values of `data.overlong_prompts`."""
    if overlong not in OVERLONG:
        raise UserError(f"overlong_prompts: unknown value '{overlong}'. {nearest(overlong, OVERLONG)}")


def tokens_to_count(overlong: str, max_prompt_length: int) -> int:
    """Returns the tokens up to which prompts are counted: more where the error for a long one names its length."""
    return max(max_prompt_length, _COUNTED) if overlong == "error" else max_prompt_length


def unusable(length: int, limit: int, row: str, most: int) -> UserError:
    """Returns the error for a prompt of `length` tokens, 0 or more than `limit`, under `data.overlong_prompts=error`.
    `most` is what `render` was given; a longer prompt was cut."""
    said = f"over {2 * most}" if length > 2 * most else length
    problem = (
        f"has {said} tokens, rollout.max_prompt_length is {limit}. Raise it"
        if length
        else "is empty. Leave the row out"
    )
    return UserError(f"{row} (the first is 0): its prompt {problem}, or set data.overlong_prompts=skip.")


def render(row: Any, tokenizer: Tokenizer, most: int | None = None) -> Prompt:
    """Renders a row's `prompt`: text as it is, messages through the chat template.

    Args:
      most: tokens beyond which the prompt is of no use; of a longer one only some more are made.

    Raises:
      UserError: no `prompt` column, or one that is neither text nor messages, or cannot be encoded.
    """
    (found,) = render_all([row], tokenizer, most)
    if isinstance(found, UserError):
        raise found
    return found


def render_all(rows: Sequence[Any], tokenizer: Tokenizer, most: int | None = None) -> Iterator[Prompt | UserError]:
    """`render` of each row, or what is wrong with it; quicker than one by one."""
    problems = [_problem(row) for row in rows]
    good = [row["prompt"] for row, problem in zip(rows, problems, strict=True) if problem is None]
    encoded = tokenizer.encode_prompts(good, most)
    for row, problem in zip(rows, problems, strict=True):
        found = next(encoded) if problem is None else UserError(problem)
        if isinstance(found, UserError):
            yield found
        else:
            yield Prompt(*found, {name: value for name, value in row.items() if name != "prompt"})


def _problem(row: Any) -> str | None:
    """Why a row has no prompt that could be rendered; None where it has one."""
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = f"it has {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
        return f"a data row needs a 'prompt' column (text or messages); {has}."
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, Sequence) and prompt):
        return f"a data row's 'prompt' must be text or a list of messages, got {prompt!r:.80}."
    return None


def check_prompts(
    rows: Sequence[Any] | grain.MapDataset, tokenizer: Tokenizer, max_prompt_length: int, overlong: str, what: str
) -> Skipped:
    """Tokenises up to `SCANNED_ROWS` rows and counts the prompts longer than `max_prompt_length` tokens, or empty.

    What a grain filter has taken out of a `MapDataset` stands there as None, and is no row.

    Raises:
      UserError: no rows, no prompt that can be used, one that cannot be rendered or (`overlong="error"`) used, naming
        the row.
    """
    check_overlong(overlong)
    if len(rows) == 0:
        raise UserError(f"the {what} data is empty.")
    count = min(len(rows), SCANNED_ROWS)
    most = tokens_to_count(overlong, max_prompt_length)

    lengths = spread(range(count), lambda places: _lengths(rows, places, tokenizer, most, what))
    bad = next((place for place, found in enumerate(lengths) if found == 0 or found > max_prompt_length), None)
    if bad is not None and overlong == "error":
        raise unusable(lengths[bad], max_prompt_length, f"{what} row {bad}", most)
    long, empty = sum(found > max_prompt_length for found in lengths), lengths.count(0)
    if lengths.count(-1) == count:
        raise UserError(f"the {what} data is empty: its filter takes out all of the first {count} rows.")
    if long + empty + lengths.count(-1) == count:
        all_of = f"all {count} {what} prompts" if count == len(rows) else f"the first {count} {what} prompts"
        raise UserError(
            f"{all_of} are longer than rollout.max_prompt_length={max_prompt_length}; raise it."
            if long and not empty
            else f"{all_of} are of no use: {empty} without any token, {long} longer than "
            f"rollout.max_prompt_length={max_prompt_length}. Check data.path and data.prompt_template."
        )
    return Skipped(len(rows), count, max_prompt_length, long, empty)


def _lengths(
    rows: Sequence[Any] | grain.MapDataset, places: Sequence[int], tokenizer: Tokenizer, most: int, what: str
) -> list[int]:
    """Tokens of the prompts of the rows at `places`; -1 where a grain filter has taken the row out.

    Raises:
      UserError: the first prompt that cannot be rendered, with its place.
    """
    out = []
    for start in range(0, len(places), _AT_ONCE):
        held = {place: rows[place] for place in places[start : start + _AT_ONCE]}
        there = [place for place, row in held.items() if row is not None or not isinstance(rows, grain.MapDataset)]
        found = {}
        for place, prompt in zip(there, render_all([held[i] for i in there], tokenizer, most), strict=True):
            if isinstance(prompt, UserError):
                raise UserError(f"{what} row {place}: {prompt}") from prompt
            found[place] = len(prompt.tokens)
        out += [found.get(place, -1) for place in held]
    return out


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
    """Batches of `batch_size` prompts of 1 to `max_prompt_length` tokens; an incomplete last batch is dropped.

    Args:
      rows: a sequence or a grain `MapDataset` (shuffled anew each epoch when `shuffle`), a grain `IterDataset` (as it
        comes), or any other iterable (as it comes; its place cannot be saved).
      forever: start over after each epoch.

    Returns:
      an iterator; a `Resumable` one unless `rows` is a plain iterable.
    """
    if isinstance(rows, Sequence | grain.MapDataset):
        source = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
        source = source.seed(seed)
        source = source.shuffle() if shuffle else source
        return SharedBatches(source.repeat(), tokenizer, batch_size, max_prompt_length, len(rows), forever)
    if isinstance(rows, grain.IterDataset):
        prompts = rows.map(lambda row: render(row, tokenizer, max_prompt_length))
        prompts = prompts.filter(lambda prompt: usable(prompt, max_prompt_length))
        return iter(prompts.batch(batch_size, drop_remainder=True, batch_fn=list))
    if isinstance(rows, Iterable):
        return _plain_batches(rows, tokenizer, batch_size, max_prompt_length, forever)
    raise UserError(f"the data must be a sequence, an iterable or a grain dataset, got {type(rows).__name__}.")


@runtime_checkable
class Resumable(Protocol):
    """An iterator whose place is a JSON value that can be saved; so is a `grain.DatasetIterator`."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class SharedBatches(Iterator[list[Prompt]]):
    """Batches out of rows that can be asked for by number. Every candidate for a batch is rendered by one process; its
    place is the number of the next candidate, whatever the number of processes. A row that the start did not see
    (`SCANNED_ROWS`) and that cannot be rendered is skipped, with a warning of the first one.

    Attributes:
      next: number of the next candidate.
      end: the candidates end there; None: they do not.

    Raises:
      UserError: not one of an `epoch` of candidates is left.
    """

    def __init__(
        self,
        rows: grain.MapDataset,
        tokenizer: Tokenizer,
        batch_size: int,
        limit: int,
        epoch: int,
        forever: bool,
    ):
        self.rows, self.tokenizer, self.batch_size, self.limit, self.epoch = rows, tokenizer, batch_size, limit, epoch
        self.next, self.end = 0, None if forever else epoch
        self._warned = False

    def __next__(self) -> list[Prompt]:
        batch: list[Prompt] = []
        place = self.next
        while (missing := self.batch_size - len(batch)) > 0:
            candidates = range(place, place + missing if self.end is None else min(place + missing, self.end))
            if not candidates:
                raise StopIteration
            found = spread(candidates, self._render)
            prompts = (Prompt(*each) for each in found if each is not None)
            batch += [prompt for prompt in prompts if usable(prompt, self.limit)]
            place = candidates.stop
            if not batch and place - self.next >= self.epoch + self.batch_size:
                raise UserError(
                    f"not one of {self.epoch} rows has a prompt that can be used; raise rollout.max_prompt_length."
                )
        self.next = place
        return batch

    def next_epoch(self) -> None:
        """Goes on with the next epoch, whatever is left of this one."""
        if self.end is not None:
            self.next, self.end = self.end, self.end + self.epoch

    def _render(self, places: Sequence[int]) -> list[Prompt | None]:
        rows = [self.rows[place] for place in places]
        found = render_all([row for row in rows if row is not None], self.tokenizer, self.limit)
        prompts = [None if row is None else self._usable(next(found)) for row in rows]  # None: out by a grain filter
        if jax.process_count() > 1:
            for prompt in prompts:
                _check_sendable(prompt)
        return prompts

    def _usable(self, found: Prompt | UserError) -> Prompt | None:
        if isinstance(found, Prompt):
            return found
        if not self._warned:
            logger.warning("a row is skipped, and so will be others that have no prompt to be used: %s", found)
        self._warned = True
        return None

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}

    def set_state(self, state: Mapping[str, int]) -> None:
        if "next" not in state:
            raise UserError("the place in the data was saved by an earlier version of tunix_like; start a new run.")
        self.next = int(state["next"])


def _check_sendable(prompt: Prompt | None) -> None:
    for name, value in {} if prompt is None else prompt.columns.items():
        if not _keeps(value):
            raise UserError(
                f"the data column '{name}' holds a {type(value).__name__} that cannot be told to the other processes "
                "of this run; make it text, a number, a list of them, or a dict with text as keys."
            )


def _keeps(value: Any) -> bool:
    """Whether JSON gives it back as it was."""
    if isinstance(value, list):
        return all(map(_keeps, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _keeps(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _plain_batches(
    rows: Iterable[Any], tokenizer: Tokenizer, batch_size: int, limit: int, forever: bool
) -> Iterator[list[Prompt]]:
    def endless() -> Iterator[Prompt]:
        while True:
            found = False
            for row in rows:
                prompt = render(row, tokenizer, limit)
                if usable(prompt, limit):
                    found = True
                    yield prompt
            if not (forever and found):
                return

    prompts = endless()
    while len(batch := list(itertools.islice(prompts, batch_size))) == batch_size:
        yield batch
