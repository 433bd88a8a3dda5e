"""Connects the sampler with environments: sends turns to the environments, and converts the observations to tokens."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from tunix_like.config.schema import EnvironmentConfig
from tunix_like.data.stream import render, row_variables, usable
from tunix_like.environments.bridge import with_observation
from tunix_like.environments.history import Continuation, Histories, History
from tunix_like.environments.outcomes import Environments, Outcome, check_configured, reset_arguments
from tunix_like.environments.protocol import POTENTIAL, STATE
from tunix_like.errors import EngineLost, EnvironmentMisconfigured, UserError
from tunix_like.rewards.environment_state import failed_state
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.rollouts import segment_starts
from tunix_like.runtime import trace
from tunix_like.runtime.processes import across_processes, all_or_none, share
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Completions, Message, Problem, Reply, Turn
from tunix_like.workers.failures import Failure

logger = logging.getLogger("tunix_like")

PROBED = 4
"""Number of data rows, spread over the data, whose environments are reset once before a run."""

MOST_SHOWN = 10_000
"""Maximum number of characters of an observation in rollout files."""

SHOWN_SECONDS = 0.001
"""Shorter waits for environments are no events of the trace, and waits with shorter pauses are one event."""

_T = TypeVar("_T")


@dataclasses.dataclass
class State:
    """A trajectory that is being sampled. `Episode` describes the attributes that are not listed here.

    Attributes:
      over: whether the environment has failed, or the end of the trajectory has been requested.
      environment: the environment at the end, as in `Outcome`.
      key: of the state after the last step; None if the environment gave none.
    """

    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    turns: int = 0
    limited: bool = False
    cut: int = 0
    reward: float = 0.0
    info: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None
    over: bool = False
    environment: Any = None
    history: History = dataclasses.field(default_factory=History)
    turn_rewards: list[float] = dataclasses.field(default_factory=list)
    turn_tokens: list[int] = dataclasses.field(default_factory=list)
    key: str | float | None = None
    turn_states: list[str | float | None] = dataclasses.field(default_factory=list)
    turn_potentials: list[float] = dataclasses.field(default_factory=list)

    def episode(self, rewrites: bool) -> Episode:
        reward = float("nan") if self.failure is not None else self.reward
        failure = None if self.failure is None else [*self.failure]
        rewritten = self.history.rewritten if rewrites else None
        return Episode(
            self.messages,
            self.turns,
            self.limited,
            self.cut,
            reward,
            self.info,
            failure,
            rewritten,
            self.turn_rewards,
            self.turn_tokens,
            self.turn_states,
            self.turn_potentials,
        )

    def begin_turn(self, text: str, tokens: Sequence[int]) -> None:
        """Adds a turn of the policy."""
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.turn_rewards.append(0.0)
        self.turn_tokens.append(len(tokens))
        self.turn_states.append(self.key)
        self.turn_potentials.append(self.info.get(POTENTIAL, 0.0))
        self.history.add_turn(text, tokens)

    def note(self, observation: Any) -> None:
        """Adds an observation to the messages of the trajectory. The role "assistant" in the observation is replaced by
        "environment", so only turns of the policy have the role "assistant"."""
        if isinstance(observation, str) and observation:
            self.messages.append({"role": "user", "content": _shown(observation)})
        elif observation:
            for message in observation:
                text = {name: _shown(str(value)) for name, value in message.items()}
                self.messages.append(text | ({"role": "environment"} if text["role"] == "assistant" else {}))

    def fail(self, reason: str) -> None:
        self.failure = Failure("error", f"environment: {reason.removeprefix('environment: ')}")


def _shown(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... ({len(text) - MOST_SHOWN} characters omitted)"


class Player:
    """Makes, for each rollout of a run, the `Trajectories` object that passes turns of the policy to environments.

    Args:
      environments: the object that runs the environments.
      eos_ids: ids of the tokens that end a turn.

    Attributes:
      seconds: seconds spent in calls of environments (in-process) or waiting for them, since the caller last set
        `seconds` to 0.
      playing: the trajectories of the current rollout; None between rollouts.
      overtime: whether a call of an environment has exceeded its time limit. Such a call may still use a session of a
        server, so a later `reset` may find no free session and raise `EnvironmentMisconfigured`. Therefore this error
        does not stop the run if `overtime` is True.

    Raises:
      UserError: `environment.mode` is `eager` and the run has several processes. Several processes need `lockstep`,
        because all processes must compute in the same order.
    """

    def __init__(
        self, environments: Environments, config: EnvironmentConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]
    ):
        if config.mode == "eager" and jax.process_count() > 1:
            raise UserError("environment.mode: several processes need lockstep; set environment.mode=lockstep.")
        self.environments = environments
        self.config = config
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self._histories: dict[bool, Histories] = {}
        self.seconds = 0.0
        self.playing: Trajectories | None = None
        self.overtime = False

    @property
    def rewrites(self) -> bool:
        """Whether the whole conversation is rendered again at each turn, so that the chat template can rewrite earlier
        turns."""
        return self.config.history == "template"

    def histories(self, prompt: Any) -> Histories:
        """Returns the object that begins and continues the histories of text prompts, or of prompts that consist of
        messages. Raises UserError if the chat template cannot be used for several turns; see `Histories`."""
        chat = not isinstance(prompt, str)
        if chat not in self._histories:
            tools = bool(self.environments.tools)
            self._histories[chat] = Histories(self.tokenizer, chat, self.eos_ids, tools, self.config)
        return self._histories[chat]

    def check(self, rows: Any, max_prompt_length: int) -> str | Sequence[Message] | None:
        """Checks that trajectories with the prompt of the first data row can have several turns, and that prompts have
        at most `max_prompt_length` tokens together with their first observation.

        Returns the first observation of this data row; None if there are no rows.

        Raises:
          UserError: the chat template cannot be used for several turns, the environment fails, or the prompts of all
            `PROBED` rows are too long with their first observation.
        """
        if not len(rows) or rows[0] is None:
            return None
        self.histories(rows[0].get("prompt"))
        first = first_observation(self.environments, rows[0], "environment: it could not be reset for the first row. ")
        lengths = {0: self._opened_length(rows[0], first, max_prompt_length)}
        for i in sorted({place * len(rows) // PROBED for place in range(PROBED)} - {0}):
            if rows[i] is None:  # a grain filter removed the row
                continue
            try:
                observation = first_observation(self.environments, rows[i], "")
            except EnvironmentMisconfigured:
                raise
            except UserError:  # in the run, only the trajectories of this row fail
                continue
            lengths[i] = self._opened_length(rows[i], observation, max_prompt_length)
        long = sorted(i for i, length in lengths.items() if length > max_prompt_length)
        what = f"rollout.max_prompt_length={max_prompt_length}: with the first observation of the environment, "
        if long and len(long) == sum(map(bool, lengths.values())):
            row = long[0]
            length = lengths[long[0]]
            raise UserError(f"{what}the prompt of row {row} (counted from 0) has {length} tokens; raise it.")
        if long:
            logger.warning("%s%d of %d tried prompts are longer and are unscored", what, len(long), len(lengths))
        return first

    def _opened_length(self, row: Mapping[str, Any], observation: Any, most: int) -> int:
        """Returns the number of tokens of a prompt with its first observation; 0 if the run does not use the prompt."""
        try:
            if not usable(render(row, self.tokenizer, most), most):
                return 0
        except UserError:  # `check_prompts` reports it
            return 0
        return len(render({**row, "prompt": with_observation(row["prompt"], observation)}, self.tokenizer).tokens)

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> Trajectories:
        """Starts the trajectories of a rollout: resets `size` environments for each problem. Raises UserError if their
        first observations differ."""
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
        self.player = player
        self.size = size
        self._environments = player.environments
        self._own = share(len(problems))
        self._states = {number: State() for group in self._own for number in self._numbers(group)}
        self._unanswered: dict[int, tuple[str, float]] = {}  # name and start of the call of each trajectory
        self._wait = 0.0, 0.0  # start and end of the newest wait for environments
        self._ready: list[Reply] = []
        self._given = list(problems)
        self._chats = [problem.source for problem in problems]
        if player.playing is not None:  # an error ended the last rollout
            self._environments.close()
        player.playing = self
        self.problems = self._reset(max_prompt_length)
        self._openings: list[list[list[int]]] = []
        self._begin()

    @property
    def lockstep(self) -> bool:
        return self.player.config.mode == "lockstep"

    def opening(self, group: int, sample: int) -> Sequence[int]:
        return self._openings[group][sample]

    def submit(self, turns: Sequence[Turn]) -> None:
        """Decodes the turns, and sends the texts to the environments that this process runs. A truncated turn ends its
        trajectory without a step of the environment."""
        for turn in turns:
            if turn.group not in self._own:
                continue
            number = turn.group * self.size + turn.sample
            state = self._states[number]
            text = self.player.tokenizer.decode(turn.tokens)
            state.begin_turn(text, turn.tokens)
            if turn.truncated:
                self._end(number)
            elif state.failure is not None:  # the environment failed before the first turn
                self._ready.append(Reply(turn.group, turn.sample, None))
            else:
                self._begin_call("step", number, text)

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the ready replies of all processes to turns of the policy (see `types.Responder`)."""
        return [Reply(*reply) for part in all_or_none(lambda: self._own_replies(wait)) for reply in part]

    def _own_replies(self, wait: bool) -> list[list[Any]]:
        """Returns the replies for the trajectories of this process, as lists of their fields."""
        while True:
            waits = wait and bool(self._unanswered) and (self.lockstep or not self._ready)
            self._ready += self._answered(self._outcomes(waits))
            if not waits:
                break
        ready = self._ready
        self._ready = []
        return [list(reply) for reply in ready]

    def _outcomes(self, wait: bool) -> list[Outcome]:
        return self._timed(self._environments.outcomes, wait)

    def _timed(self, call: Callable[..., _T], *given: Any) -> _T:
        start = time.perf_counter()
        out = call(*given)
        end = time.perf_counter()
        self.player.seconds += end - start
        if start - self._wait[1] >= SHOWN_SECONDS:
            self._trace_wait()
            self._wait = start, end
        self._wait = self._wait[0], end
        return out

    def _trace_wait(self) -> None:
        if self._wait[1] - self._wait[0] >= SHOWN_SECONDS:
            trace.add("environment", *self._wait)

    def _begin_call(self, name: str, number: int, *given: Any) -> None:
        self._unanswered[number] = name, time.perf_counter()
        self._timed(getattr(self._environments, name), number, *given)

    def check_rows(self, out: Completions, engine: str) -> None:
        """Raises UserError if the user's engine has not inserted the tokens of `Responder.opening` in all completions,
        or has not begun a new segment at each `Reply.restart`."""
        starts = [[0]] * out.lengths.size if out.segment_start is None else segment_starts(out)
        for number, state in self._states.items():
            index = divmod(number, self.size)
            opening = self.opening(*index)
            restarted = state.history.restarted
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
        self._trace_wait()
        self.player.playing = None
        parts = across_processes(range(len(self._given)), self._shared)
        episodes = [Episode(*episode) for group in parts for episode in group]
        _check_available([episode.failure for episode in episodes])
        return episodes

    def environments(self) -> list[Any] | None:
        """Returns the environments of the ended trajectories for the reward functions, one per completion; None for a
        completion of another process. Returns None if the environments are not objects."""
        found: list[Any] = [None] * (len(self._given) * self.size)
        for number, state in self._states.items():
            found[number] = state.environment
        failures = {number: state.failure for number, state in self._states.items() if state.failure is not None}
        if all(each is None for each in found) and len(failures) < len(self._states):
            return None
        for number, failure in failures.items():
            found[number] = failed_state(failure.reason)
        return found

    def _shared(self, groups: Sequence[int]) -> list[Any]:
        rewrites = self.player.rewrites
        return [[list(self._states[number].episode(rewrites)) for number in self._numbers(group)] for group in groups]

    def _numbers(self, group: int) -> range:
        return range(group * self.size, (group + 1) * self.size)

    def _reset(self, max_prompt_length: int) -> list[Problem]:
        opened = [prompt for part in all_or_none(lambda: self._open(max_prompt_length)) for prompt in part]
        failures = [state.failure for state in self._states.values()]
        _check_available([failure for part in all_or_none(lambda: failures) for failure in part])
        return [
            problem if prompt is None else dataclasses.replace(problem, **prompt)
            for problem, prompt in zip(self._given, opened, strict=True)
        ]

    def _open(self, max_prompt_length: int) -> list[Any]:
        """Resets the environments of this process. Returns, for each problem of this process, the prompt with the first
        observation (see `_opened`)."""
        for group in self._own:
            arguments = reset_arguments(self._environments, self._given[group])
            for number in self._numbers(group):
                self._begin_call("reset", number, *arguments)
        first: dict[int, Any] = {}
        while self._unanswered:
            for outcome in self._outcomes(wait=True):
                self._record(outcome)
                if not self.player.overtime:
                    check_configured(outcome.failure)
                if outcome.failure is None:
                    first[outcome.number] = outcome.observation
        return [self._opened(group, first, max_prompt_length) for group in self._own]

    def _opened(self, group: int, first: Mapping[int, Any], most: int) -> dict[str, Any] | None:
        """Adds the first observation to the prompt of the problem `group`. Returns what changes in the problem; None
        if there is no first observation, or if the new prompt has more than `most` tokens. The trajectories of the
        problem are then unscored."""
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
        prompt = render({**problem.columns, "prompt": self._chats[group]}, self.player.tokenizer)
        if len(prompt.tokens) > most:
            for number in self._numbers(group):
                self._states[number].fail(
                    f"the prompt {problem.text!r:.80} with its first observation has {len(prompt.tokens)} tokens, more "
                    f"than rollout.max_prompt_length={most}."
                )
            return None
        return {"text": prompt.text, "tokens": prompt.tokens, "opened": self._chats[group]}

    def _begin(self) -> None:
        """Begins the history of each trajectory. If the chat template can change the last tokens of a prompt in later
        turns, moves these tokens from the prompt to the beginning of each completion."""
        begun = across_processes(range(len(self.problems)), self._begun)
        self._openings = [openings for _, openings in begun]
        self.problems = [
            dataclasses.replace(each, tokens=each.tokens[:size])
            for each, (size, _) in zip(self.problems, begun, strict=True)
        ]

    def _begun(self, groups: Sequence[int]) -> list[tuple[int, list[list[int]]]]:
        """Begins the histories of the trajectories of these problems. Returns for each problem `History.prompt`, and
        `History.opening` of each of its trajectories."""
        begun = []
        for group in groups:
            histories = self._histories(group)
            for number, history in zip(self._numbers(group), histories, strict=True):
                self._states[number].history = history
            begun.append((histories[0].prompt, [history.opening for history in histories]))
        return begun

    def _histories(self, group: int) -> list[History]:
        """Returns the histories of the trajectories of a problem, all with the same value of `History.prompt`."""
        chat = self._chats[group]
        variables = row_variables(chat, self._given[group].columns, self.player.tokenizer)
        history = self.player.histories(chat).begin(chat, self.problems[group].tokens, **variables)
        return [history.copy() for _ in self._numbers(group)]

    def _record(self, outcome: Outcome) -> None:
        state = self._states[outcome.number]
        if (begun := self._unanswered.pop(outcome.number, None)) is not None:
            name, start = begun
            start, end = outcome.called or (start, time.perf_counter())
            failed = outcome.failure is not None
            trace.add_call(
                "environment calls", name, start, end, failed=failed, trajectory=outcome.number, turn=state.turns
            )
        state.reward += outcome.reward
        if state.turn_rewards:
            state.turn_rewards[-1] += outcome.reward
        state.key = outcome.info.get(STATE)
        state.info |= {name: value for name, value in outcome.info.items() if not isinstance(value, str)}
        state.environment = outcome.environment
        if outcome.failure is not None:
            state.failure = outcome.failure
            state.over = True
            self.player.overtime |= outcome.failure.kind == "timeout"

    def _answered(self, outcomes: Sequence[Outcome]) -> list[Reply]:
        """Converts the outcomes of environments to replies to the policy's turns."""
        replies = []
        for outcome in outcomes:
            was_over = self._states[outcome.number].over
            self._record(outcome)
            if was_over:  # this outcome answers `finish`
                continue
            state = self._states[outcome.number]
            going_on = outcome.failure is None and not outcome.done
            state.limited = going_on and state.turns >= self.player.config.max_turns
            state.note(outcome.observation)
            replies.append(self._reply(outcome) if going_on and not state.limited else self._ended(outcome.number))
        return replies

    def _reply(self, outcome: Outcome) -> Reply:
        state = self._states[outcome.number]
        try:
            tokens, restart, cut = self._continuation(outcome)
        except EnvironmentMisconfigured:
            raise
        except UserError as error:
            state.fail(str(error))
            return self._ended(outcome.number)
        state.cut += cut
        return Reply(*divmod(outcome.number, self.size), tokens, restart)

    def _continuation(self, outcome: Outcome) -> Continuation:
        """Adds an observation to the history of its trajectory. Raises UserError if this is not possible."""
        histories = self.player.histories(self._chats[outcome.number // self.size])
        return histories.add(self._states[outcome.number].history, outcome.observation)

    def _ended(self, number: int) -> Reply:
        self._end(number)
        return Reply(*divmod(number, self.size), None)

    def _end(self, number: int) -> None:
        """Requests the end of a trajectory from its environment, unless the trajectory is already over."""
        state = self._states[number]
        if state.over:
            return
        state.over = True
        self._begin_call("finish", number)


def _check_available(failures: Sequence[Sequence[str] | None]) -> None:
    """Raises EngineLost if every trajectory has a failure of the kind `unavailable`. `failures` has one entry per
    trajectory; an entry is None if the trajectory has no failure."""
    if not failures or any(failure is None or failure[0] != "unavailable" for failure in failures):
        return
    assert failures[0] is not None
    raise EngineLost(
        f"environment: its service is unavailable; all {len(failures)} trajectories failed. {failures[0][1]} Start the "
        "server, then start the run with the same command; it resumes."
    )


def first_observation(environments: Environments, row: Mapping[str, Any], where: str) -> str | Sequence[Message] | None:
    """Resets one environment with the columns of a data row, and returns the first observation of this environment.
    Ends the environment afterwards.

    Args:
      row: the columns of the data row. All columns except `prompt` are passed to the environment.
      where: text at the beginning of the error message.

    Raises:
      EnvironmentMisconfigured: the environment raised this error.
      UserError: the environment failed for another reason.
    """
    environments.reset(0, {name: value for name, value in row.items() if name != "prompt"})
    (outcome,) = environments.outcomes(wait=True)
    check_configured(outcome.failure)
    if outcome.failure is not None:
        raise UserError(f"{where}{outcome.failure.reason}")
    environments.finish(0)
    environments.outcomes(wait=True)
    return outcome.observation
