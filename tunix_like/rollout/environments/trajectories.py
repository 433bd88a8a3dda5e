"""Connects the sampler with environments: sends turns to the environments, and converts the observations to tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.data.stream import render
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rewards.calls import Failure
from tunix_like.rollout.environments.bridge import Bridge, Bridged, make_bridge, with_observation
from tunix_like.rollout.environments.conversations import Continued, Conversation, Conversations
from tunix_like.rollout.environments.episodes import Episode
from tunix_like.rollout.environments.failures import check_available, check_configured, first_observation
from tunix_like.rollout.environments.outcomes import Environments, Outcome
from tunix_like.rollout.environments.states import State
from tunix_like.rollout.rollouts import segment_starts
from tunix_like.runtime.processes import all_or_none, share, spread
from tunix_like.types import Completions, Message, Problem, Reply, Turn


class Player:
    """Makes, for each rollout of a run, the `Trajectories` object that passes turns of the policy to environments.

    Args:
      environments: the object that runs the environments.
      eos_ids: ids of the tokens that end a turn.

    Attributes:
      seconds: time in seconds for which the run has waited for environments since the caller last set `seconds` to 0.
      playing: the trajectories of the current rollout; None between rollouts.
      overtime: whether a call of an environment has exceeded its time limit. Such a call may still use a session of a
        server, so a later `reset` may find no free session and raise `EnvironmentMisconfigured`. Therefore this error
        does not stop the run if `overtime` is True.
      conversations: renders the conversations with `environment.history=template`; None before the first call of
        `bridge`, or with `environment.history=sampled`.

    Raises:
      UserError: `environment.mode` is `eager` and the run has several processes. Several processes need `lockstep`,
        because all processes must compute in the same order.
    """

    def __init__(
        self, environments: Environments, config: EnvironmentConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]
    ):
        if config.mode == "eager" and jax.process_count() > 1:
            raise UserError("environment.mode: several processes need lockstep; set environment.mode=lockstep.")
        self.environments, self.config, self.tokenizer, self.eos_ids = environments, config, tokenizer, tuple(eos_ids)
        self._bridges: dict[bool, Bridge] = {}
        self.conversations: Conversations | None = None
        self.seconds = 0.0
        self.playing: Trajectories | None = None
        self.overtime = False

    @property
    def rewrites(self) -> bool:
        """Whether the whole conversation is rendered again at each turn, so that the chat template can rewrite earlier
        turns."""
        return self.config.history == "template"

    def bridge(self, prompt: Any) -> Bridge:
        """Returns the `Bridge`, which converts observations to tokens. There is one `Bridge` for text prompts, and one
        for prompts that consist of messages.

        Args:
          prompt: a text, or messages that are not rendered yet.

        Raises:
          UserError: the chat template cannot be used for several turns; see `make_bridge` and `Conversations`.
        """
        chat = not isinstance(prompt, str)
        if self.rewrites and not chat:
            raise UserError(
                "environment.history=template: it needs a chat template, but the prompts are plain text; give prompts "
                "as messages (data.apply_chat_template=true), or set environment.history=sampled."
            )
        if chat not in self._bridges:
            config = self.config
            self._bridges[chat] = make_bridge(
                self.tokenizer,
                chat,
                self.eos_ids,
                self.environments.tools,
                most_tokens=config.max_observation_tokens,
                overlong=config.overlong_observation,
            )
            if self.rewrites:
                self.conversations = Conversations(self.tokenizer, bool(self.environments.tools))
        return self._bridges[chat]

    def check_prompt(self, prompt: Any) -> None:
        """Checks that trajectories with the prompt `prompt` can have several turns. Raises UserError if the chat
        template cannot be used for them."""
        self.bridge(prompt)

    def check(self, rows: Any) -> str | Sequence[Message] | None:
        """Checks that trajectories with the prompt of the first data row can have several turns.

        Returns the first observation of this data row; None if there are no rows.

        Raises:
          UserError: the chat template cannot be used for several turns, or the environment fails.
        """
        if not len(rows) or rows[0] is None:
            return None
        self.bridge(rows[0].get("prompt"))
        return first_observation(self.environments, rows[0], "environment: it could not be reset for the first row. ")

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> Trajectories:
        """Starts the trajectories of a rollout: resets `size` environments for each problem.

        Raises:
          UserError: the first observations of the trajectories of one problem differ.
        """
        return Trajectories(self, problems, size, max_prompt_length)


class Trajectories:
    """The trajectories of one rollout and their environments. This object is the `Responder` of the rollout: it answers
    the turns of the policy with observations of the environments.

    With several processes, each process runs the environments of its share of the problems, and the processes exchange
    the replies to the turns.

    Attributes:
      problems: the problems, with the first observations in their prompts.
    """

    def __init__(self, player: Player, problems: Sequence[Problem], size: int, max_prompt_length: int):
        self.player, self.size = player, size
        self._environments = player.environments
        self._own = share(len(problems))
        self._states = {number: State() for group in self._own for number in self._numbers(group)}
        self._unanswered: set[int] = set()
        self._ready: list[Reply] = []
        self._given = list(problems)
        self._chats = [problem.source for problem in problems]
        if player.playing is not None:  # an error ended the last rollout
            self._environments.close()
        player.playing = self
        self.problems = self._reset(max_prompt_length)
        self._openings: list[Sequence[int]] = [()] * len(problems)
        if player.rewrites:
            self._converse()

    @property
    def lockstep(self) -> bool:
        return self.player.config.mode == "lockstep"

    def opening(self, group: int) -> Sequence[int]:
        return self._openings[group]

    def submit(self, turns: Sequence[Turn]) -> None:
        """Decodes the turns, and sends the texts to the environments that this process runs. A truncated turn ends its
        trajectory without a step of the environment."""
        for turn in turns:
            if turn.group not in self._own:
                continue
            number = turn.group * self.size + turn.sample
            state = self._states[number]
            text = self.player.tokenizer.decode(turn.tokens)
            state.messages.append({"role": "assistant", "content": text})
            state.turns += 1
            if state.conversation is not None:
                state.conversation.add_turn(text, turn.tokens)
            if turn.truncated:
                self._end(number)
            elif state.failure is not None:  # the environment failed before the first turn
                self._ready.append(Reply(turn.group, turn.sample, None))
            else:
                state.last = int(turn.tokens[-1])
                self._unanswered.add(number)
                self._environments.step(number, text)

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the ready replies of all processes to turns of the policy (see `types.Responder`)."""
        return [Reply(*reply) for part in all_or_none(lambda: self._own_replies(wait)) for reply in part]

    def _own_replies(self, wait: bool) -> list[list[Any]]:
        """Returns the replies for the trajectories of this process. Each `Reply` is converted to a list of its
        fields."""
        while True:
            waits = wait and bool(self._unanswered) and (self.lockstep or not self._ready)
            self._ready += self._answered(self._outcomes(waits))
            if not waits:
                break
        ready, self._ready = self._ready, []
        return [list(reply) for reply in ready]

    def _outcomes(self, wait: bool) -> list[Outcome]:
        start = time.perf_counter()
        outcomes = self._environments.outcomes(wait)
        self.player.seconds += time.perf_counter() - start
        return outcomes

    def check_rows(self, out: Completions, engine: str) -> None:
        """Checks that the user's engine has inserted the tokens of `Responder.opening` in all completions, and has
        begun a new segment at each `Reply.restart`.

        Raises:
          UserError: a completion does not have the expected number of segments, or does not begin with the tokens of
            `opening`.
        """
        starts = [[0]] * out.lengths.size if out.segment_start is None else segment_starts(out)
        for number, state in self._states.items():
            index, opening = divmod(number, self.size), self._openings[number // self.size]
            restarted = 0 if state.conversation is None else state.conversation.restarted
            if len(starts[number]) != restarted + 1 or out.tokens[index][: len(opening)].tolist() != list(opening):
                raise UserError(
                    f"engine {engine}: environment.history=template needs an engine that supports `Reply.restart` and "
                    f"`Responder.opening`; completion {index[1]} of request {index[0]} has {len(starts[number])} "
                    f"segments, and {restarted + 1} were expected. Or set environment.history=sampled."
                )

    def episodes(self) -> list[Episode]:
        """Ends all trajectories and returns the `Episode` of each trajectory, in the order of the problems.

        Raises:
          EngineLost: a service of the environments was unavailable for all trajectories.
        """
        for number in self._states:
            self._end(number)
        while self._unanswered:
            for outcome in self._outcomes(wait=True):
                self._record(outcome)
        self.player.playing = None
        parts = spread(range(len(self._given)), self._shared)
        episodes = [Episode(*episode) for group in parts for episode in group]
        check_available([episode.failure for episode in episodes])
        return episodes

    def _shared(self, groups: Sequence[int]) -> list[Any]:
        return [[list(self._states[number].episode()) for number in self._numbers(group)] for group in groups]

    def _numbers(self, group: int) -> range:
        return range(group * self.size, (group + 1) * self.size)

    def _reset(self, max_prompt_length: int) -> list[Problem]:
        opened = [prompt for part in all_or_none(lambda: self._open(max_prompt_length)) for prompt in part]
        failures = [state.failure for state in self._states.values()]
        check_available([failure for part in all_or_none(lambda: failures) for failure in part])
        return [
            problem if prompt is None else dataclasses.replace(problem, text=prompt[0], tokens=prompt[1])
            for problem, prompt in zip(self._given, opened, strict=True)
        ]

    def _open(self, max_prompt_length: int) -> list[Any]:
        """Resets the environments of this process. Returns, for each problem of this process, the prompt with the first
        observation (see `_opened`)."""
        for group in self._own:
            for number in self._numbers(group):
                self._unanswered.add(number)
                self._environments.reset(number, self._given[group].columns)
        first: dict[int, Any] = {}
        while self._unanswered:
            for outcome in self._outcomes(wait=True):
                self._record(outcome)
                if not self.player.overtime:
                    check_configured(outcome.failure)
                if outcome.failure is None:
                    first[outcome.number] = outcome.observation
        return [self._opened(group, first, max_prompt_length) for group in self._own]

    def _opened(self, group: int, first: Mapping[int, Any], most: int) -> tuple[str, list[int]] | None:
        """Adds the first observation to the prompt of the problem `group`. Returns the new prompt as text and tokens.
        Returns None if there is no first observation.

        If the new prompt has more than `most` tokens, returns None, and the trajectories of the problem are unscored.
        """
        problem = self._given[group]
        seen = [first[number] for number in self._numbers(group) if number in first]
        if any(observation != seen[0] for observation in seen):
            raise UserError(
                f"environment: the first observations of the trajectories of one row differ ({seen[0]!r:.200} and "
                f"{next(o for o in seen if o != seen[0])!r:.200}); `reset` must depend on the columns of the row only, "
                "because the trajectories of a row share its prompt."
            )
        if not seen or not seen[0]:
            return None
        self._chats[group] = with_observation(problem.source, seen[0])
        prompt = render({"prompt": self._chats[group]}, self.player.tokenizer)
        if len(prompt.tokens) > most:
            reason = (
                f"environment: the prompt {problem.text!r:.80} with its first observation has {len(prompt.tokens)} "
                f"tokens, more than rollout.max_prompt_length={most}."
            )
            for number in self._numbers(group):
                self._states[number].failure = Failure("error", reason)
            return None
        return prompt.text, prompt.tokens

    def _converse(self) -> None:
        """Begins the conversation of each trajectory. If the chat template can change the last tokens of a prompt in
        later turns, moves these tokens from the prompt to the beginning of each completion."""
        kept = spread(range(len(self.problems)), self._begun)
        self._openings = [list(each.tokens[size:]) for each, size in zip(self.problems, kept, strict=True)]
        self.problems = [
            dataclasses.replace(each, tokens=each.tokens[:size]) for each, size in zip(self.problems, kept, strict=True)
        ]

    def _begun(self, groups: Sequence[int]) -> list[int]:
        """Makes the `Conversation` of each trajectory of the problems with the indices `groups`. Returns for each
        problem the number of tokens at the start of the prompt that the chat template does not change in later
        turns."""
        for group in groups:
            self.player.bridge(self._given[group].source)
        assert self.player.conversations is not None or not groups, "made with the bridge"
        prompts = [(self._chats[group], self.problems[group].tokens) for group in groups]
        begun = [] if self.player.conversations is None else self.player.conversations.begin(prompts)
        for group, conversation in zip(groups, begun, strict=True):
            for number in self._numbers(group):
                self._states[number].conversation = conversation.copy()
        return [conversation.prompt for conversation in begun]

    def _record(self, outcome: Outcome) -> None:
        state = self._states[outcome.number]
        self._unanswered.discard(outcome.number)
        state.reward += outcome.reward
        state.info |= outcome.info
        if outcome.failure is not None:
            state.failure, state.over = outcome.failure, True
            self.player.overtime |= outcome.failure.kind == "timeout"

    def _answered(self, outcomes: Sequence[Outcome]) -> list[Reply]:
        """Converts the outcomes of environments to replies to the policy's turns."""
        replies, going = [], []
        for outcome in outcomes:
            was_over = self._states[outcome.number].over
            self._record(outcome)
            if was_over:  # this outcome answers `finish`
                continue
            state = self._states[outcome.number]
            going_on = outcome.failure is None and not outcome.done
            state.limited = going_on and state.turns >= self.player.config.max_turns
            if not going_on or state.limited:
                state.note(outcome.observation)
                replies.append(self._ended(outcome.number))
            else:
                going.append(outcome)
        return replies + self._bridged(going)

    def _bridged(self, outcomes: Sequence[Outcome]) -> list[Reply]:
        replies = []
        for chat in {isinstance(self._prompt(outcome.number), str) for outcome in outcomes}:
            part = [outcome for outcome in outcomes if isinstance(self._prompt(outcome.number), str) == chat]
            bridge = self.player.bridge(self._prompt(part[0].number))
            ends = [self._states[outcome.number].last for outcome in part]
            bridged = bridge.tokens([outcome.observation for outcome in part], ends)
            for outcome, each in zip(part, bridged, strict=True):
                self._states[outcome.number].note(outcome.observation)
                self._states[outcome.number].cut += each.cut
            for outcome, (tokens, restart, problem) in zip(part, self._continued(part, bridged), strict=True):
                if tokens is None:
                    self._states[outcome.number].failure = Failure("error", f"environment: {problem}")
                    replies.append(self._ended(outcome.number))
                else:
                    replies.append(Reply(*divmod(outcome.number, self.size), tokens, restart))
        return replies

    def _continued(self, outcomes: Sequence[Outcome], bridged: Sequence[Bridged]) -> list[Continued]:
        """Returns how the completions of trajectories continue after the given outcomes, one `Continued` per outcome.
        `bridged` has the tokens of the observations in the outcomes."""
        found = [Continued(each.tokens, problem=each.problem) for each in bridged]
        if self.player.conversations is None:
            return found
        given: dict[int, tuple[Conversation, Sequence[Message]]] = {}
        for place, (outcome, each) in enumerate(zip(outcomes, bridged, strict=True)):
            conversation = self._states[outcome.number].conversation
            if conversation is not None and each.tokens is not None:
                given[place] = conversation, each.chat
        for place, continued in zip(given, self.player.conversations.continued(list(given.values())), strict=True):
            found[place] = continued
        return found

    def _prompt(self, number: int) -> Any:
        return self._given[number // self.size].source

    def _ended(self, number: int) -> Reply:
        self._end(number)
        return Reply(*divmod(number, self.size), None)

    def _end(self, number: int) -> None:
        """Requests the end of a trajectory from its environment, unless the trajectory is already over."""
        state = self._states[number]
        if state.over:
            return
        state.over = True
        self._unanswered.add(number)
        self._environments.finish(number)
