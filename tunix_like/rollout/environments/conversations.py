"""Renders whole conversations again at each turn, for `environment.history=template`.

Some chat templates rewrite earlier turns when new messages follow (Qwen3 removes their `<think>` blocks). With
`environment.history=template`, the model sees at each turn exactly the rendering of the whole conversation. If the
rendering begins with the tokens that the model has seen and sampled so far, only the remaining tokens are appended to
the row. Otherwise the row is restarted (`types.Reply.restart`): a new segment with the rewritten history follows the
prompt. The cache of the prompt is kept.

Some templates end a prompt with tokens that they change in later turns, such as an opened or empty `<think>` block.
Such tokens are part of the rows, and not of the prompt that all trajectories of a data row share.

The message of a turn contains the decoded text of its sampled tokens. Tool calls and `<think>` blocks in this text are
not parsed, so a malformed call can be rendered too. Rendered tokens are never trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.environments.template_difference import ROLES
from tunix_like.types import Message

_QUESTION: Message = {"role": "user", "content": "Question"}
_NEXT: tuple[Message, ...] = ({"role": "assistant", "content": "A known answer"}, {"role": "user", "content": "Next"})
_NO_LIMIT = 1 << 40

MOST_OPENING = 64
"""Maximum number of tokens at the end of a prompt that a later turn may change."""


@dataclasses.dataclass
class Conversation:
    """The conversation of one trajectory.

    Attributes:
      messages: the messages of the prompt, then the turns and the observations.
      tokens: the tokens that the model sees: the prompt and the current segment.
      prompt: number of tokens at the start of the prompt that later turns do not change.
      rewritten: number of times that the template has rewritten the history.
      restarted: number of times that the row was restarted before the last turn was sampled.
    """

    messages: list[Message]
    tokens: list[int]
    prompt: int
    rewritten: int = 0
    restarted: int = 0

    @property
    def opening(self) -> list[int]:
        """The tokens at the end of the prompt that later turns may change. This value is valid only before the first
        turn."""
        return self.tokens[self.prompt :]

    def copy(self) -> Conversation:
        return Conversation([*self.messages], [*self.tokens], self.prompt)

    def add_turn(self, text: str, tokens: Sequence[int]) -> None:
        """Adds a turn of the policy to `messages` and `tokens`."""
        self.messages.append({"role": "assistant", "content": text})
        self.tokens += [int(i) for i in tokens]
        self.restarted = self.rewritten


class Continued(NamedTuple):
    """How a row continues: the tokens to append, and whether the row is restarted (see `types.Reply`).

    If `tokens` is None, `problem` says why the row cannot continue.
    """

    tokens: list[int] | None
    restart: bool = False
    problem: str | None = None


class Conversations:
    """Renders conversations, and returns how their rows continue.

    Args:
      tokenizer: a tokenizer whose template variables include the tools.
      tools: whether there are tools.

    Raises:
      UserError: the template fails, or a later turn changes the rendered prompt before its last `MOST_OPENING` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, tools: bool):
        self._tokenizer = tokenizer
        for role in ROLES[: 1 + tools]:
            (probe,) = self.begin([([_QUESTION], tokenizer.encode_prompt([_QUESTION], True)[1])])
            probe.add_turn("A known answer", [])
            (found,) = self.continued([(probe, [{"role": role, "content": "Text of a message"}])])
            if found.problem is not None:
                raise UserError(f"environment.history=template: {found.problem} Set environment.history=sampled.")

    def begin(self, prompts: Sequence[tuple[Sequence[Message], Sequence[int]]]) -> list[Conversation]:
        """Returns new conversations for prompts. Each prompt is given by its messages and its tokens.

        Sends one request to the process that renders chat templates.
        """
        rendered = self._tokenizer.render_guarded([[*messages, *_NEXT] for messages, _ in prompts], True)
        return [
            Conversation([*messages], [int(i) for i in tokens], self._kept(tokens, later))
            for (messages, tokens), later in zip(prompts, rendered, strict=True)
        ]

    def _kept(self, tokens: Sequence[int], later: str | UserError) -> int:
        """Returns the number of tokens that a prompt and the rendering `later` have in common at their start.

        Returns the length of the prompt instead if the first token differs, if more than `MOST_OPENING` tokens of the
        prompt follow the common tokens, or if `later` is an error.
        """
        if isinstance(later, UserError):  # `continued` reports this error after a turn
            return len(tokens)
        pairs = zip(tokens, self._tokenizer.encode_guarded(later, _NO_LIMIT), strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return kept if kept and len(tokens) - kept <= MOST_OPENING else len(tokens)

    def continued(self, given: Sequence[tuple[Conversation, Sequence[Message]]]) -> list[Continued]:
        """Adds new messages to conversations whose turn has ended, and returns how their rows continue.

        Sends one request to the process that renders chat templates. A conversation that cannot continue is not
        changed.
        """
        chats = [[*conversation.messages, *new] for conversation, new in given]
        rendered = self._tokenizer.render_guarded(chats, True)
        return [
            self._continue(conversation, chat, text)
            for (conversation, _), chat, text in zip(given, chats, rendered, strict=True)
        ]

    def _continue(self, conversation: Conversation, chat: list[Message], text: str | UserError) -> Continued:
        if isinstance(text, UserError):
            return Continued(None, problem=str(text))
        try:
            ids = self._tokenizer.encode_guarded(text, _NO_LIMIT)
        except UserError as error:
            return Continued(None, problem=str(error))
        seen = conversation.tokens
        if ids[: conversation.prompt] != seen[: conversation.prompt]:
            return Continued(
                None,
                problem="after a later turn, the chat template renders the prompt differently. The trajectories of a "
                "row share their prompt, so its tokens must stay the same.",
            )
        conversation.messages, conversation.tokens = chat, ids
        if ids[: len(seen)] == seen:
            return Continued(ids[len(seen) :])
        conversation.rewritten += 1
        return Continued(ids[conversation.prompt :], restart=True)
