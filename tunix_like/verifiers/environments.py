"""Runs environments of the package `verifiers`.

The harness is the code of an environment that decides which conversation the model sees. The harness sends chat
requests. A turn of the policy is the answer to a request, and the next request is the next observation.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from tunix_like.config.schema import Config
from tunix_like.environments.agent_calls import FULL, Call, answer_of, count_of, refusal_of
from tunix_like.environments.agents import AgentPlayer
from tunix_like.environments.chat_messages import RequestError
from tunix_like.environments.kinds import MOST_WAITING, check_waiting
from tunix_like.environments.outcomes import Outcome
from tunix_like.errors import UserError
from tunix_like.verifiers.process import SECONDS_TO_END, VerifiersProcess
from tunix_like.verifiers.tasks import TASK_COLUMN, settings_of
from tunix_like.workers.failures import LONGEST_REASON, Failure
from tunix_like.workers.messages import Lost
from tunix_like.workers.routes import COUNT

UNATTENDED_SECONDS = 1.0
"""If `outcomes` is not called for longer, for example during a compilation, this time does not count towards the time
limits, because messages are read only in `outcomes`."""


@dataclasses.dataclass
class _Episode:
    """A running episode of an environment. During the episode, the environment sends chat requests to the policy.

    Attributes:
      id: number of the episode in the environment's process. Each number is used only once, unlike the numbers of
        trajectories.
      calls: the unanswered requests, oldest first. The policy answers one request at a time.
      deadline: time (`time.monotonic`) by which the next request or the end of the episode must arrive; None while the
        policy is sampling an answer.
      closing: whether further requests of the episode are refused.
      end: the outcome of the episode if it ended while the policy was sampling; otherwise None.
    """

    id: int
    calls: collections.deque[Call] = dataclasses.field(default_factory=collections.deque)
    deadline: float | None = None
    closing: bool = False
    end: Outcome | None = None


class VerifiersEnvironments:
    """Runs the episodes of one environment of the package `verifiers` in a separate process (see `Environments`).

    During an episode, the environment sends chat requests, and turns of the policy answer these requests. An
    observation has only the new messages of a request. The attribute `calls` has the whole request.

    Args:
      settings: settings of the environment (see `program.load`).
      timeout_seconds: maximum time from the start of an episode to its first request, and from an answer to the next
        request or to the end of the episode.
      workers: maximum number of running episodes that have not sent their first request yet.

    Attributes:
      calls: the latest request of each trajectory, by number of the trajectory.
      count: returns the number of tokens of a request; set by `make_player`.
      tokens: number of tokens of the prompt and of the turn, by number of the trajectory. The caller sets these two
        numbers before `step`, which sends them to the environment.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    one_conversation = True
    count: Callable[[Call], int]

    def __init__(self, settings: Mapping[str, Any], timeout_seconds: float = 20.0, workers: int = 32):
        self.settings = settings
        self.subject = f"data.path={settings.get('path')}"
        self.timeout_seconds = timeout_seconds
        self.workers = workers
        self._ids = itertools.count()
        self._process: VerifiersProcess | None = None
        self._clear()

    @property
    def where(self) -> str:
        return f"in one process, {self.timeout_seconds:g} s a step"

    def make_player(self, *given: Any) -> AgentPlayer:
        player = AgentPlayer(self, *given)
        self.count = lambda call: len(player.tokens(call))
        return player

    def _clear(self) -> None:
        self.calls: dict[int, Call] = {}
        self.tokens: dict[int, tuple[int, int]] = {}
        self._episodes: dict[int, _Episode] = {}
        self._numbers: dict[int, int] = {}
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._starting: set[int] = set()
        self._cancelled: dict[int, float] = {}
        self._ready: list[Outcome] = []
        self._looked = 0.0  # value of `time.monotonic` at the end of the last call of `outcomes`

    def reset(self, number: int, columns: Mapping[str, Any]) -> None:
        """Queues an episode with the task in the column `task`. The first chat request of the episode becomes the first
        observation, which `outcomes` returns."""
        self.calls.pop(number, None)
        task = columns.get(TASK_COLUMN)
        if isinstance(task, Mapping):
            self._waiting.append((number, task))
        else:
            self._ready.append(_failed(number, "error", f"the row has no column '{TASK_COLUMN}'."))

    def step(self, number: int, completion: str, reason: str = "stop") -> None:
        """Sends a turn of the policy to the environment, as the answer to the environment's oldest unanswered chat
        request.

        Args:
          completion: the text of the turn.
          reason: "stop", or "length" if the token limit ended the turn. After "length", all later requests of the
            episode are refused.
        """
        episode = self._episodes.get(number)
        if episode is None:
            self._ready.append(_failed(number, "error", "the episode has ended."))
            return
        episode.closing = reason == "length"
        if episode.end is not None:
            self._ready.append(episode.end)
            self._drop(number)
            return
        answer = answer_of(episode.calls.popleft(), completion, reason, self.tokens.pop(number, (0, 0)))
        self._send(answer)
        if episode.calls and not episode.closing:
            self._observe(number, episode)
        else:
            episode.deadline = time.monotonic() + self.timeout_seconds

    def finish(self, number: int) -> None:
        """Ends a trajectory, and refuses further chat requests of its episode. The outcome has the reward of the
        episode."""
        episode = self._episodes.get(number)
        if episode is None:
            self._ready.append(Outcome(number))
        elif episode.end is not None:
            self._ready.append(episode.end._replace(done=False))
            self._drop(number)
        else:
            episode.closing = True
            episode.deadline = time.monotonic() + self.timeout_seconds
            self._refuse(episode)

    def outcomes(self, wait: bool) -> list[Outcome]:
        """Returns the outcomes of `reset`, `step` and `finish` that are ready and were not returned before; see
        `Environments.outcomes`."""
        self._shift()
        self._take(0.0)
        self._expire()
        if self._waiting and not self._episodes:
            self._settle()
        self._start()
        while wait and not self._ready and (limits := self._deadlines()):
            self._take(max(0.0, min(limits) - time.monotonic()))
            self._expire()
            self._start()
        ready = self._ready
        self._ready = []
        self._looked = time.monotonic()
        return ready

    def cancel(self, number: int) -> None:
        """Cancels the episode of a trajectory. The trajectory gets no outcome."""
        if (episode := self._episodes.get(number)) is not None:
            self._send({"kind": "cancel", "episode": episode.id})
            self._cancelled[episode.id] = time.monotonic() + SECONDS_TO_END
            self._drop(number)

    def close(self) -> None:
        """Ends the process of the environment, and all its episodes."""
        process = self._process
        self._process = None
        self._clear()
        if process is not None:
            process.kill()

    def _deadlines(self) -> list[float]:
        return [each.deadline for each in self._episodes.values() if each.deadline is not None]

    def _shift(self) -> None:
        """Shifts all deadlines by the time without a call of `outcomes`, if it is long (see `UNATTENDED_SECONDS`)."""
        now = time.monotonic()
        if now - self._looked <= UNATTENDED_SECONDS:
            return
        for episode in self._episodes.values():
            if episode.deadline is not None:
                episode.deadline += now - max(self._looked, episode.deadline - self.timeout_seconds)
        for number, limit in self._cancelled.items():
            self._cancelled[number] = limit + now - max(self._looked, limit - SECONDS_TO_END)

    def _settle(self) -> None:
        """Waits until the process of the environment has ended all cancelled episodes, because they would delay new
        episodes."""
        while self._cancelled:
            self._take(max(0.0, min(self._cancelled.values()) - time.monotonic()))
            self._expire()

    def _start(self) -> None:
        """Starts queued episodes while the number of running episodes that have not sent their first chat request is
        less than `workers`."""
        while self._waiting and len(self._starting) < self.workers:
            if self._process is None:
                self._process = VerifiersProcess(self.settings)
            number, task = self._waiting.popleft()
            self._drop(number)
            episode = self._episodes[number] = _Episode(next(self._ids))
            episode.deadline = time.monotonic() + self.timeout_seconds
            self._numbers[episode.id] = number
            self._starting.add(number)
            self._send({"kind": "run", "episode": episode.id, "task": task})

    def _take(self, seconds: float) -> None:
        """Handles the messages that the process of the environment has sent. Waits up to `seconds` for the first
        message."""
        try:
            while self._process is not None and (message := self._process.next(seconds)) is not None:
                seconds = 0.0
                if message["kind"] == "unusable":
                    self._lose(message["reason"])
                    return
                if message["kind"] == "request" and message["route"] == COUNT:
                    self._count(message)
                    continue
                number = self._numbers.get(message["episode"])
                if message["kind"] == "end":
                    self._cancelled.pop(message["episode"], None)
                    if number is not None:
                        self._end(number, message)
                elif number is not None:
                    self._request(number, self._episodes[number], message)
                else:
                    self._send(refusal_of(message["call"], message["route"], 409, "the episode is over"))
        except Lost as error:
            self._lose(str(error))

    def _count(self, message: Mapping[str, Any]) -> None:
        """Answers a request for the number of tokens of a prompt, which may belong to no episode."""
        try:
            call = Call.of(message["call"], COUNT, message["body"])
            self._send(count_of(call, self.count(call)))
        except UserError as error:
            self._send(refusal_of(message["call"], COUNT, 400, str(error)))

    def _request(self, number: int, episode: _Episode, message: Mapping[str, Any]) -> None:
        self._starting.discard(number)
        try:
            call = Call.of(message["call"], message["route"], message["body"])
        except RequestError as error:
            self._send(refusal_of(message["call"], message["route"], error.http, str(error)))
            return
        episode.calls.append(call)
        if episode.closing:
            self._refuse(episode)
        elif len(episode.calls) == 1:
            self._observe(number, episode)

    def _observe(self, number: int, episode: _Episode) -> None:
        """Adds an outcome. Its observation has the new messages of the oldest unanswered chat request of an episode."""
        episode.deadline = None
        call = self.calls[number] = episode.calls[0]
        self._ready.append(Outcome(number, observation=call.latest))

    def _refuse(self, episode: _Episode) -> None:
        """Stops an episode and refuses its unanswered chat requests. The environment computes the reward of the episode
        from its current state."""
        self._send({"kind": "stop", "episode": episode.id})
        while episode.calls:
            call = episode.calls.popleft()
            self._send(refusal_of(call.id, call.route, 400, FULL))

    def _end(self, number: int, message: Mapping[str, Any]) -> None:
        """Records the end of an episode, which `message` reports."""
        episode = self._episodes[number]
        outcome = Outcome(number, reward=message["reward"] or 0.0, done=not episode.closing, info=message["metrics"])
        if (problem := message.get("error")) is not None:
            outcome = _failed(number, "timeout" if message.get("timeout") else "error", problem)
        if episode.deadline is None:
            episode.end = outcome
        else:
            self._ready.append(outcome)
            self._drop(number)

    def _expire(self) -> None:
        """Cancels the episodes whose deadline has passed. Kills the process of the environment if it does not end a
        cancelled episode within `SECONDS_TO_END`."""
        now = time.monotonic()
        for number, episode in list(self._episodes.items()):
            if episode.deadline is not None and episode.deadline <= now:
                what = "sent no request" if number in self._starting else "neither sent a request nor ended"
                reason = f"the episode has {what} within environment.timeout_seconds={self.timeout_seconds:g}."
                self.cancel(number)
                self._ready.append(_failed(number, "timeout", reason))
        if any(limit <= now for limit in self._cancelled.values()):
            self._lose("its process does not answer, so it was started again")

    def _lose(self, why: str) -> None:
        """Kills the process of the environment. All running episodes fail with the reason `why`."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
        for number, episode in list(self._episodes.items()):
            outcome = _failed(number, "error", f"the environment is lost: {why}")
            if episode.deadline is None:
                episode.end = outcome
                continue
            self._drop(number)
            self._ready.append(outcome)
        self._cancelled.clear()
        self._starting.clear()

    def _drop(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        self._starting.discard(number)
        if episode is not None:
            self._numbers.pop(episode.id, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send(message)


def make(config: Config) -> VerifiersEnvironments:
    """Makes the environments of `data.path`, which run in one process."""
    section = config.environment
    check_waiting(section)
    workers = MOST_WAITING if section.workers is None else section.workers
    return VerifiersEnvironments(settings_of(config.data), section.timeout_seconds, workers)


def _failed(number: int, kind: Any, reason: str) -> Outcome:
    return Outcome(number, failure=Failure(kind, f"verifiers: {reason}"[:LONGEST_REASON]))
