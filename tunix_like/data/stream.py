"""Turns rows into batches of tokenised prompts.

The rows are shuffled by seed (with grain). Overlong prompts are skipped or raise an error. The position in the data can
be saved.

In a run of several processes, each process loads and tokenises a part of the batch. All processes receive the whole
batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain.python as grain
import jax

from tunix_like.config.schema import OVERLONG
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.processes import across_processes
from tunix_like.text.conversations import chat_messages, chat_tools
from tunix_like.text.tokenizer import Tokenizer

logger = logging.getLogger("tunix_like")

SCANNED_ROWS = 20_000
"""Maximum number of rows tokenised before training, to report how many prompts will be skipped."""

_COUNTED = 100_000
"""With `overlong="error"`, prompts of up to this many tokens are not truncated, so the error message can give their
exact length."""


class Prompt(NamedTuple):
    """A rendered and tokenised prompt. `source` is the column `prompt` of its row, `columns` are the other columns.

    `row` and `weight` are those of `types.Problem`."""

    text: str
    tokens: list[int]
    columns: dict[str, Any]
    source: Any = None
    row: int | None = None
    weight: float | None = None


class Skipped(NamedTuple):
    """The number of prompts that will be skipped: `long` (more than `limit` tokens) and `empty` ones among the first
    `scanned` of `rows` rows."""

    rows: int
    scanned: int
    limit: int
    long: int
    empty: int

    @property
    def prompts(self) -> int:
        return self.long + self.empty

    def fitting_batch(self, batch_size: int) -> int:
        """Returns `batch_size`, or with a warning the number of usable rows if this is smaller."""
        usable_rows = self.rows - self.prompts
        if usable_rows < batch_size:
            logger.warning(
                "data.batch_size: %d prompts per step, but there are only %d training rows with a usable prompt; %d "
                "are used", batch_size, usable_rows, usable_rows,
            )  # fmt: skip
        return min(batch_size, usable_rows)

    def warn(self, what: str) -> None:
        """Logs a warning if any of the `what` (training or evaluation) prompts will be skipped."""
        if self.prompts:
            logger.warning("%d %s prompts, %s", self.rows, what, self)

    def __str__(self) -> str:
        scanned = "them" if self.scanned == self.rows else f"the first {self.scanned}"
        counts = ((self.long, f"longer than {self.limit} tokens"), (self.empty, "empty"))
        return ", ".join(f"{count} of {scanned} {what} and skipped" for count, what in counts if count)


def usable(prompt: Prompt, max_prompt_length: int) -> bool:
    return 0 < len(prompt.tokens) <= max_prompt_length


def check_overlong(overlong: str) -> None:
    if overlong not in OVERLONG:
        raise UserError(f"overlong_prompts: unknown value '{overlong}'. {nearest(overlong, OVERLONG)}")


def tokens_to_count(overlong: str, max_prompt_length: int) -> int:
    """Returns the number of tokens above which a prompt may be truncated before its tokens are counted."""
    return max(max_prompt_length, _COUNTED) if overlong == "error" else max_prompt_length


def unusable(length: int, limit: int, row: str, most: int) -> UserError:
    """Returns the error for an empty or overlong prompt of `length` tokens. Above `2 * most` the prompt may have been
    truncated before it was counted."""
    count = f"over {2 * most}" if length > 2 * most else length
    too_long = f"has {count} tokens, but rollout.max_prompt_length is {limit}. Raise it"
    problem = too_long if length else "is empty. Remove the row"
    return UserError(f"{row} (counted from 0): its prompt {problem}, or set data.overlong_prompts=skip.")


def render(row: Any, tokenizer: Tokenizer, most: int | None = None) -> Prompt:
    """Tokenises the `prompt` of a row. Text is encoded unchanged; messages are rendered with the chat template. A
    prompt with more than `most` tokens may be truncated, but still has more than `most`."""
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = f"it has {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
        raise UserError(f"a data row needs a 'prompt' column (text or messages); {has}.")
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, Sequence) and prompt):
        raise UserError(f"a data row's 'prompt' must be text or a list of messages, got {prompt!r:.80}.")
    if not isinstance(prompt, str):
        prompt = chat_messages(prompt, "prompt")
    columns = {name: value for name, value in row.items() if name != "prompt"}
    variables = row_variables(prompt, columns, tokenizer)
    return Prompt(*tokenizer.encode_prompt(prompt, False, most, **variables), columns, prompt)


def row_variables(prompt: Any, columns: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the variables of the chat template that a row gives its prompt: the column `tools`. A prompt of text has
    none, because the template does not render it.

    Raises:
      UserError: the tools have a wrong form, the chat template ignores them, or the environment has tools of its own.
    """
    tools = [] if isinstance(prompt, str) else chat_tools(columns.get("tools"), "column 'tools'")
    if not tools:
        return {}
    if tokenizer.has_tools:
        raise UserError("column 'tools': the environment has tools of its own; remove the column.")
    tokenizer.check_tools("column 'tools'")
    return {"tools": tools}


def check_prompts(
    rows: Sequence[Any] | grain.MapDataset, tokenizer: Tokenizer, max_prompt_length: int, overlong: str, what: str
) -> Skipped:
    """Tokenises up to `SCANNED_ROWS` rows and counts the prompts that are empty or exceed `max_prompt_length` tokens,
    which is an error with `overlong="error"`. Rows that a grain filter removes from a `MapDataset` are None and are
    ignored."""
    check_overlong(overlong)
    if len(rows) == 0:
        raise UserError(f"the {what} data is empty.")
    count = min(len(rows), SCANNED_ROWS)
    most = tokens_to_count(overlong, max_prompt_length)

    lengths = across_processes(range(count), lambda places: _lengths(rows, places, tokenizer, most, what))
    bad = next((i for i, length in enumerate(lengths) if length == 0 or length > max_prompt_length), None)
    if bad is not None and overlong == "error":
        raise unusable(lengths[bad], max_prompt_length, f"{what} row {bad}", most)
    long = sum(length > max_prompt_length for length in lengths)
    empty = lengths.count(0)
    if lengths.count(-1) == count:
        raise UserError(f"the {what} data is empty: its filter removes all of the first {count} rows.")
    if long + empty + lengths.count(-1) == count:
        all_of = f"all {count} {what} prompts" if count == len(rows) else f"the first {count} {what} prompts"
        raise UserError(
            f"{all_of} are longer than rollout.max_prompt_length={max_prompt_length}; raise it."
            if long and not empty
            else f"{all_of} are unusable: {empty} empty, {long} longer than "
            f"rollout.max_prompt_length={max_prompt_length}. Check data.path and data.prompt_template."
        )
    return Skipped(len(rows), count, max_prompt_length, long, empty)


def _lengths(
    rows: Sequence[Any] | grain.MapDataset, places: Sequence[int], tokenizer: Tokenizer, most: int, what: str
) -> list[int]:
    """Returns the number of prompt tokens of the rows at `places`; -1 for rows that a grain filter removed."""
    out = []
    for place in places:
        row = rows[place]
        if row is None and isinstance(rows, grain.MapDataset):
            out.append(-1)
            continue
        try:
            out.append(len(render(row, tokenizer, most).tokens))
        except UserError as error:
            raise UserError(f"{what} row {place}: {error}") from error
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
    """Iterates over batches of `batch_size` prompts of 1 to `max_prompt_length` tokens; drops an incomplete last batch.
    `rows` is a sequence or a grain `MapDataset` (reshuffled each epoch if `shuffle` is True), or a grain `IterDataset`
    or another iterable, which are read in their own order. The position can be saved (`Resumable`) unless `rows` is a
    plain iterable."""
    if isinstance(rows, Sequence | grain.MapDataset):
        source = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
        size = len(rows)
        source = source.map_with_index(lambda place, row: (place % size, row)).seed(seed)
        source = source.shuffle() if shuffle else source
        return SharedBatches(source.repeat(), tokenizer, batch_size, max_prompt_length, size, forever)
    if isinstance(rows, grain.IterDataset):
        prompts = rows.map(lambda row: render(row, tokenizer, max_prompt_length))
        prompts = prompts.filter(lambda prompt: usable(prompt, max_prompt_length))
        return iter(prompts.batch(batch_size, drop_remainder=True, batch_fn=list))
    if isinstance(rows, Iterable):
        return _plain_batches(rows, tokenizer, batch_size, max_prompt_length, forever)
    raise UserError(f"the data must be a sequence, an iterable or a grain dataset, got {type(rows).__name__}.")


def refusing(batches: Iterator[list[Prompt]], overlong: str) -> Iterator[list[Prompt]]:
    """Sets whether unusable prompts raise an error or are skipped; only `SharedBatches` can raise."""
    if isinstance(batches, SharedBatches):
        batches.refuses = overlong == "error"
    return batches


@runtime_checkable
class Resumable(Protocol):
    """An iterator whose position can be saved as a JSON value, such as a `grain.DatasetIterator`."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class SharedBatches(Iterator[list[Prompt]]):
    """Iterates over batches of prompts from randomly accessible rows. The processes of a run divide the rendering among
    themselves.

    The rows are candidates for the batches, in the order of `rows`. Each candidate is rendered by one process. The
    saved position is the index of the next candidate, so it does not depend on the number of processes. A prompt is
    usable if it can be rendered and is neither empty nor overlong. The first row that cannot be rendered is logged.

    Args:
      rows: pairs `(number, row)`, with the index of the row in the data; None in place of a row that a filter removed.
      epoch: number of candidates in an epoch.

    Attributes:
      refuses: whether a row without a usable prompt raises an error instead of being skipped.
      next: index of the next candidate.
      end: index after the last candidate of the current epoch; None if the candidates repeat without end.

    Raises:
      UserError: no candidate of a whole `epoch` is usable; or `refuses` is set and a candidate is not usable (the
        message names the row).
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
        self.rows = rows
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.limit = limit
        self.epoch = epoch
        self.next = 0
        self.end = None if forever else epoch
        self.refuses = self._warned = False

    def __next__(self) -> list[Prompt]:
        batch: list[Prompt] = []
        place = self.next
        while (missing := self.batch_size - len(batch)) > 0:
            candidates = range(place, place + missing if self.end is None else min(place + missing, self.end))
            if not candidates:
                raise StopIteration
            rendered = across_processes(candidates, self._render)
            prompts = (Prompt(*fields) for fields in rendered if fields is not None)
            batch += [prompt for prompt in prompts if usable(prompt, self.limit)]
            place = candidates.stop
            if not batch and place - self.next >= self.epoch + self.batch_size:
                raise UserError(f"none of the {self.epoch} rows has a usable prompt; raise rollout.max_prompt_length.")
        self.next = place
        return batch

    def next_epoch(self) -> None:
        """Skips the remaining rows of the current epoch, if epochs end."""
        if self.end is not None:
            self.next = self.end
            self.end = self.end + self.epoch

    def _render(self, places: Sequence[int]) -> list[Prompt | None]:
        pairs = (self.rows[place] for place in places)
        prompts = [None if pair is None else self._rendered(*pair) for pair in pairs]
        if jax.process_count() > 1:
            for prompt in prompts:
                _check_sendable(prompt)
        return prompts

    def _rendered(self, number: int, row: Any) -> Prompt | None:
        try:
            prompt = render(row, self.tokenizer, self.limit)
        except UserError as error:
            if self.refuses:
                raise UserError(f"training row {number}: {error}") from error
            if not self._warned:
                logger.warning("skipped a row without a usable prompt; further ones are skipped silently: %s", error)
            self._warned = True
            return None
        if self.refuses and not usable(prompt, self.limit):
            raise unusable(len(prompt.tokens), self.limit, f"training row {number}", self.limit)
        return prompt

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}

    def set_state(self, state: Mapping[str, int]) -> None:
        if "next" not in state:
            raise UserError("the data position was saved by an earlier version of tunix_like; start a new run.")
        self.next = int(state["next"])


def _check_sendable(prompt: Prompt | None) -> None:
    for name, value in {} if prompt is None else prompt.columns.items():
        if not _keeps(value):
            raise UserError(
                f"the data column '{name}' contains a {type(value).__name__}, which cannot be sent to the other "
                "processes of this run; make it text, a number, a list of these, or a dict with text as keys."
            )


def _keeps(value: Any) -> bool:
    """Returns whether `value` is unchanged after conversion to JSON and back."""
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
            any_usable = False
            for row in rows:
                prompt = render(row, tokenizer, limit)
                if usable(prompt, limit):
                    any_usable = True
                    yield prompt
            if not (forever and any_usable):
                return

    prompts = endless()
    while len(batch := list(itertools.islice(prompts, batch_size))) == batch_size:
        yield batch
