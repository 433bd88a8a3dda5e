"""Connects the sampler with environments of the package `verifiers`.

The harness is the code of an environment that decides which conversation the model sees. This module converts the chat
requests of the harness to tokens, and answers the requests with turns of the policy.

At each turn the model sees exactly what the chat template renders for the request. If the rendering begins with the
tokens that the model has seen and sampled so far, only the remaining tokens are appended to the completion. Otherwise
the model no longer sees the earlier tokens of the completion, but the prompt and the rest of the rendering, as with
`environment.history=template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.environments.agent_calls import Call
from tunix_like.environments.history import NEXT, Continuation, History, common_beginning, rendered
from tunix_like.environments.outcomes import Environments, Outcome
from tunix_like.environments.trajectories import Player, Trajectories
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Message, Problem, Turn


class Harness(Environments, Protocol):
    """What this module needs of `VerifiersEnvironments`, which describes these members."""

    settings: Mapping[str, Any]
    calls: dict[int, Call]
    tokens: dict[int, tuple[int, int]]

    def step(self, number: int, completion: str, reason: str = "stop") -> None: ...

    def cancel(self, number: int) -> None: ...


class VerifiersPlayer(Player):
    """Passes turns of the policy to environments of the package `verifiers`, as `Player` does to other environments."""

    environments: Harness

    def __init__(
        self,
        environments: Harness,
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

    def check(self, rows: Any, max_prompt_length: int) -> None:
        """Checks the environment: runs the episode of the first data row up to the first chat request of the
        environment.

        Raises:
          UserError: the environment sends no request, or the request cannot be rendered or has more than
            `max_prompt_length` tokens.
        """
        if not len(rows):
            return
        self.environments.reset(0, rows[0])
        (outcome,) = self.environments.outcomes(wait=True)
        reason = None if outcome.failure is None else outcome.failure.reason
        if reason is None and outcome.done:
            reason = "the episode has ended without a request."
        if reason is None:
            try:
                size = len(self.tokens(self.environments.calls[0]))
                if size > max_prompt_length:
                    reason = f"Its first request has {size} tokens; raise rollout.max_prompt_length."
            except UserError as error:
                reason = str(error)
        self.environments.cancel(0)
        if reason is not None:
            raise UserError(
                f"data.path={self.environments.settings['path']}: its first task cannot be played. "
                + reason.splitlines()[0]  # a traceback may follow
            )

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> Trajectories:
        return VerifiersTrajectories(self, problems, size, max_prompt_length)

    def tokens(self, call: Call, further: Sequence[Message] = ()) -> list[int]:
        """Renders the messages of a chat request, followed by the messages `further`, with the chat template.

        Raises:
          UserError: the request cannot be rendered.
        """
        if not (tokens := rendered(self.tokenizer, [*call.messages, *further], **call.variables)):
            raise UserError("environment: the request has no tokens.")
        return tokens


class VerifiersTrajectories(Trajectories):
    """The trajectories of one rollout with environments of the package `verifiers`."""

    player: VerifiersPlayer
    _environments: Harness

    def submit(self, turns: Sequence[Turn]) -> None:
        """Sends turns of the policy to the environments, as answers to their chat requests. After a truncated turn,
        later requests of the same episode are refused."""
        for turn in turns:
            number = turn.group * self.size + turn.sample
            if turn.group in self._own:
                state = self._states[number]
                self._environments.tokens[number] = len(state.history.tokens), len(turn.tokens)
                if turn.truncated and state.failure is None and not state.over:
                    self._environments.step(number, self.player.tokenizer.decode(turn.tokens), "length")
        super().submit(turns)

    def _opened(self, group: int, first: Mapping[int, Any], most: int) -> tuple[str, list[int]] | None:
        """Returns the first chat request of the environment for the problem `group`, as text and tokens. Returns None
        if no trajectory of the problem has a request that can be rendered, or if this request has more than `most`
        tokens.

        A trajectory is unscored if its first request is missing, cannot be rendered, has more than `most` tokens or
        differs from the first requests of the problem's other trajectories.
        """
        prompt: list[int] | None = None
        for number in self._numbers(group):
            if number not in first:
                continue
            state = self._states[number]
            call = self._environments.calls.get(number)
            if call is None:
                state.fail("the episode has ended without a request.")
                continue
            try:
                tokens = self.player.tokens(call)
            except UserError as error:
                state.fail(str(error))
                continue
            prompt = tokens if prompt is None else prompt
            if tokens != prompt:
                state.fail(
                    "the first request of this trajectory differs from those of other trajectories of its row, which "
                    "share their prompt."
                )
            elif len(tokens) > most:
                state.fail(f"the first request has {len(tokens)} tokens, more than rollout.max_prompt_length={most}.")
        if prompt is None or len(prompt) > most:
            return None
        return self.player.tokenizer.decode(prompt, skip_special_tokens=False), prompt

    def _history(self, group: int) -> History:
        tokens = [int(token) for token in self.problems[group].tokens]
        good = [number for number in self._numbers(group) if self._states[number].failure is None]
        if not good:
            return History([], tokens, len(tokens))
        call = self._environments.calls[good[0]]
        try:
            kept = common_beginning(tokens, self.player.tokens(call, NEXT))
        except UserError:  # the next request may be another conversation
            kept = len(tokens)
        return History([*call.messages], tokens, kept)

    def _continuation(self, outcome: Outcome) -> Continuation:
        call = self._environments.calls[outcome.number]
        return self._states[outcome.number].history.replace(call.messages, self.player.tokens(call))
