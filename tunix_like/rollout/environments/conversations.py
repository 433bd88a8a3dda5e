"""Renders the whole conversation again at each turn, for `environment.history=template`.

Some chat templates rewrite earlier turns when new messages follow (Qwen3 removes their `<think>` blocks). With
`environment.history=template`, the model sees at each turn exactly the rendering of the whole conversation. If the
rendering begins with the tokens that the model has seen and sampled so far, only the remaining tokens are appended to
the completion. Otherwise a new segment of the completion starts (`types.Reply.restart`), which begins with the
rewritten conversation after the prompt. From then on, the model sees only the prompt, whose keys and values are cached,
and this segment.

Some templates end a prompt with tokens that they change in later turns, such as an opened or empty `<think>` block.
Such tokens are part of each completion, and not part of the prompt that all completions of a problem share.

The assistant's message of a turn contains the decoded text of the sampled tokens. Tool calls and `<think>` blocks in
this text are not parsed, so the text can contain a malformed tool call. The policy is trained on its sampled tokens
only, and never on rendered tokens.
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
"""Maximum number of tokens at the end of a prompt that the chat template may change in later turns."""


@dataclasses.dataclass
class Conversation:
    """The conversation of one trajectory.

    Attributes:
      messages: the messages of the prompt, then the turns and the observations.
      tokens: the tokens that the model sees: the last rendering of the conversation, and the turn that was sampled
        after it.
      prompt: number of tokens at the start of the prompt that the chat template does not change in later turns.
      rewritten: number of times that the chat template has rewritten earlier turns.
      restarted: the value of `rewritten` when the last turn was sampled.
    """

    messages: list[Message]
    tokens: list[int]
    prompt: int
    rewritten: int = 0
    restarted: int = 0

    @property
    def opening(self) -> list[int]:
        """The tokens at the end of the prompt that the chat template may change in later turns. This value is valid
        only before the first turn."""
        return self.tokens[self.prompt :]

    def copy(self) -> Conversation:
        return Conversation([*self.messages], [*self.tokens], self.prompt)

    def add_turn(self, text: str, tokens: Sequence[int]) -> None:
        """Adds a turn of the policy to the messages and the tokens of the conversation."""
        self.messages.append({"role": "assistant", "content": text})
        self.tokens += [int(i) for i in tokens]
        self.restarted = self.rewritten


class Continued(NamedTuple):
    """How a completion continues after a turn.

    Attributes:
      tokens: the tokens to append; None if the completion cannot continue.
      restart: whether the model no longer sees the earlier tokens of the completion, but only the prompt and `tokens`
        (see `types.Reply`).
      problem: why the completion cannot continue; None if `tokens` is not None.
    """

    tokens: list[int] | None
    restart: bool = False
    problem: str | None = None


class Conversations:
    """Renders the turns of conversations with the chat template, and returns the tokens that each turn appends.

    Args:
      tokenizer: a tokenizer whose template variables include the tools.
      tools: whether there are tools.

    Raises:
      UserError: the chat template fails, or a later turn changes tokens of the prompt before its last `MOST_OPENING`
        tokens.
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
        """Returns a new conversation for each prompt. Each prompt is given by its messages and its tokens.

        Sends one request to the process that renders chat templates.
        """
        rendered = self._tokenizer.render_guarded([[*messages, *_NEXT] for messages, _ in prompts], True)
        return [
            Conversation([*messages], [int(i) for i in tokens], self._kept(tokens, later))
            for (messages, tokens), later in zip(prompts, rendered, strict=True)
        ]

    def _kept(self, tokens: Sequence[int], later: str | UserError) -> int:
        """Returns how many tokens at the start of a prompt the chat template does not change in later turns.

        Returns the length of the prompt if the template changes the first token or more than the last `MOST_OPENING`
        tokens, or if `later` is an error.

        Args:
          tokens: the tokens of the prompt.
          later: the rendering of the prompt with two further messages.
        """
        if isinstance(later, UserError):  # `continued` reports this error after a turn
            return len(tokens)
        pairs = zip(tokens, self._tokenizer.encode_guarded(later, _NO_LIMIT), strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return kept if kept and len(tokens) - kept <= MOST_OPENING else len(tokens)

    def continued(self, given: Sequence[tuple[Conversation, Sequence[Message]]]) -> list[Continued]:
        """Adds new messages to conversations after a turn has ended, and returns how their completions continue.

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
