"""Connects the sampler with agents: programs that decide which conversation the model sees.

An agent sends requests, each with a whole conversation. This module converts the requests to tokens, and answers them
with turns of the policy.

At each turn the model sees exactly what the chat template renders for the request. If the rendering begins with the
tokens that the model has seen and sampled so far, only the remaining tokens are appended to the completion. Otherwise
the model no longer sees the earlier tokens of the completion, but the prompt and the rest of the rendering, as with
`environment.history=template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tunix_like.config.schema import EnvironmentConfig, RolloutConfig
from tunix_like.environments.agent_calls import Call
from tunix_like.environments.history import NEXT, Continuation, History, common_beginning, equal_tokens, rendered
from tunix_like.environments.outcomes import Environments, Outcome
from tunix_like.environments.trajectories import Player, Trajectories
from tunix_like.errors import UserError
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Message, Problem, Turn

_OTHERS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Question"}]},
    {"messages": [{"role": "system", "content": "Rule"}, {"role": "user", "content": "Task"}]},
    {
        "messages": [{"role": "user", "content": "Find it"}],
        "tools": [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}],
    },
)
"""Conversations that have nothing in common but what the chat template writes before each conversation."""


class AgentEnvironments(Environments, Protocol):
    """Environments whose observations are requests of agents. The first request follows `reset`. `step` answers a
    request, and the outcome has the next one.

    Attributes:
      subject: names the environment at the beginning of error messages.
      one_conversation: whether every request begins with the first request of its trajectory, which is the same in all
        trajectories of a row. These trajectories then share it as their prompt. Otherwise they share only the first
        tokens that all conversations have.
      calls: the latest request of each trajectory, by number of the trajectory.
      tokens: number of tokens of the prompt and of the turn, by number of the trajectory. `AgentTrajectories` sets
        these two numbers before `step`, because answers report them.
    """

    subject: str
    one_conversation: bool
    calls: dict[int, Call]
    tokens: dict[int, tuple[int, int]]

    def step(self, number: int, completion: str, reason: str = "stop") -> None:
        """Answers the latest request of a trajectory with a turn of the policy.

        Args:
          completion: the text of the turn.
          reason: "stop", or "length" if the token limit ended the turn. After "length", all later requests are refused.
            It gets no outcome: the call of `finish` that follows gets one.
        """

    def cancel(self, number: int) -> None:
        """Stops the agent of a trajectory, which gets no outcome."""


class AgentPlayer(Player):
    """Passes turns of the policy to agents, as `Player` does to other environments."""

    environments: AgentEnvironments

    def __init__(
        self, environments: AgentEnvironments, config: EnvironmentConfig, tokenizer: Tokenizer, rollout: RolloutConfig
    ):
        if tokenizer.chat_template is None:
            raise UserError(
                f"{environments.subject}: the requests of agents are chats, and the tokenizer has no chat template; "
                "add chat_template.jinja to the folder of the model."
            )
        super().__init__(environments, config, tokenizer, rollout.eos_tokens or tokenizer.eos_ids)
        self.max_tokens = rollout.max_tokens_to_generate
        self._others = [] if environments.one_conversation else self._other_conversations()

    @property
    def rewrites(self) -> bool:
        return True

    def _other_conversations(self) -> list[list[int]]:
        found = []
        for body in _OTHERS:
            variables = {name: value for name, value in body.items() if name != "messages"}
            try:
                found.append(rendered(self.tokenizer, body["messages"], **variables))
            except UserError:  # some templates have no system messages
                continue
        return found

    def check(self, rows: Any, max_prompt_length: int) -> None:
        """Checks the environment: runs the agent of the first data row up to its first request.

        Raises:
          UserError: the agent sends no request, or the request cannot be rendered or has too many tokens.
        """
        if not len(rows) or rows[0] is None:
            return
        self.environments.reset(0, rows[0])
        (outcome,) = self.environments.outcomes(wait=True)
        reason = None if outcome.failure is None else outcome.failure.reason
        if reason is None and outcome.done:
            reason = "the episode has ended without a request."
        if reason is None:
            try:
                reason = self.too_long(self.tokens(self.environments.calls[0]), max_prompt_length)
            except UserError as error:
                reason = str(error)
        self.environments.cancel(0)
        if reason is not None:
            line = reason.splitlines()[0]  # output or a traceback may follow
            raise UserError(f"{self.environments.subject}: its first task cannot be played. {line}")

    def too_long(self, tokens: Sequence[int], max_prompt_length: int) -> str | None:
        """Returns what is wrong with the number of tokens of a first request; None if nothing is."""
        key, most = "rollout.max_prompt_length", max_prompt_length
        if not self.environments.one_conversation:  # the request is a part of the completion
            key, most = "rollout.max_tokens_to_generate", self.max_tokens - 1
        if len(tokens) <= most:
            return None
        return f"the first request has {len(tokens)} tokens, more than {key}={most} allows; raise it."

    def shared(self, call: Call, tokens: Sequence[int]) -> int:
        """Returns how many tokens of the first request `call` are the prompt that all trajectories of a row share."""
        if not self.environments.one_conversation:
            return max(1, min((equal_tokens(tokens, other) for other in self._others), default=1))
        try:
            return common_beginning(tokens, self.tokens(call, NEXT))
        except UserError:  # the next request may be another conversation
            return len(tokens)

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> Trajectories:
        return AgentTrajectories(self, problems, size, max_prompt_length)

    def tokens(self, call: Call, further: Sequence[Message] = ()) -> list[int]:
        """Renders the messages of a request, followed by the messages `further`, with the chat template.

        Raises:
          UserError: the request cannot be rendered.
        """
        if not (tokens := rendered(self.tokenizer, [*call.messages, *further], **call.variables)):
            raise UserError("environment: the request has no tokens.")
        return tokens


class AgentTrajectories(Trajectories):
    """The trajectories of one rollout with agents."""

    player: AgentPlayer
    _environments: AgentEnvironments

    def submit(self, turns: Sequence[Turn]) -> None:
        """Sends turns of the policy to the agents, as answers to their requests. After a truncated turn, later requests
        of the same agent are refused."""
        for turn in turns:
            number = turn.group * self.size + turn.sample
            if turn.group in self._own:
                state = self._states[number]
                self._environments.tokens[number] = len(state.history.tokens), len(turn.tokens)
                if turn.truncated and state.failure is None and not state.over:
                    self._environments.step(number, self.player.tokenizer.decode(turn.tokens), "length")
        super().submit(turns)

    def _opened(self, group: int, first: Mapping[int, Any], most: int) -> dict[str, Any] | None:
        """Returns the first request of the first trajectory of the problem `group` that has a usable one, as the text
        and the tokens of the problem; None if no trajectory has.

        A trajectory is unscored if its first request is missing, cannot be rendered, has too many tokens or, with
        `one_conversation`, differs from the first requests of the problem's other trajectories.
        """
        prompt: list[int] | None = None
        opened: list[Any] = []
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
            if (problem := self.player.too_long(tokens, most)) is not None:
                state.fail(problem)
                continue
            if prompt is None:
                prompt = tokens
                opened = [*call.messages]
            if self._environments.one_conversation and tokens != prompt:
                state.fail(
                    "the first request of this trajectory differs from those of other trajectories of its row, which "
                    "share their prompt."
                )
        if prompt is None:
            return None
        text = self.player.tokenizer.decode(prompt, skip_special_tokens=False)
        return {"text": text, "tokens": prompt, "opened": opened}

    def _histories(self, group: int) -> list[History]:
        tokens = [int(token) for token in self.problems[group].tokens]
        good = [number for number in self._numbers(group) if self._states[number].failure is None]
        if not good:
            return [History([], tokens, len(tokens)) for _ in self._numbers(group)]
        kept = self.player.shared(self._environments.calls[good[0]], tokens)
        histories = []
        for number in self._numbers(group):
            history = History([], tokens, kept)
            if number in good:
                call = self._environments.calls[number]
                history = History([*call.messages], self.player.tokens(call), kept)
                if history.tokens[:kept] != tokens[:kept]:
                    self._states[number].fail("the first request does not begin as those of other trajectories.")
                    history = History([], tokens, kept)
            histories.append(history)
        return histories

    def _continuation(self, outcome: Outcome) -> Continuation:
        call = self._environments.calls[outcome.number]
        return self._states[outcome.number].history.replace(call.messages, self.player.tokens(call))
