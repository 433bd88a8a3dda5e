"""Encodes the completions that the rows of a data set contain: texts, or messages that begin and end with one of the
assistant. SFT trains on such completions, and preferences compare two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.config.schema import RolloutConfig
from tunix_like.data.source import chat_answer, is_conversation
from tunix_like.data.stream import SCANNED_ROWS, row_variables
from tunix_like.environments.history import Demonstration, Demonstrations
from tunix_like.errors import UserError
from tunix_like.runtime import progress
from tunix_like.text.tokenizer import Tokenizer


class Answers:
    """Encodes completions with an end-of-sequence token, cut to `rollout.max_tokens_to_generate` tokens."""

    def __init__(self, tokenizer: Tokenizer, rollout: RolloutConfig) -> None:
        self.tokenizer = tokenizer
        self._limit = rollout.max_tokens_to_generate
        # The tokenizer's own end-of-sequence token ends a turn of its chat template, and always ends a completion.
        default = tokenizer.eos_ids[:1] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.eos_ids = rollout.eos_tokens or tokenizer.eos_ids
        self.eos_id = (rollout.eos_tokens or default)[0]
        self._demonstrations: dict[bool, Demonstrations] = {}

    def encode(self, prompt: Any, answer: Any, columns: Mapping[str, Any]) -> Demonstration:
        """Returns the tokens of a completion of `prompt` (text or messages, before rendering). `columns` are the other
        ones of its row."""
        if is_conversation(answer):
            return self._demonstrated(prompt, chat_answer(answer), columns)
        tokens = [*self.tokenizer.encode_data(answer, self._limit), self.eos_id][: self._limit]
        return Demonstration(tokens, [True] * len(tokens))

    def _demonstrated(
        self, prompt: Any, answer: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]
    ) -> Demonstration:
        chat = not isinstance(prompt, str)
        if chat not in self._demonstrations:
            self._demonstrations[chat] = Demonstrations(self.tokenizer, chat, self.eos_ids, self.eos_id)
        variables = row_variables(prompt, columns, self.tokenizer)
        return self._demonstrations[chat].encode(answer, self._limit, **variables)

    def check(
        self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], who: str, what: str = "training"
    ) -> bool:
        """Checks the completions in `columns` of all rows, and encodes those of messages in the first `SCANNED_ROWS`
        rows. Returns whether any of them is messages, so that not all of its tokens have a loss.

        Args:
          who, what: what needs the columns, and the name of the rows, for error messages.
        """
        several_turns = False
        with progress.task("checking answers", len(rows)) as advance:
            for number in range(len(rows)):
                row = rows[number]
                advance(1)
                for column in columns:
                    if not is_conversation(row.get(column)):
                        _check_text(row, column, number, who, what)
                        continue
                    several_turns = True
                    try:
                        answer = chat_answer(row[column], column)
                        if number < SCANNED_ROWS:
                            self._demonstrated(row.get("prompt"), answer, row)
                    except UserError as error:
                        raise UserError(f"{what} row {number} (counted from 0): {error}") from error
        return several_turns


def _check_text(row: Mapping[str, Any], column: str, number: int, who: str, what: str) -> None:
    answer = row.get(column)
    if not isinstance(answer, str) or not answer:
        cure = " data.answer_template='{answer}' converts numbers to text." if column == "answer" else ""
        raise UserError(
            f"{who} text or messages in the '{column}' column; {what} row {number} of prompt "
            f"{row.get('prompt')!r:.60} has {answer!r:.60}.{cure}"
        )
