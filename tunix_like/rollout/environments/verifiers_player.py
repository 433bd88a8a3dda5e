"""Connects the sampler with environments of the package `verifiers`.

The harness is the code of an environment that decides which conversation the model sees. This module converts the chat
requests of the harness to tokens, and answers the requests with turns of the policy.

At each turn the model sees exactly what the chat template renders for the request. If the rendering begins with the
tokens that the model has seen and sampled so far, only the remaining tokens are appended to the completion. Otherwise
the model no longer sees the earlier tokens of the completion, but the prompt and the rest of the rendering, as with
`environment.history=template`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rewards.calls import Failure
from tunix_like.rollout.environments.conversations import Continued, Conversation
from tunix_like.rollout.environments.outcomes import Outcome
from tunix_like.rollout.environments.trajectories import Player, Trajectories
from tunix_like.rollout.environments.verifiers import VerifiersEnvironments
from tunix_like.rollout.environments.verifiers_calls import Call
from tunix_like.types import Message, Problem, Reply, Turn

_NEXT: tuple[Message, ...] = ({"role": "assistant", "content": "A known answer"}, {"role": "user", "content": "Next"})
_NO_LIMIT = 1 << 40


class VerifiersPlayer(Player):
    """Passes turns of the policy to environments of the package `verifiers`, as `Player` does to other environments."""

    environments: VerifiersEnvironments

    def __init__(
        self,
        environments: VerifiersEnvironments,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
    ):
        if tokenizer.chat_template is None:
            raise UserError(
                "data.name=verifiers: the requests of a harness are chats, and the tokenizer has no chat template; add "
                "chat_template.jinja to the folder of the model."
            )
        super().__init__(environments, config, tokenizer, eos_ids)

    @property
    def rewrites(self) -> bool:
        return True

    def check_prompt(self, prompt: Any) -> None:
        """Does nothing: the chat template is not checked, because the environment determines all messages."""

    def check(self, rows: Any) -> None:
        """Checks the environment: runs the episode of the first data row up to the first chat request of the
        environment.

        Raises:
          UserError: the environment sends no request, or the request cannot be rendered.
        """
        if not len(rows):
            return
        self.environments.reset(0, rows[0])
        (outcome,) = self.environments.outcomes(wait=True)
        reason = None if outcome.failure is None else outcome.failure.reason
        if reason is None and outcome.done:
            reason = "the episode has ended without a request."
        if reason is None:
            (found,) = self.tokens([self.environments.calls[0]])
            reason = found if isinstance(found, str) else None
        self.environments.cancel(0)
        if reason is not None:
            raise UserError(
                f"data.path={self.environments.settings['path']}: its first task cannot be played. "
                + reason.splitlines()[0]  # a traceback may follow
            )

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> Trajectories:
        return VerifiersTrajectories(self, problems, size, max_prompt_length)

    def tokens(self, calls: Sequence[Call], further: Sequence[Message] = ()) -> list[list[int] | str]:
        """Renders the messages of each chat request, followed by the messages `further`, with the chat template.

        Returns the token ids of each request, or the reason why the request cannot be rendered.
        """
        found: dict[int, list[int] | str] = {}
        by_variables: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            by_variables.setdefault(json.dumps(call.variables, sort_keys=True), []).append(place)
        for places in by_variables.values():
            variables = calls[places[0]].variables
            chats = [[*calls[place].messages, *further] for place in places]
            texts = self.tokenizer.render_guarded(chats, True, **variables)
            for place, text in zip(places, texts, strict=True):
                found[place] = str(text) if isinstance(text, UserError) else self._encoded(text)
        return [found[place] for place in range(len(calls))]

    def _encoded(self, text: str) -> list[int] | str:
        try:
            return self.tokenizer.encode_guarded(text, _NO_LIMIT) or "environment: the request has no tokens."
        except UserError as error:
            return str(error)


class VerifiersTrajectories(Trajectories):
    """The trajectories of one rollout with environments of the package `verifiers`."""

    player: VerifiersPlayer
    _environments: VerifiersEnvironments

    def submit(self, turns: Sequence[Turn]) -> None:
        """Sends turns of the policy to the environments, as answers to their chat requests. After a truncated turn,
        later requests of the same episode are refused."""
        for turn in turns:
            number = turn.group * self.size + turn.sample
            if turn.group in self._own:
                conversation = self._states[number].conversation
                assert conversation is not None
                self._environments.tokens[number] = len(conversation.tokens), len(turn.tokens)
                if turn.truncated and self._states[number].failure is None and not self._states[number].over:
                    self._environments.step(number, self.player.tokenizer.decode(turn.tokens), "length")
        super().submit(turns)

    def _opened(self, group: int, first: Mapping[int, Any], most: int) -> tuple[str, list[int]] | None:
        """Returns the first chat request of the environment for the problem `group`, as text and tokens. Returns None
        if no trajectory of the problem has a request that can be rendered, or if this request has more than `most`
        tokens.

        A trajectory is unscored if its first request is missing, cannot be rendered, has more than `most` tokens or
        differs from the first requests of the problem's other trajectories.
        """
        for number in first:
            if number in self._numbers(group) and number not in self._environments.calls:
                self._fail(number, "environment: the episode has ended without a request.")
        numbers = [number for number in self._numbers(group) if number in first and number in self._environments.calls]
        rendered = dict(zip(numbers, self.player.tokens([self._environments.calls[n] for n in numbers]), strict=True))
        prompt = next((each for each in rendered.values() if isinstance(each, list)), None)
        for number, each in rendered.items():
            if isinstance(each, str):
                self._fail(number, each)
            elif each != prompt:
                self._fail(
                    number,
                    "environment: the first request of this trajectory differs from those of other trajectories of its "
                    "row, which share their prompt.",
                )
            elif len(each) > most:
                self._fail(
                    number,
                    f"environment: the first request has {len(each)} tokens, more than "
                    f"rollout.max_prompt_length={most}.",
                )
        if prompt is None or len(prompt) > most:
            return None
        return self.player.tokenizer.decode(prompt, skip_special_tokens=False), prompt

    def _fail(self, number: int, reason: str) -> None:
        self._states[number].failure = Failure("error", reason)

    def _begun(self, groups: Sequence[int]) -> list[int]:
        """Makes the `Conversation` of each trajectory of the problems with the indices `groups`. Returns for each
        problem the number of tokens at the start of the prompt that the chat template does not change in later
        turns."""
        calls: dict[int, Call] = {}
        for group in groups:
            good = [number for number in self._numbers(group) if self._states[number].failure is None]
            if good:
                calls[group] = self._environments.calls[good[0]]
        later = dict(zip(calls, self.player.tokens(list(calls.values()), _NEXT), strict=True))
        kept = [_common(self.problems[group].tokens, later.get(group, "")) for group in groups]
        for group, size in zip(groups, kept, strict=True):
            tokens = [int(token) for token in self.problems[group].tokens]
            for number in self._numbers(group):
                self._states[number].conversation = Conversation([], [*tokens], size)
        return kept

    def _bridged(self, outcomes: Sequence[Outcome]) -> list[Reply]:
        """Converts the next chat requests of the environments to replies with the tokens to append to the
        completions."""
        replies = []
        rendered = self.player.tokens([self._environments.calls[outcome.number] for outcome in outcomes])
        for outcome, ids in zip(outcomes, rendered, strict=True):
            state = self._states[outcome.number]
            state.note(outcome.observation)
            assert state.conversation is not None
            tokens, restart, problem = _continued(state.conversation, ids)
            if tokens is None:
                self._fail(outcome.number, f"environment: {problem}")
                replies.append(self._ended(outcome.number))
            else:
                replies.append(Reply(*divmod(outcome.number, self.size), tokens, restart))
        return replies


def _common(tokens: Sequence[int], later: Sequence[int] | str) -> int:
    """Returns how many tokens at the start of a prompt are also the first tokens of `later`, a longer conversation.

    If not even the first token is the same, or if `later` is the text of an error, the result is the length of the
    prompt: the two texts cannot be compared.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, later, strict=False))
    return sum(1 for _ in same) or len(tokens)


def _continued(conversation: Conversation, ids: list[int] | str) -> Continued:
    """Returns how a completion continues so that the model sees the tokens `ids` at the next turn. If `ids` is a text,
    the completion cannot continue, and the text is the reason."""
    if isinstance(ids, str):
        return Continued(None, problem=ids)
    seen, kept = conversation.tokens, conversation.prompt
    if ids[:kept] != seen[:kept]:
        return Continued(
            None,
            problem="the harness sent a conversation that does not begin with the prompt, which the trajectories of a "
            "row share.",
        )
    conversation.tokens = list(ids)
    if ids[: len(seen)] == seen:
        return Continued(ids[len(seen) :])
    conversation.rewritten += 1
    return Continued(ids[kept:], restart=True)
