"""Keeps the history of trajectories and of demonstrations: the messages of a conversation and the exact tokens that
the model sees.

The tokens of a turn stay as they were sampled; they are never decoded and encoded again. With
`environment.history=sampled`, the tokens of an observation are appended to them (`bridge.py`).

Some chat templates rewrite earlier turns when new messages follow (Qwen3 removes their `<think>` blocks). With
`environment.history=template`, the model sees at each turn exactly the rendering of the whole conversation. If the
rendering begins with the tokens that the model has seen and sampled so far, only the remaining tokens are appended to
the completion. Otherwise a new segment of the completion starts (`types.Reply.restart`), which begins with the
rewritten conversation after the prompt. From then on, the model sees only the prompt, whose keys and values are cached,
and this segment. An agent can rewrite a conversation as well (`agents.py`).

The assistant's message of a turn contains the decoded text of the sampled tokens. Tool calls and `<think>` blocks in
this text are not parsed, so the text can contain a malformed tool call. The policy is trained on its sampled tokens
only, and never on rendered tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.environments.bridge import QUESTION, ROLES, Bridge
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Message

NEXT: tuple[Message, ...] = ({"role": "assistant", "content": "A known answer"}, {"role": "user", "content": "Next"})
"""Messages that show which tokens of a prompt the chat template changes in later turns."""

NO_LIMIT = 1 << 40

MOST_OPENING = 64
"""Maximum number of tokens at the end of a prompt that the chat template may change in later turns."""


class Continuation(NamedTuple):
    """How a completion continues after a turn.

    Attributes:
      tokens: the tokens to append.
      restart: whether the model no longer sees the earlier tokens of the completion, but only the prompt and `tokens`
        (see `types.Reply`).
      cut: whether the observation was shortened.
    """

    tokens: list[int]
    restart: bool = False
    cut: bool = False


@dataclasses.dataclass
class History:
    """The history of one trajectory.

    Attributes:
      messages: the messages of the prompt (none if it is text), then the turns and the observations.
      tokens: the tokens that the model sees; only the last one if `whole` is False, to save memory.
      prompt: number of tokens at the start of the prompt that the chat template does not change in later turns. Some
        templates end a prompt with tokens that they change later, such as an opened or empty `<think>` block. Such
        tokens are part of each completion, and not of the prompt that all completions of a problem share.
      rewritten: number of times that earlier turns were rewritten.
      restarted: the value of `rewritten` when the last turn was sampled.
      whole: whether all tokens are kept, which only `environment.history=template` needs.
      variables: variables of the chat template that belong to the row.
    """

    messages: list[Message] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0
    rewritten: int = 0
    restarted: int = 0
    whole: bool = True
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._append(())
        self._continued = bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def opening(self) -> list[int]:
        """The tokens of the prompt after the first `prompt` tokens. This value is valid only before the first turn."""
        return self.tokens[self.prompt :]

    def copy(self) -> History:
        return History([*self.messages], [*self.tokens], self.prompt, whole=self.whole, variables=self.variables)

    def add_turn(self, text: str, tokens: Sequence[int]) -> None:
        if self._continued:  # the turn continues the last message of the prompt
            text = self.messages.pop()["content"] + text
            self._continued = False
        self.messages.append({"role": "assistant", "content": text})
        self._append(tokens)
        self.restarted = self.rewritten

    def add_observation(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        self.messages += messages
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        self.tokens += [int(i) for i in tokens]
        if not self.whole:
            del self.tokens[:-1]

    def replace(self, messages: Sequence[Message], tokens: list[int]) -> Continuation:
        """Replaces the messages and the tokens that the model sees, and returns how the completion continues.

        Raises:
          UserError: the tokens do not begin with the prompt. The history is then unchanged.
        """
        seen = self.tokens
        if tokens[: self.prompt] != seen[: self.prompt]:
            raise UserError(
                "after a later turn, the rendered conversation does not begin with the prompt. The trajectories of a "
                "row share their prompt, so its tokens must stay the same."
            )
        self.messages = [*messages]
        self.tokens = [*tokens]
        if tokens[: len(seen)] == seen:
            return Continuation(tokens[len(seen) :])
        self.rewritten += 1
        return Continuation(tokens[self.prompt :], restart=True)


class Histories:
    """Begins the histories of trajectories and adds observations to them, as the section `environment` says.

    Args:
      tokenizer: a tokenizer whose template variables include the tools, if there are any.
      chat: whether prompts are messages. If False, prompts are plain text.
      eos_ids: the ids that end a turn.

    Raises:
      UserError: prompts are plain text although `environment.history=template` or tools need messages, or the chat
        template cannot be used for several turns (see `Bridge`), or changes tokens of the prompt before its last
        `MOST_OPENING` tokens with `environment.history=template`.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: bool, eos_ids: Sequence[int], tools: bool, config: EnvironmentConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._rewrites = config.history == "template"
        if self._rewrites and not chat:
            raise UserError(
                "environment.history=template: it needs a chat template, but the prompts are plain text; give prompts "
                "as messages (data.apply_chat_template=true), or set environment.history=sampled."
            )
        most = config.max_observation_tokens
        overlong = config.overlong_observation
        self._bridge = Bridge(tokenizer, chat, eos_ids, tools, most_tokens=most, overlong=overlong)
        for role in ROLES[: 1 + tools] if self._rewrites else ():
            history = self.begin([QUESTION], tokenizer.encode_prompt([QUESTION], True)[1])
            history.add_turn("A known answer", [])
            try:
                self._render(history, [{"role": role, "content": "Text of a message"}])
            except UserError as error:
                raise UserError(f"environment.history=template: {error} Set environment.history=sampled.") from None

    def begin(self, prompt: str | Sequence[Message], tokens: Sequence[int], **template_variables: Any) -> History:
        """Returns the history of a trajectory that begins with a prompt of these tokens."""
        messages = [] if isinstance(prompt, str) else [*prompt]
        tokens = [int(i) for i in tokens]
        history = History(messages, tokens, len(tokens), whole=self._rewrites, variables=template_variables)
        if self._rewrites:
            try:
                later = rendered(self._tokenizer, [*history.messages, *NEXT], **history.variables)
            except UserError:  # `add` reports this error after a turn
                return history
            kept = common_beginning(history.tokens, later)
            history.prompt = kept if len(tokens) - kept <= MOST_OPENING else len(tokens)
        return history

    def add(self, history: History, observation: Any) -> Continuation:
        """Adds an observation (text, messages or None) after a turn that the policy has ended.

        Raises:
          EnvironmentMisconfigured: prompts are plain text and the observation is messages.
          UserError: the observation or the conversation cannot be used. The history is then unchanged.
        """
        tokens, messages, cut = self._bridge.bridge(observation, history.tokens[-1])
        if self._rewrites:
            return self._render(history, messages)._replace(cut=cut)
        history.add_observation(messages, tokens)
        return Continuation(tokens, cut=cut)

    def _render(self, history: History, new: Sequence[Message]) -> Continuation:
        messages = [*history.messages, *new]
        return history.replace(messages, rendered(self._tokenizer, messages, **history.variables))


class Demonstration(NamedTuple):
    """The tokens of a completion that others have written, and for each token whether it has a loss, because the policy
    would sample it."""

    tokens: list[int]
    sampled: list[bool]


class Demonstrations:
    """Makes the tokens of conversations for SFT: those that a rollout would have if the policy wrote the assistant's
    messages and an environment sent the other messages, with `environment.history=sampled`.

    Args:
      tokenizer: a tokenizer whose template variables include the tools of an environment.
      chat: whether prompts are messages. If False, prompts and observations are plain text.
      eos_ids: ids that end a turn.
      eos_id: ends a turn if the chat template writes no end-of-sequence token.

    Raises:
      UserError: the chat template cannot be used for several turns (see `TemplateDifference`).
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool, eos_ids: Sequence[int], eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._eos_id = eos_id
        self._bridge = Bridge(tokenizer, chat, eos_ids, most_tokens=NO_LIMIT, overlong="unscored")

    def encode(self, answer: Sequence[Mapping[str, Any]], most: int, **template_variables: Any) -> Demonstration:
        """Returns the first `most` tokens of an answer (see `data.source.chat_answer`).

        Raises:
          UserError: the chat template cannot write one of its messages.
        """
        out = Demonstration([], [])
        difference = self._bridge.difference
        places = [place for place, message in enumerate(answer) if message["role"] == "assistant"]
        for place, following in zip(places, [*places[1:], 0], strict=True):
            turn = self._turn(answer[place], most, template_variables)
            after = []
            if following:
                new: Any = answer[place + 1 : following]
                if difference is None:
                    new = "".join(message["content"] for message in new)
                # No turn ends with the id -1, so that an addition keeps the token with which some templates begin the
                # next message and end the turn.
                after = self._bridge.bridge(new, -1).tokens
            end = self._eos_id if difference is None else difference.end_id
            if end is None:
                end, after = (after[0], after[1:]) if after and after[0] in self._eos_ids else (self._eos_id, after)
            out.tokens.extend([*turn, end, *after])
            out.sampled.extend([True] * (len(turn) + 1) + [False] * len(after))
        return Demonstration(out.tokens[:most], out.sampled[:most])

    def _turn(self, turn: Mapping[str, Any], most: int, variables: Mapping[str, Any]) -> list[int]:
        if self._bridge.difference is None:
            if "tool_calls" in turn:
                raise UserError("an answer has tool calls, but its prompt is text; give the prompt as messages.")
            return self._tokenizer.encode_data(turn["content"], most)
        text = self._bridge.difference.turn(turn, **variables)
        self._tokenizer.check_written([QUESTION, turn], **variables)
        return self._tokenizer.encode_guarded(text, most)


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], /, **template_variables: Any) -> list[int]:
    """Returns the tokens of a rendered conversation, followed by those of the start of the next turn. Control tokens in
    the messages are encoded as plain text."""
    return tokenizer.encode_guarded(tokenizer.render_guarded(messages, True, **template_variables), NO_LIMIT)


def common_beginning(tokens: Sequence[int], later: Sequence[int]) -> int:
    """Returns how many tokens at the start of a prompt are also the first tokens of a longer conversation. If not even
    the first token is the same, the two cannot be compared, and the result is the length of the prompt."""
    return equal_tokens(tokens, later) or len(tokens)


def equal_tokens(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many tokens are the same at the beginning."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
