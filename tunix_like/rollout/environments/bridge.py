"""Makes the tokens between two turns of a trajectory.

A trajectory is one sequence of token ids. Sampled tokens are never decoded and encoded again (`conversations.py` is an
exception). A turn ends with an end-of-sequence token that the policy sampled. The tokens that are appended after this
token are called the bridge: the observation of the environment, the text that the chat template puts around the
observation, and the start of the next assistant's turn. Without a chat template, the bridge is the observation.

Observations are untrusted: control tokens that are written in them are encoded as plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.environments.template_difference import ROLES, TemplateDifference
from tunix_like.runtime.untrusted import Filled, texts
from tunix_like.types import Message

_LONG_TOKEN = 64
"""An observation with more characters than this number times `most_tokens` (see `make_bridge`) counts as too long
without being tokenised. Tokenising a text of 10 MB would take seconds."""


class Bridged(NamedTuple):
    """The tokens to append to a trajectory after a turn: the observation of the environment as token ids.

    Attributes:
      tokens: token ids; None if the observation cannot be used. The trajectory then ends and is unscored.
      cut: whether the observation was shortened.
      problem: why the observation cannot be used; None if the observation can be used.
      chat: the messages of the observation, after shortening.
    """

    tokens: list[int] | None
    cut: bool = False
    problem: str | None = None
    chat: Sequence[Message] = ()


class _Pending(NamedTuple):
    """An observation that is not tokenised yet: its index, its messages, and the last token of the preceding turn."""

    place: int
    chat: list[dict[str, str]]
    end: int

    def limited(self, size: int) -> _Pending:
        """Returns the observation with each text of more than `size` characters cut to `size` characters, followed by
        the number of omitted characters."""
        return self._replace(chat=[message | {"content": _limited(message["content"], size)} for message in self.chat])


class Bridge:
    """Converts observations of environments to the token ids that are appended to trajectories. `make_bridge` makes
    objects of this class."""

    def __init__(
        self, tokenizer: Tokenizer, difference: TemplateDifference | None, most_tokens: int, overlong: str
    ) -> None:
        """Checks that the shortest message needs at most `most_tokens` tokens. `make_bridge` describes `most_tokens`
        and `overlong`. `difference` computes the text that the chat template adds; None if prompts are plain text."""
        self._tokenizer, self._difference = tokenizer, difference
        self._most, self._cuts = most_tokens, overlong == "cut"
        self._check_room()

    def tokens(self, observations: Sequence[Any], ends: Sequence[int]) -> list[Bridged]:
        """Returns the tokens to append after one turn of each trajectory.

        All observations are sent in one request to the process that renders chat templates. If some observations must
        be shortened, about ten more requests follow.

        If prompts are plain text, the text of an observation is appended unchanged. With a chat template, an
        observation that is text becomes a user message. If the observation is None or an empty text, only the start of
        the next assistant's turn is appended. The end-of-sequence token that the template writes after a turn is
        omitted, because the policy has already ended the turn with such a token.

        Args:
          observations: one per trajectory, as the environments returned them: text, messages or None.
          ends: the last token of each turn, an end-of-sequence token.

        Raises:
          UserError: prompts are plain text and observations are messages. Other errors concern a single observation,
            such as a message that the chat template does not support. They are not raised, but reported in
            `Bridged.problem`.
        """
        results: dict[int, Bridged] = {}
        pending: list[_Pending] = []
        for place, (observation, end) in enumerate(zip(observations, ends, strict=True)):
            try:
                chat = _messages(observation)
            except UserError as error:
                results[place] = Bridged(None, problem=str(error))
                continue
            if chat and self._difference is None and not isinstance(observation, str):
                raise UserError(
                    "environment: an observation is messages, but the prompts are plain text; let the environment "
                    "answer with text, or give prompts as messages (data.apply_chat_template=true)."
                )
            pending.append(_Pending(place, chat, end))
        for each in pending:
            if (problem := self._role_problem(each)) is not None:
                results[each.place] = Bridged(None, problem=problem)
        pending = [each for each in pending if each.place not in results]
        overlong = []
        for each, ids in zip(pending, self._encoded(pending), strict=True):
            if ids is None and self._cuts:
                overlong.append(each)
            else:
                results[each.place] = self._bridged(ids, each)
        for each, (shorter, ids) in zip(overlong, self._shortened(overlong), strict=True):
            results[each.place] = self._bridged(ids, shorter, cut=isinstance(ids, list))
        return [results[place] for place in range(len(observations))]

    def _bridged(self, ids: list[int] | UserError | None, pending: _Pending, cut: bool = False) -> Bridged:
        if ids is None:
            return Bridged(None, problem=f"the observation takes more than {self._most} tokens")
        return Bridged(None, problem=str(ids)) if isinstance(ids, UserError) else Bridged(ids, cut, chat=pending.chat)

    def _check_room(self) -> None:
        """Raises UserError if even the shortest message needs more than `most_tokens` tokens. With `overlong=unscored`,
        the shortest message has no text. With `overlong=cut`, its text is the note about omitted characters."""
        text = _mark(10**9) if self._cuts else ""
        (ids,) = self._encoded([_Pending(0, [{"role": "user", "content": text}], -1)])
        if ids is None:
            what = "a text that is shortened to nothing" if self._cuts else "an empty message"
            raise UserError(
                f"environment.max_observation_tokens={self._most}: {what} takes more tokens, including the tokens "
                "of the chat template; increase this value."
            )

    def _role_problem(self, pending: _Pending) -> str | None:
        """Returns the reason why the chat template does not support the messages of an observation. Returns None if the
        template supports all messages of the observation."""
        try:
            roles: list[str | None] = [message["role"] for message in pending.chat]
            for role in roles or [None]:
                if self._difference is not None:
                    self._difference.check(role)
        except UserError as error:
            return str(error)
        return None

    def _encoded(self, pending: Sequence[_Pending]) -> list[list[int] | UserError | None]:
        """Returns for each observation the token ids to append. Returns the error instead if the observation causes an
        error, and None if there are more than `most_tokens` ids."""
        most = _LONG_TOKEN * self._most
        tried = [sum(map(len, texts(each.chat))) <= most for each in pending]
        chats = [each.chat for each, fits in zip(pending, tried, strict=True) if fits]
        additions = self._additions(chats)
        return [
            self._encode(next(additions), each.end) if fits else None for each, fits in zip(pending, tried, strict=True)
        ]

    def _additions(self, chats: Sequence[list[dict[str, str]]]) -> Iterator[str | UserError]:
        if self._difference is not None:
            return self._difference.additions(chats)
        return iter(["".join(message["content"] for message in chat) for chat in chats])

    def _encode(self, addition: str | UserError, end: int) -> list[int] | UserError | None:
        if isinstance(addition, UserError):
            return addition
        try:
            ids = self._ids(addition, end)
        except UserError as error:
            return error
        return ids if len(ids) <= self._most else None

    def _ids(self, addition: str, end: int) -> list[int]:
        """Returns the token ids of the text `addition`, which follows the end-of-sequence token `end`. A result with
        more than `most_tokens` ids can be incomplete at its end, because the caller does not use it."""
        if self._difference is None:
            return self._tokenizer.encode_data(addition, self._most + 1)
        if self._difference.end_id is None:
            ids = self._tokenizer.encode_guarded(addition, self._most + 1)
            # Some templates end a turn with the start of the next message (GLM: `<|user|>`). The policy has sampled
            # this token.
            return ids[1:] if ids[:1] == [end] else ids
        # The end token is encoded with the addition, because it can change the tokens after it (e.g. remove spaces).
        ids = self._tokenizer.encode_guarded(self._difference.end + addition, self._most + 1)
        if ids[:1] == [self._difference.end_id]:
            return ids[1:]
        return self._tokenizer.encode_guarded(addition, self._most + 1)

    def _shortened(self, pending: Sequence[_Pending]) -> list[tuple[_Pending, list[int] | UserError | None]]:
        """Shortens observations that have too many tokens. Returns each shortened observation with its token ids, with
        the error that the observation causes, or with None if even empty texts take too many tokens.

        All texts of one observation get the same character limit, so only the longest texts are shortened. Bisection
        finds the largest limit for which the observation has at most `most_tokens` tokens, with a tolerance of three
        percent.
        """
        best = self._encoded([each.limited(0) for each in pending])
        low = [0] * len(pending)
        high = [max((len(message["content"]) for message in each.chat), default=0) for each in pending]
        high = [min(size, _LONG_TOKEN * self._most) for size in high]

        def unsure(i: int) -> bool:
            return isinstance(best[i], list) and high[i] - low[i] > max(1, low[i] // 32)

        while active := [i for i in range(len(pending)) if unsure(i)]:
            middle = [(low[i] + high[i]) // 2 for i in active]
            tried = [pending[i].limited(size) for i, size in zip(active, middle, strict=True)]
            for i, size, ids in zip(active, middle, self._encoded(tried), strict=True):
                if isinstance(ids, list):
                    low[i], best[i] = size, ids
                else:
                    high[i] = size
        return [(each.limited(size), ids) for each, size, ids in zip(pending, low, best, strict=True)]


def make_bridge(
    tokenizer: Tokenizer,
    chat: bool,
    eos_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    most_tokens: int,
    overlong: str,
) -> Bridge:
    """Makes the `Bridge` of a run, which converts observations to tokens, and checks the chat template.

    Args:
      chat: whether prompts are rendered with the chat template. If False, prompts are plain text.
      eos_ids: the ids that end a turn.
      tools: JSON schemas of the tools. The template gets them as its variable `tools`.
      most_tokens: maximum number of tokens to append, including the tokens that the chat template adds.
      overlong: treatment of observations that need more than `most_tokens` tokens. With `cut`, the text is shortened
        and ends with a note about the omitted characters. With `unscored`, the trajectory ends and is unscored.

    Raises:
      UserError: the text that the chat template adds for a message also depends on earlier messages (see
        `TemplateDifference`), there are tools but prompts are plain text, or even the shortest message takes more than
        `most_tokens` tokens.
    """
    if tools and not chat:
        raise UserError(
            "environment: tools need a chat template, but the prompts are plain text; give prompts as messages "
            "(data.apply_chat_template=true)."
        )
    difference = TemplateDifference(tokenizer, eos_ids, tools) if chat else None
    return Bridge(tokenizer, difference, most_tokens, overlong)


def with_observation(prompt: str | Sequence[Message], observation: Any) -> str | list[Message]:
    """Adds the first observation of an environment to a prompt, and returns the result.

    Text is appended to a text prompt, or to the content of the last message of a prompt that consists of messages.
    Messages are appended as messages. The observation is untrusted: control tokens that are written in it are encoded
    as plain text.

    Raises:
      UserError: the observation is neither text nor messages, or the observation is messages and the prompt is text.
    """
    new = _messages(observation)
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


def _messages(observation: Any) -> list[dict[str, str]]:
    """Returns an observation as a list of messages. A text becomes a user message; None and an empty text become an
    empty list.

    Raises:
      UserError: the observation is neither text nor a list of messages, a value in a message is not text, or the role
        of a message is not one of `ROLES` (user, tool, system).
    """
    if observation is None or isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    if not isinstance(observation, Sequence):
        raise UserError(f"an observation must be text or a list of messages; it is a {type(observation).__name__}.")
    out = []
    for message in observation:
        if not isinstance(message, Mapping) or not all(map(_is_text, [*message, *message.values()])):
            raise UserError(f"a message of an observation must be a mapping of text to text; it is {message!r:.80}.")
        if "content" not in message or message.get("role") not in ROLES:
            raise UserError(
                f"a message of an observation must have a content and a role ({', '.join(ROLES)}); its role is "
                f"{message.get('role')!r:.40}."
            )
        out.append(dict(message))
    return out


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _limited(text: str, size: int) -> str:
    """Shortens a text that is longer than `size` characters to `size` characters, and appends the number of omitted
    characters."""
    return text if len(text) <= size else text[:size] + _mark(len(text) - size)


def _mark(omitted: int) -> str:
    return f" ... ({omitted} characters omitted)"
