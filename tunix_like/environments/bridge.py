"""Makes the tokens between two turns of a trajectory: what an environment added, as the chat template writes it.

A turn ends with an end-of-sequence token that the policy sampled. The tokens that are appended after this token are
called the bridge: the observation of the environment, the text that the chat template puts around the observation, and
the start of the next assistant's turn. Without a chat template, the bridge is the observation.

Observations are untrusted: control tokens that are written in them are encoded as plain text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix_like.errors import EnvironmentMisconfigured, UserError
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.untrusted import Filled, texts
from tunix_like.types import Message

ROLES = ("user", "tool", "system")
"""Roles of the messages that an environment may add."""

QUESTION: Message = {"role": "user", "content": "Question"}
_ANSWERS = ("A known answer", "Another known answer, a longer one.")
_EARLIER: tuple[Message, ...] = (
    {"role": "user", "content": "Earlier question"},
    {"role": "assistant", "content": "Earlier turn"},
)
_HISTORIES: tuple[tuple[Message, ...], ...] = ((QUESTION,), (*_EARLIER, QUESTION))
_PROBE = "Text of a message"

_LONG_TOKEN = 64
"""An observation with more than this many characters per allowed token counts as too long without being tokenised.
Tokenising a text of 10 MB would take seconds."""


class TemplateDifference:
    """Finds the text that a chat template adds for new messages after an assistant's turn (the addition), by rendering
    the messages after a short conversation whose last answer is known.

    The template may render earlier turns differently when messages follow (Qwen3 removes their `<think>` blocks). The
    addition, however, must depend on the new messages only, because it is appended to the tokens as they were sampled.
    `check` checks this once for each role.

    Args:
      tokenizer: a tokenizer whose template variables include the tools, if there are any.
      eos_ids: ids of the tokens that end a turn.

    Attributes:
      end, end_id: the end-of-sequence token that the template writes at the end of an assistant's turn, and its id; an
        empty text and None if the template writes no such token. The policy samples this token, so this token is not
        part of an addition.

    Raises:
      UserError: there is no chat template, or it does not support user messages, tools or messages of tools.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], tools: bool) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._checked: set[str | None] = set()
        if tools:
            tokenizer.check_tools("environment")
        ends = {tokenizer.decode([i], skip_special_tokens=False): i for i in eos_ids}
        self._closing = ""
        self.end, self._before_addition = self._end_of_turn([end for end in ends if end])
        self.end_id = ends.get(self.end) if self.end else None
        for role in ROLES[: 1 + tools]:
            self.check(role)

    def addition(self, messages: Sequence[Message]) -> str:
        """Returns the text that the template adds for new messages and for the start of the next assistant's turn.

        Control tokens in the messages are replaced by placeholders, so the result must be encoded with
        `Tokenizer.encode_guarded`. The roles must have passed `check`.
        """
        return self._after((QUESTION,), _ANSWERS[0], messages)

    def turn(self, message: Mapping[str, Any], **template_variables: Any) -> str:
        """Returns the text of an assistant's message as the policy would write it in a last turn, without the
        end-of-sequence token. The text includes what the template adds, such as tool calls."""
        opened = self._tokenizer.render_guarded([QUESTION], **template_variables)
        text = self._tokenizer.render_guarded([QUESTION, message], False, **template_variables)
        if not (text.startswith(opened) and text.endswith(self._closing)):
            raise UserError(
                "The chat template does not render an assistant's message as the continuation of a prompt; use a "
                "template that begins it as it begins the next turn."
            )
        return text[len(opened) : len(text) - len(self._closing)] + self._before_addition.removesuffix(self.end)

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
        subject = "no message" if role is None else f"a message of role '{role}'"
        new: list[Message] = [] if role is None else [{"role": role, "content": _PROBE}]
        variables: list[dict[str, None]] = [{}, {"tools": None}] if self._tools else [{}]
        try:
            additions = {
                self._after(history, answer, new, **each)
                for history, answer, each in itertools.product(_HISTORIES, _ANSWERS, variables)
            }
        except UserError as error:
            raise UserError(
                f"environment: {subject} cannot follow an assistant's turn. {error} Use a chat template that "
                "supports it, or another kind of observation (text is a user message)."
            ) from None
        if len(additions) > 1:
            raise UserError(
                f"environment: what the chat template adds for {subject} depends on the earlier turns or on the tools, "
                "so it cannot be appended to sampled tokens; use a chat template that only appends to a conversation."
            )
        if role is not None and _PROBE not in next(iter(additions)):
            raise UserError(
                f"environment: the chat template ignores messages of role '{role}'; use a chat template that supports "
                "them, or let the environment answer with text (a user message)."
            )
        self._checked.add(role)

    def _end_of_turn(self, ends: Sequence[str]) -> tuple[str, str]:
        """Returns the end-of-sequence token that the template writes after an answer, and the text from the end of the
        answer to the end of this token. Returns two empty texts if there is no such token."""
        answer: Message = {"role": "assistant", "content": _ANSWERS[0]}
        try:
            text = self._tokenizer.render_guarded([QUESTION, answer], False)
        except UserError as error:
            raise UserError(f"environment: {error}") from None
        if text.count(_ANSWERS[0]) != 1:
            raise UserError(
                f"environment: the chat template writes the text of an assistant's turn {text.count(_ANSWERS[0])} "
                "times; use one that writes it once."
            )
        after = self._closing = text.partition(_ANSWERS[0])[2]
        pattern = "|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True))
        match = re.search(pattern, after) if ends else None
        return (match[0], after[: match.end()]) if match else ("", "")

    def _after(self, history: Sequence[Message], answer: str, new: Sequence[Message], **variables: Any) -> str:
        """Returns the text that the template writes for `new`, which follows the turn `answer` and its end-of-sequence
        token."""
        chat = [*history, {"role": "assistant", "content": answer}, *new]
        # The first occurrence is the known answer. New messages can repeat its text, but they come later.
        _, found, after = self._tokenizer.render_guarded(chat, **variables).partition(answer)
        if not found:
            raise UserError("The chat template does not write the text of the assistant's turn.")
        if not after.startswith(self._before_addition):
            raise UserError("The chat template ends the assistant's turn differently if messages follow.")
        return after[len(self._before_addition) :]


class Bridged(NamedTuple):
    """The tokens to append after a turn.

    Attributes:
      messages: the observation as messages, after shortening.
      cut: whether the observation was shortened.
    """

    tokens: list[int]
    messages: list[dict[str, str]]
    cut: bool = False


class Bridge:
    """Converts observations of environments to the token ids that are appended to trajectories.

    Args:
      tokenizer: a tokenizer whose template variables include the tools, if there are any.
      chat: whether prompts are rendered with the chat template. If False, prompts are plain text.
      eos_ids: the ids that end a turn.
      most_tokens: maximum number of tokens to append, including the tokens that the chat template adds.
      overlong: treatment of observations that need more than `most_tokens` tokens. With `cut`, the text is shortened
        and ends with a note about the omitted characters. With `unscored`, they are an error.

    Attributes:
      difference: finds the text that the chat template adds; None if prompts are plain text.

    Raises:
      UserError: the chat template cannot be used for several turns (see `TemplateDifference`), there are tools but
        prompts are plain text, or even the shortest message takes more than `most_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: bool,
        eos_ids: Sequence[int],
        tools: bool = False,
        *,
        most_tokens: int,
        overlong: str,
    ) -> None:
        if tools and not chat:
            raise UserError(
                "environment: tools need a chat template, but the prompts are plain text; give prompts as messages "
                "(data.apply_chat_template=true)."
            )
        self._tokenizer = tokenizer
        self._most = most_tokens
        self._cuts = overlong == "cut"
        self.difference = TemplateDifference(tokenizer, eos_ids, tools) if chat else None
        if self._tokens([{"role": "user", "content": _mark(10**9) if self._cuts else ""}], -1) is None:
            shortest = "a text that is shortened to nothing" if self._cuts else "an empty message"
            raise UserError(
                f"environment.max_observation_tokens={most_tokens}: {shortest} takes more tokens, including the tokens "
                "of the chat template; increase this value."
            )

    def bridge(self, observation: Any, end: int) -> Bridged:
        """Returns the tokens to append after a turn.

        If prompts are plain text, the text of an observation is appended unchanged. With a chat template, an
        observation that is text becomes a user message. If the observation is None or an empty text, only the start of
        the next assistant's turn is appended. The end-of-sequence token that the template writes after a turn is
        omitted, because the policy has already ended the turn with such a token.

        Args:
          observation: text, messages or None.
          end: the last token of the turn, an end-of-sequence token.

        Raises:
          EnvironmentMisconfigured: prompts are plain text and the observation is messages.
          UserError: this observation cannot be used, e.g. because of a message that the chat template does not support.
        """
        messages = messages_of(observation)
        if self.difference is not None:
            roles: list[str | None] = [message["role"] for message in messages]
            for role in roles or [None]:
                self.difference.check(role)
        elif messages and not isinstance(observation, str):
            raise EnvironmentMisconfigured(
                "environment: an observation is messages, but the prompts are plain text; let the environment "
                "answer with text, or give prompts as messages (data.apply_chat_template=true)."
            )
        if (tokens := self._tokens(messages, end)) is not None:
            return Bridged(tokens, messages)
        if self._cuts and (bridged := self._shortened(messages, end)) is not None:
            return bridged
        raise UserError(f"the observation takes more than {self._most} tokens")

    def _tokens(self, messages: Sequence[Message], end: int) -> list[int] | None:
        """Returns the token ids to append after the end-of-sequence token `end`; None if there are more than
        `most_tokens`."""
        if sum(map(len, texts(messages))) > _LONG_TOKEN * self._most:
            return None
        most = self._most + 1
        if self.difference is None:
            ids = self._tokenizer.encode_data("".join(str(message["content"]) for message in messages), most)
            return ids if len(ids) <= self._most else None
        addition = self.difference.addition(messages)
        # The end token is encoded with the addition, because it can change the tokens after it (e.g. remove spaces).
        ids = self._tokenizer.encode_guarded(self.difference.end + addition, most)
        if self.difference.end_id is None:
            # Some templates end a turn with the start of the next message (GLM: `<|user|>`). The policy has sampled
            # this token.
            ids = ids[1:] if ids[:1] == [end] else ids
        else:
            same = ids[:1] == [self.difference.end_id]
            ids = ids[1:] if same else self._tokenizer.encode_guarded(addition, most)
        return ids if len(ids) <= self._most else None

    def _shortened(self, messages: Sequence[dict[str, str]], end: int) -> Bridged | None:
        """Shortens an observation that has too many tokens. Returns None if even empty texts take too many tokens.

        All texts get the same limit of characters, so only the longest texts are shortened. Bisection finds the largest
        limit for which there are at most `most_tokens` tokens, with a tolerance of three percent.
        """
        best = None
        low = 0
        high = min(max((len(message["content"]) for message in messages), default=0), _LONG_TOKEN * self._most)
        size = 0
        while best is None or high - low > max(1, low // 32):
            limited = [message | {"content": _limited(message["content"], size)} for message in messages]
            tokens = self._tokens(limited, end)
            if tokens is not None:
                low = size
                best = Bridged(tokens, limited, cut=True)
            elif best is None:
                return None
            else:
                high = size
            size = (low + high) // 2
        return best


def with_observation(prompt: str | Sequence[Message], observation: Any) -> str | list[Message]:
    """Adds the first observation of an environment to a prompt, and returns the result.

    Text is appended to a text prompt, or to the content of the last message of a prompt that consists of messages.
    Messages are appended as messages. The observation is untrusted: control tokens that are written in it are encoded
    as plain text.

    Raises:
      UserError: the observation is neither text nor messages, or the observation is messages and the prompt is text.
    """
    new = messages_of(observation)
    if isinstance(prompt, str):
        if not new:
            return prompt
        if not isinstance(observation, str):
            raise UserError(
                "environment: the first observation is messages, but the prompt is text; give prompts as messages "
                "(data.apply_chat_template=true), or let the environment answer with text."
            )
        text = Filled(prompt + observation)
        values = prompt.values if isinstance(prompt, Filled) else []
        text.values = [*values, (len(prompt), len(text))]
        return text
    if not isinstance(observation, str):
        return [*prompt, *new]
    last = dict(prompt[-1])
    if not isinstance(last["content"], str):
        raise UserError(
            "environment: the first observation is text, but the content of the prompt's last message is not; let the "
            "environment answer with messages."
        )
    return [*prompt[:-1], last | {"content": last["content"] + observation}]


def messages_of(observation: Any) -> list[dict[str, str]]:
    """Returns an observation as a list of messages. A text becomes a user message; None and an empty text become an
    empty list.

    Raises:
      UserError: the observation is neither text nor a list of messages, a value in a message is not text, or the role
        of a message is not one of `ROLES`.
    """
    if observation is None or isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    if not isinstance(observation, Sequence):
        raise UserError(f"an observation must be text or a list of messages; it is a {type(observation).__name__}.")
    for message in observation:
        if not isinstance(message, Mapping) or not all(isinstance(text, str) for text in (*message, *message.values())):
            raise UserError(f"a message of an observation must be a mapping of text to text; it is {message!r:.80}.")
        if "content" not in message or message.get("role") not in ROLES:
            raise UserError(
                f"a message of an observation must have a content and a role ({', '.join(ROLES)}); its role is "
                f"{message.get('role')!r:.40}."
            )
    return [dict(message) for message in observation]


def _limited(text: str, size: int) -> str:
    return text if len(text) <= size else text[:size] + _mark(len(text) - size)


def _mark(omitted: int) -> str:
    return f" ... ({omitted} characters omitted)"
