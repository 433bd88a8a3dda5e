"""Defines data sources (rows for training and evaluation) and how the columns of a row become its prompt.

Chat messages are not rendered here. The tokenizer renders them when it encodes a prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from tunix_like.config.sources import OF_THE_RUN
from tunix_like.errors import UserError
from tunix_like.text.conversations import chat_messages
from tunix_like.text.untrusted import Filled, fill

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig
    from tunix_like.text.tokenizer import Tokenizer

Record = Mapping[str, Any]
"""A data row: the column `prompt` (text or a list of messages) and any further columns. SFT trains on `answer`."""

SOURCE_COLUMN = "data_source"
"""The column with the label of the source of a row, in a mix of several sources."""

REWARD_COLUMN = "source_reward"
"""The column with the name of the default reward function of a row's source, in a mix of several sources."""

HIDDEN_COLUMN = "hidden"
"""The column with data that only the environment sees. Two rows with the same prompt but different values in this
column are different rows."""

MOST_GENERATED = 10**9
"""Maximum size in bytes of all rows that a data source generates and keeps in memory."""
STRING_BYTES = 60
"""Overhead in bytes of a Python string and its list entry, in addition to its characters."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """The data of one run.

    Attributes:
      train: rows to train on, in a fixed order; never empty.
      eval: held-out rows for evaluation; may be empty.
      tokenizer: the source's own tokenizer; None: the tokenizer of the model is used.
      chats: whether the prompts are messages, so that a pretrained model reads them with its own tokenizer.
      reward: registered name of the default reward function.
      draw: `draw(row, completion)` returns a picture for the terminal; None: there is no picture.
      parts: the sources of a mix, by label; empty if this data source is not a mix. In `train` of such a source, each
        row occurs as often as in one epoch of the mix.
    """

    train: Sequence[Record]
    eval: Sequence[Record]
    tokenizer: Tokenizer | None
    reward: str
    draw: Callable[[Record, str], str] | None = None
    parts: Mapping[str, DataSource] = dataclasses.field(default_factory=dict)
    chats: bool = False


def with_prompt(row: Record) -> Record:
    """Returns the row with `prompt` and `answer` from the column `messages` (the format of OpenAI and TRL), if it has
    this column and no prompt: the answer begins at the first message of the assistant. Messages in the columns `chosen`
    and `rejected` (TRL's preferences with an implicit prompt) begin with the same messages, which are the prompt."""
    if row.get("prompt") is not None:
        return row
    if row.get("messages") is None:
        return _with_shared_prompt(row) if row.get("chosen") is not None else row
    messages = conversation(row["messages"], "messages")
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        raise UserError("column 'messages' needs a message of another role, followed by one of the assistant.")
    return {**row, "prompt": messages[:first], "answer": chat_answer(messages[first:], "messages")}


def _with_shared_prompt(row: Record) -> Record:
    chosen, rejected = (conversation(row.get(name), name) for name in ("chosen", "rejected"))
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    while shared and not all(len(both) > shared and both[shared]["role"] == "assistant" for both in (chosen, rejected)):
        shared -= 1
    if not shared:
        raise UserError(
            "columns 'chosen' and 'rejected': without a column 'prompt' they must begin with the same messages, which "
            "are the prompt, followed by different ones of the assistant."
        )
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def is_conversation(value: Any) -> bool:
    """Returns whether a column holds a list of messages, and not text or a list of other values."""
    return isinstance(value, list | tuple) and any(isinstance(item, Mapping) and "role" in item for item in value)


def conversation(value: Any, column: str) -> list[dict[str, Any]]:
    """Checks the messages in a column, and returns them in one form (see `chat_messages`)."""
    if not is_conversation(value):
        raise UserError(f"column '{column}' must be a list of messages, got {value!r:.80}.")
    return chat_messages(value, f"column '{column}'")


def chat_answer(value: Any, column: str = "answer") -> list[dict[str, Any]]:
    """Returns `conversation(value, column)`. Raises UserError if it does not begin and end with the assistant."""
    messages = conversation(value, column)
    if not messages[0]["role"] == messages[-1]["role"] == "assistant":
        raise UserError(f"column '{column}': the answer must begin and end with a message of the assistant.")
    return messages


class RowSequence(Sequence[Any]):
    """A sequence whose subclasses implement `_row(index)` for the indices from 0 to its length."""

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return [self._row(i) for i in chosen] if isinstance(chosen, range) else self._row(chosen)

    def _row(self, index: int) -> Any:
        raise NotImplementedError


class MappedRows(RowSequence):
    """Applies `function` to each row on access. `function` must be picklable for worker processes."""

    def __init__(self, rows: Sequence[Any], function: Callable[[Any], Record]) -> None:
        self._rows = rows
        self._function = function

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, index: int) -> Record:
        return self._function(self._rows[index])


class RowRange(RowSequence):
    """A view of the rows from `start` to `stop` (exclusive) of another sequence, without a copy."""

    def __init__(self, rows: Sequence[Any], start: int, stop: int) -> None:
        self._rows = rows
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def _row(self, index: int) -> Any:
        return self._rows[self._range[index]]


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Builds the prompt and the answer of a row from its columns.

    Attributes:
      template: Python format string over the columns; None: use the column `prompt` unchanged, or `messages` (see
        `with_prompt`).
      system_prompt: content of a system message at the start of the prompt. The prompt is then a list of messages.
      chat: whether the prompt is a list of messages (True) or text (False). None: a prompt from `template` is text, and
        the column `prompt` keeps its type.
      answer: Python format string that replaces the column `answer`; None: the column stays unchanged.
    """

    template: str | None
    system_prompt: str | None = None
    chat: bool | None = None
    answer: str | None = None

    @staticmethod
    def of(config: DataConfig, template: str | None) -> PromptFormat:
        """Returns the format of a config. `template` is used if `prompt_template` is unset."""
        if config.system_prompt is not None and config.apply_chat_template is False:
            raise UserError("data.system_prompt needs the chat template; remove data.apply_chat_template=false.")
        chosen = template if config.prompt_template is None else config.prompt_template
        for key, text in (("prompt_template", chosen), ("answer_template", config.answer_template)):
            if text is not None:
                _fields(text, key)
        return PromptFormat(chosen, config.system_prompt, config.apply_chat_template, config.answer_template)

    def check(self, row: Record, where: str) -> None:
        """Checks that the prompt and the answer can be built from the row; a message begins with `where`."""
        if self.template is None and row.get("messages") is None and not is_conversation(row.get("chosen")):
            _check_columns(row, ["prompt"], f"{where}: without data.prompt_template a row needs")
        for key, template in (("prompt_template", self.template), ("answer_template", self.answer)):
            if template is not None:
                _check_columns(row, _fields(template, key), f"{where}: data.{key} names")
        try:
            self(row)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def __call__(self, row: Record) -> Record:
        """Returns the row with its prompt and, if there is an answer template, with its answer. Both are built from the
        original columns."""
        row = with_prompt(row) if self.template is None else row
        result = {**row, "prompt": self._prompt(row)}
        # SFT encodes the whole answer as data, so control tokens in the answer template become ordinary text.
        return result if self.answer is None else result | {"answer": str(_filled(self.answer, row, "answer_template"))}

    def _prompt(self, row: Record) -> str | list[dict[str, Any]]:
        value = row["prompt"] if self.template is None else _filled(self.template, row, "prompt_template")
        if not isinstance(value, str | list):
            raise UserError(f"column 'prompt' must be text or a list of messages, not {type(value).__name__}.")
        if isinstance(value, list):
            value = conversation(value, "prompt")
            if self.chat is False:
                raise UserError("data.apply_chat_template=false, but column 'prompt' contains messages; unset it.")
            if self.system_prompt is not None and value[0]["role"] == "system":
                raise UserError(
                    "data.system_prompt is set, but column 'prompt' already begins with a system message; unset it."
                )
        elif self.chat or self.system_prompt is not None:
            value = [{"role": "user", "content": value}]
        if self.system_prompt is not None:
            value = [{"role": "system", "content": self.system_prompt}, *value]
        return value


def _fields(template: str, key: str) -> list[str]:
    """Returns the fields of a Python format string, such as `question` for `{question:>9}`."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise UserError(
            f"data.{key} {template!r} is not a Python format string ({error}); write {{column}} for a column, and "
            "double a literal brace."
        ) from error
    names = [_head(field) for field in fields]
    if any(not name or name.isdigit() for name in names):
        raise UserError(f"data.{key} {template!r} must name its columns, as in '{{question}}'.")
    return list(dict.fromkeys(fields))


def _head(field: str) -> str:
    return field.split(".")[0].split("[")[0]


def _check_columns(row: Record, fields: Collection[str], what: str) -> None:
    for field in fields:
        if row.get(field) is None and row.get(_head(field)) is None:
            present = sorted(name for name in row if row[name] is not None)
            cut = [name for name in present if re.match(re.escape(field) + "[:!]", name)]
            why = f" In a template, a column name ends at ':' or '!'; rename '{cut[0]}'." if cut else ""
            raise UserError(f"{what} column '{field}'; the row has: {', '.join(present) or 'none'}.{why}")


def _filled(template: str, row: Record, key: str) -> Filled:
    try:
        return fill(template, row)
    except Exception as error:  # a format spec or an attribute that this value does not support
        raise UserError(f"data.{key} {template!r} failed: {type(error).__name__}: {error}") from error


def take(rows: Sequence[Any], size: int | None, key: str) -> Sequence[Any]:
    """Returns the first `size` rows; all rows if `size` is None."""
    if size is not None and size > len(rows):
        raise UserError(f"{key}={size}, but there are only {len(rows)} rows; lower it or unset it.")
    return rows if size is None else RowRange(rows, 0, size)


def check_generated(config: DataConfig, rows: int, row_bytes: int) -> None:
    if rows * row_bytes > MOST_GENERATED:
        raise UserError(
            f"data.train_size and data.eval_size: {rows} generated rows of {config.name} take about "
            f"{rows * row_bytes / 1e9:.3g} GB of memory; the limit is {MOST_GENERATED / 1e9:g} GB. Lower them."
        )


_SHARED_KEYS = frozenset({"name", "sources", *OF_THE_RUN, "train_size", "eval_size"})
"""Keys of the section `data` that do not depend on the data source."""


def refuse_unread_keys(config: DataConfig, reads: Set[str]) -> None:
    for field in dataclasses.fields(config):
        if field.name not in reads | _SHARED_KEYS and getattr(config, field.name) != field.default:
            names = ", ".join(f"data.{name}" for name in sorted(reads)) or "none of them"
            raise UserError(f"data.{field.name} is not read by data.name={config.name} (it reads {names}); remove it.")
