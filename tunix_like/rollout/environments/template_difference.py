"""Finds the text that a chat template adds for new messages after an assistant's turn, by rendering a known
conversation.

New messages are rendered after a short conversation whose last answer is known. The text after the end of that answer
is called the addition. A trajectory keeps its earlier tokens as they were sampled, and the addition is appended to
these tokens. The template may render earlier turns differently when messages follow (Qwen3 removes their `<think>`
blocks). The addition, however, must depend on the new messages only. `TemplateDifference.check` checks this requirement
once for each role.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.types import Message

ROLES = ("user", "tool", "system")
"""Roles of the messages that an environment may add."""

_ANSWERS = ("A known answer", "Another known answer, a longer one.")
_QUESTION: Message = {"role": "user", "content": "Question"}
_EARLIER: tuple[Message, ...] = (
    {"role": "user", "content": "Earlier question"},
    {"role": "assistant", "content": "Earlier turn"},
)
_HISTORIES: tuple[tuple[Message, ...], ...] = ((_QUESTION,), (*_EARLIER, _QUESTION))
_PROBE = "Text of a message"


class TemplateDifference:
    """Computes the additions of one chat template. An addition is the text that the template adds for new messages.

    Attributes:
      end, end_id: the end-of-sequence token that the template writes at the end of an assistant's turn, and its id; an
        empty text and None if the template writes no such token. The policy samples this token, so this token is not
        part of an addition.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> None:
        """Finds the end of an assistant's turn, and checks that the template supports user messages.

        If there are tools, also checks that the template supports tools and tool messages.

        Args:
          eos_ids: ids of the tokens that end a turn.
          tools: JSON schemas, which the template gets as its variable `tools`. Without tools, the template gets only
            the variables of the tokenizer.

        Raises:
          UserError: there is no chat template, or it cannot be used with these messages or tools.
        """
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._checked: set[str | None] = set()
        if tools:
            check_tools(tokenizer, tools)
        ends = {tokenizer.decode([i], skip_special_tokens=False): i for i in eos_ids}
        self.end, self._before_addition = self._end_of_turn([end for end in ends if end])
        self.end_id = ends.get(self.end) if self.end else None
        self.check("user")
        if tools:
            self.check("tool")

    def additions(self, new: Sequence[Sequence[Message]]) -> Iterator[str | UserError]:
        """Yields, for each trajectory, the text that the template adds for its new messages and for the start of the
        next assistant's turn. Yields an error instead if the template fails on the new messages. Sends one request to
        the process that renders chat templates.

        Args:
          new: the messages of each trajectory, with roles that `check` accepted. Control tokens in the messages are
            replaced by placeholders, so the results must be encoded with `Tokenizer.encode_guarded`.
        """
        return self._after([((_QUESTION,), _ANSWERS[0], messages) for messages in new], self._variables(True))

    def check(self, role: str | None) -> None:
        """Checks, once for each role, that the text which the template adds for a message depends only on this message.

        Args:
          role: one of `ROLES`. None checks the case without a message, in which only the start of the next turn is
            added.

        Raises:
          UserError: the template fails on the message, ignores it, or adds text that depends on the earlier turns or on
            the tools.
        """
        if role in self._checked:
            return
        what = "no message" if role is None else f"a message of role '{role}'"
        new: list[Message] = [] if role is None else [{"role": role, "content": _PROBE}]
        cases = [(history, answer, new) for history, answer in itertools.product(_HISTORIES, _ANSWERS)]
        found: set[str] = set()
        for with_tools in (True, False) if self._tools else (True,):
            for addition in self._after(cases, self._variables(with_tools)):
                if isinstance(addition, UserError):
                    raise UserError(
                        f"environment: {what} cannot follow an assistant's turn. {addition} Use a chat template that "
                        "supports it, or another kind of observation (text is a user message)."
                    )
                found.add(addition)
        if len(found) > 1:
            raise UserError(
                f"environment: what the chat template adds for {what} depends on the earlier turns or on the tools, so "
                "it cannot be appended to sampled tokens; use a chat template that only appends to a conversation."
            )
        if role is not None and _PROBE not in next(iter(found)):
            raise UserError(
                f"environment: the chat template ignores messages of role '{role}'; use a chat template that supports "
                "them, or let the environment answer with text (a user message)."
            )
        self._checked.add(role)

    def _variables(self, with_tools: bool) -> dict[str, Any]:
        return {"tools": self._tools if with_tools else None} if self._tools else {}

    def _end_of_turn(self, ends: Sequence[str]) -> tuple[str, str]:
        """Returns the end-of-sequence token that the template writes after an answer, and the text from the end of the
        answer to the end of this token. Returns two empty texts if there is no such token."""
        answer: Message = {"role": "assistant", "content": _ANSWERS[0]}
        (text,) = self._tokenizer.render_guarded([[_QUESTION, answer]], False, **self._variables(True))
        if isinstance(text, UserError):
            raise UserError(f"environment: {text}")
        if text.count(_ANSWERS[0]) != 1:
            raise UserError(
                f"environment: the chat template writes the text of an assistant's turn {text.count(_ANSWERS[0])} "
                "times; use one that writes it once."
            )
        after = text.partition(_ANSWERS[0])[2]
        pattern = "|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True))
        match = re.search(pattern, after) if ends else None
        return (match[0], after[: match.end()]) if match else ("", "")

    def _after(
        self, cases: Sequence[tuple[Sequence[Message], str, Sequence[Message]]], variables: Mapping[str, Any]
    ) -> Iterator[str | UserError]:
        """Yields, for each of `cases`, the text that the template writes after an assistant's turn and its
        end-of-sequence token, or an error. A case is (earlier messages, text of the assistant's turn, new messages)."""
        chats = [[*history, {"role": "assistant", "content": answer}, *new] for history, answer, new in cases]
        rendered = self._tokenizer.render_guarded(chats, True, **variables)
        for (_, answer, _), text in zip(cases, rendered, strict=True):
            if isinstance(text, UserError):
                yield text
                continue
            # The first occurrence is the known answer. New messages can repeat its text, but they come later.
            _, found, after = text.partition(answer)
            if found and after.startswith(self._before_addition):
                yield after[len(self._before_addition) :]
            else:
                yield UserError(
                    "The chat template ends the assistant's turn differently if messages follow."
                    if found
                    else "The chat template does not write the text of the assistant's turn."
                )


def check_tools(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
    """Checks that a chat template writes the tools into the prompt.

    Raises:
      UserError: there is no chat template, the template fails, or its rendering is the same with and without tools.
    """
    given = [dict(tool) for tool in tools]
    if tokenizer.render([_QUESTION], tools=given) == tokenizer.render([_QUESTION], tools=None):
        raise UserError(
            "environment: the chat template ignores tools, so the model would not know them; write one that renders "
            "`tools` to chat_template.jinja in the model's folder."
        )
