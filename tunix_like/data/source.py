"""What a data source is: rows to train on, rows to evaluate on, and how a row's columns become a prompt.

It knows columns, templates and messages. It does NOT know any file format, any tokenizer's working (chat messages are
handed on as messages and rendered where they are encoded), shuffling or batching.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.errors import UserError
from tunix_like.runtime.untrusted import Filled, fill

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig
    from tunix_like.data.tokenizer import Tokenizer

Record = Mapping[str, Any]
"""A flat row: `prompt` (a string, or a list of messages) and any further columns; `answer` is what SFT trains on."""

SOURCE_COLUMN = "data_source"
"""The column that says which of several sources a row is of."""

REWARD_COLUMN = "source_reward"
"""In a mix of several sources, the column with the name of the reward function that fits the row."""


MOST_GENERATED = 10**9
"""Bytes of rows that are made and kept in memory by a source."""
STRING_BYTES = 60
"""What a Python string and its place in a list take beside its characters."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """The data of one run.

    Attributes:
      train: rows to train on, in a fixed order; never empty.
      eval: held-out rows, none of them in `train`; may be empty.
      tokenizer: the source's own tokenizer, or None where the model's is to be used.
      reward: name of the registered reward function that fits.
      draw: `draw(row, completion)` is a picture of it for the terminal, or None.
      parts: the sources of a mix by label, with the rows that an epoch takes of each; empty for any other source.
    """

    train: Sequence[Record]
    eval: Sequence[Record]
    tokenizer: Tokenizer | None
    reward: str
    draw: Callable[[Record, str], str] | None = None
    parts: Mapping[str, DataSource] = dataclasses.field(default_factory=dict)


class MappedRows(Sequence[Record]):
    """`function(row)` of every row, made when it is asked for; `function` must be picklable for worker processes."""

    def __init__(self, rows: Sequence[Any], function: Callable[[Any], Record]) -> None:
        self._rows, self._function = rows, function

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._function(self._rows[index])


class RowRange(Sequence[Any]):
    """Rows `start` up to (not including) `stop` of other rows, without copying them."""

    def __init__(self, rows: Sequence[Any], start: int, stop: int) -> None:
        self._rows, self._range = rows, range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._rows[i] for i in self._range[index]]
        return self._rows[self._range[index]]


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How the columns of a row become its prompt and its answer.

    Attributes:
      template: Python format string over the columns; None takes the column `prompt` as it is.
      system_prompt: first message; implies messages.
      chat: True makes messages, False text; None leaves messages messages and text text.
      answer: the like of `template` for the column `answer`, in whose place it comes; None leaves that as it is.
    """

    template: str | None
    system_prompt: str | None = None
    chat: bool | None = None
    answer: str | None = None

    @staticmethod
    def of(config: DataConfig, template: str | None) -> PromptFormat:
        """The format that `config` asks for, `template` being the source's default.

        Raises:
          UserError: a template that is no format string over named columns, or keys that contradict each other.
        """
        if config.system_prompt is not None and config.apply_chat_template is False:
            raise UserError("data.system_prompt needs the chat template: drop data.apply_chat_template=false.")
        chosen = template if config.prompt_template is None else config.prompt_template
        for key, each in (("prompt_template", chosen), ("answer_template", config.answer_template)):
            if each is not None:
                _fields(each, key)
        return PromptFormat(chosen, config.system_prompt, config.apply_chat_template, config.answer_template)

    def check(self, row: Record, where: str) -> None:
        """Raises a UserError that names `where` when this row cannot become a prompt, and an answer if asked for."""
        if self.template is None:
            _check_columns(row, ["prompt"], f"{where}: without data.prompt_template a row needs")
        for key, template in (("prompt_template", self.template), ("answer_template", self.answer)):
            if template is not None:
                _check_columns(row, _fields(template, key), f"{where}: data.{key} names")
        try:
            self(row)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def __call__(self, row: Record) -> Record:
        """The row with its `prompt` and `answer` made, both out of the columns it came with; these stay."""
        made = {**row, "prompt": self._prompt(row)}
        # plain text, as what SFT trains on is data whole
        return made if self.answer is None else made | {"answer": str(_filled(self.answer, row, "answer_template"))}

    def _prompt(self, row: Record) -> str | list[Mapping[str, str]]:
        value = row["prompt"] if self.template is None else _filled(self.template, row, "prompt_template")
        if not isinstance(value, str | list):
            raise UserError(f"column 'prompt' must be text or a list of messages, not {type(value).__name__}.")
        if isinstance(value, list):
            if (
                any(not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys() for turn in value)
                or not value
            ):
                raise UserError("column 'prompt' is a list, but not one of messages with 'role' and 'content'.")
            if self.chat is False:
                raise UserError("data.apply_chat_template=false, but column 'prompt' holds messages.")
            if self.system_prompt is not None and value[0]["role"] == "system":
                raise UserError("data.system_prompt is set, but column 'prompt' already opens with a system message.")
        elif self.chat or self.system_prompt is not None:
            value = [{"role": "user", "content": value}]
        if self.system_prompt is not None:
            value = [{"role": "system", "content": self.system_prompt}, *value]
        return value


def _fields(template: str, key: str) -> list[str]:
    """What stands in the braces of a template, without format specs.

    Raises:
      UserError: it is not a format string over named columns.
    """
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise UserError(
            f"data.{key} {template!r} is no Python format string ({error}); write {{column}} for a column and double a "
            "brace that is meant as itself."
        ) from error
    names = [_head(field) for field in fields]
    if any(not name or name.isdigit() for name in names):
        raise UserError(f"data.{key} {template!r} must name its columns, as in '{{question}}'.")
    return list(dict.fromkeys(fields))


def _head(field: str) -> str:
    return field.split(".")[0].split("[")[0]


def _check_columns(row: Record, fields: Collection[str], what: str) -> None:
    """Every field must be a column of the row, or an attribute or item of one."""
    for field in fields:
        if row.get(field) is None and row.get(_head(field)) is None:
            there = sorted(name for name in row if row[name] is not None)
            cut = [name for name in there if re.match(re.escape(field) + "[:!]", name)]
            why = f" In a template a column's name ends at ':' and '!'; rename '{cut[0]}'." if cut else ""
            raise UserError(f"{what} column '{field}'; the row has: {', '.join(there) or 'none'}.{why}")


def _filled(template: str, row: Record, key: str) -> Filled:
    try:
        return fill(template, row)
    except Exception as error:  # a format spec or an attribute that this value does not have
        raise UserError(f"data.{key} {template!r} failed: {type(error).__name__}: {error}") from error


def take(rows: Sequence[Any], size: int | None, key: str) -> Sequence[Any]:
    """The first `size` rows (all when None).

    Raises:
      UserError: fewer rows than `key` asks for.
    """
    if size is not None and size > len(rows):
        raise UserError(f"{key}={size}, but there are only {len(rows)} rows; lower it or leave it unset.")
    return rows if size is None else RowRange(rows, 0, size)


def check_generated(config: DataConfig, rows: int, row_bytes: int) -> None:
    """Raises a UserError where rows that a source makes, of so many bytes each, would fill `MOST_GENERATED`."""
    if rows * row_bytes > MOST_GENERATED:
        raise UserError(
            f"data.train_size and data.eval_size: {rows} generated rows of {config.name} take about "
            f"{rows * row_bytes / 1e9:.3g} GB of memory, and {MOST_GENERATED / 1e9:g} GB are the most; lower them."
        )


def refuse_unread_keys(config: DataConfig, reads: Collection[str]) -> None:
    """Keys that only some sources read must be unset for the others.

    Raises:
      UserError: a key that is set, and that source `config.name` does not read.
    """
    unset: dict[str, Any] = {
        "path": None,
        "split": "train",
        "eval_split": "test",
        "prompt_template": None,
        "answer_template": None,
        "system_prompt": None,
    }
    unset |= {"apply_chat_template": None, "chat_template_args": None}
    unset |= {"maze_size": None, "text_length": None, "seed": 0}
    for key, value in unset.items():
        if key not in reads and getattr(config, key) != value:
            names = ", ".join(f"data.{name}" for name in sorted(reads)) or "none of them"
            raise UserError(f"data.{key} is not read by data.name={config.name} (it reads {names}); remove it.")
