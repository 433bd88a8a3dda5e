"""Collects the groups of completions of each training step, optionally several steps ahead of the updates."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from tunix_like.data.stream import Prompt, Resumable
from tunix_like.errors import EngineLost
from tunix_like.rollout.collection import Collected, Collector
from tunix_like.rollout.saved import from_text, to_text
from tunix_like.runtime.profile import Clock
from tunix_like.training.engine import WrappedEngine
from tunix_like.types import Engine, Sample


class _Position(NamedTuple):
    """A position in the training data: the state of the data iterator, and the number of prompts drawn so far."""

    state: Any
    drawn: int


@dataclasses.dataclass
class _Ahead:
    """A step whose groups are collected ahead of the updates.

    Attributes:
      version: number of the last step whose update the sampler's weights contain; 0 for the initial weights.
      position: the position in the data before this step; None until its sampling begins.
      drawn: the number of prompts drawn from the data at the end of the sampling.
      clock: the times of the parts of the collection.
      sampled: the result of `Collector.sample`.
      collected: the result of `Collector`.
    """

    step: int
    version: int
    position: _Position | None = None
    drawn: int = 0
    clock: Clock = dataclasses.field(default_factory=Clock)
    sampled: Future[Callable[[], Collected] | None] = dataclasses.field(default_factory=Future)
    collected: Future[Collected | None] = dataclasses.field(default_factory=Future)


class _DroppedError(Exception):
    """Raised in the sampling thread if the call of `train` has ended, or the sampling of an earlier step has failed.
    The sampled groups are then dropped."""


class _Droppable(WrappedEngine):
    """Wraps an engine: if the event `dropped` is set, `generate` raises `_DroppedError` after the next sample."""

    def __init__(self, engine: Engine, dropped: threading.Event):
        super().__init__(engine)
        self.dropped = dropped

    def generate(self, *arguments: Any) -> Iterator[Sample]:
        for sample in self.engine.generate(*arguments):
            yield sample
            if self.dropped.is_set():
                raise _DroppedError


class RolloutsAhead:
    """Collects the groups of completions of each training step.

    With `max_staleness` S above 0, the groups of step `n + S` are sampled while the updates of step `n` run, with the
    weights before these updates. Which weights sample a step does not depend on the speed of any part, so runs are
    repeatable. One thread samples and another one scores, both in the order of the steps: with S above 1, the rewards
    of a step can take the time of S - 1 steps. Weights are placed only when all started sampling has ended, so the
    engine never holds two versions.

    The groups of the first step of a call of `train` are sampled with the current weights, and those of the S steps
    after it with the same weights. A resumed run has the groups that were collected before its checkpoint.

    Args:
      collector: reads prompts from the data, and samples and scores a group of completions for each prompt.
      engine: generates the completions.
      iterator: the iterator over the data from which `collector` reads; None if its position cannot be saved.
      max_staleness: the number of steps that the sampling is ahead of the updates.
      total: the number of the last step; None if it is unknown.
    """

    def __init__(
        self, collector: Collector, engine: Engine, iterator: Resumable | None, max_staleness: int, total: int | None
    ):
        self.collector = collector
        self.engine = engine
        self._iterator = iterator
        self._max_staleness = max_staleness
        self._total = total
        self._sampling_thread = ThreadPoolExecutor(1, "rollouts ahead")
        self._scoring_thread = ThreadPoolExecutor(1, "rewards ahead")
        self._dropped = threading.Event()
        if max_staleness:
            self.collector.engine = _Droppable(engine, self._dropped)
        self._ahead: collections.deque[_Ahead] = collections.deque()
        self._taken: _Ahead | None = None
        self._restored = "[]"

    def take(self, step: int, params: Any) -> Collected | None:
        """Returns the groups of completions of training step `step` and their metrics, or None if the data is
        exhausted. With `max_staleness` above 0, also starts to collect the groups of later steps.

        The metrics include the seconds of the parts of this step that the caller waited for (`time/<part>`). With
        `max_staleness` above 0, they also include the staleness, and `sampler_time/<part>`: seconds of the parts of the
        collection that ran in the threads, during previous steps.

        Args:
          params: the weights before the update of this step.

        Raises:
          The errors of the collection. After `EngineLost`, the data is reset to the position before the step.
        """
        clock = Clock()
        placed = None
        if self._ahead:
            first = self._ahead[0]
            collected = first.collected.result()
            clock.lap("trainer_idle")
            first.clock.lap("idle", traced=False)
            times = {f"sampler_{name}": seconds for name, seconds in first.clock.seconds.items()}
            times["staleness"] = float(step - 1 - first.version)
        else:
            before = self._here()
            placed = self._placed(params, clock)
            collected = self._collect(step, placed, clock)
            times = {"staleness": 0.0, "sampler_time/idle": 0.0, "time/trainer_idle": 0.0}
            first = _Ahead(step, step - 1, before, self.collector.drawn)
            first.sampled.set_result(None)
            first.collected.set_result(collected)
        if collected is None:
            return None
        self._start(step, params, placed, clock)
        if self._ahead and self._ahead[0].step == step:
            self._ahead.popleft()  # after the start, which can fail: a checkpoint then contains these groups
        self._taken = first
        rollout, metrics = collected
        metrics = metrics | getattr(self.engine, "transfer_metrics", {})  # the in-process sampler has none
        return rollout, metrics | (times if self._max_staleness else {}) | clock.seconds

    def put_back(self) -> None:
        """Undoes the last `take`, whose step could not be completed: a checkpoint then contains its groups."""
        assert self._taken is not None
        self._ahead.appendleft(self._taken)

    def _start(self, step: int, params: Any, placed: Any, clock: Clock) -> None:
        """Starts to collect the groups of the steps up to `step + max_staleness`, with the weights before the update of
        `step`."""
        newest = self._ahead[-1].step if self._ahead else step
        last = step + self._max_staleness if self._total is None else min(step + self._max_staleness, self._total)
        if newest >= last:
            return
        wait([ahead.sampled for ahead in self._ahead])
        clock.lap("trainer_idle")
        self.collector.on_first_prompts = None  # the next step that is sampled is not the next to be updated
        placed = self._placed(params, clock) if placed is None else placed
        for number in range(newest + 1, last + 1):
            ahead = _Ahead(number, version=step - 1)
            ahead.sampled = self._sampling_thread.submit(self._sample, ahead, placed)
            ahead.collected = self._scoring_thread.submit(self._score, ahead)
            self._ahead.append(ahead)

    def _sample(self, ahead: _Ahead, params: Any) -> Callable[[], Collected] | None:
        if self._dropped.is_set():
            raise _DroppedError
        ahead.position = self._here()
        ahead.clock = Clock()
        try:
            sampled = self.collector.sample(ahead.step, params, ahead.clock)
        except BaseException:
            self._dropped.set()  # later steps must not take the prompts after those of this step
            raise
        ahead.drawn = self.collector.drawn
        return sampled

    def _score(self, ahead: _Ahead) -> Collected | None:
        score = ahead.sampled.result()
        ahead.clock.lap("idle", traced=False)
        return None if score is None else score()

    def get_state(self) -> Any:
        """Returns the position in the training data before the first step that was not taken, and the groups that are
        collected for later steps. Waits until they are collected."""
        position = self._first().state
        if not self._ahead:
            return position
        ready = []
        for ahead in self._ahead:
            if ahead.collected.exception() is not None or (collected := ahead.collected.result()) is None:
                break
            if not collected[0].scores.scored.any():  # a resumed run samples this step and the following ones again
                break
            about = {"step": ahead.step, "version": ahead.version, "drawn": ahead.drawn, "seconds": ahead.clock.seconds}
            ready.append((about, collected))
        return {"position": position, "ahead": to_text(ready)}

    def set_state(self, state: Any) -> None:
        """Sets the position in the training data. Must be called before the first step, and before `resume`."""
        assert self._iterator is not None
        if isinstance(state, dict) and state.keys() == {"position", "ahead"}:
            state, self._restored = state["position"], state["ahead"]
        self._iterator.set_state(state)

    @property
    def drawn(self) -> int:
        """The number of prompts drawn from the data so far, without those that are already drawn for later steps."""
        return self._first().drawn

    def resume(self, drawn: int, keep_ahead: bool) -> None:
        """Continues a resumed run after the first `drawn` prompts of the data.

        If the position in the data could not be saved, these prompts are read and dropped.

        Args:
          keep_ahead: whether the groups that were collected for later steps are used. Otherwise they are sampled again,
            e.g. because another reward function has scored them.
        """
        self.collector.drawn = drawn
        self.collector.started = True
        if self._iterator is None:
            read = drawn // self.collector.batch_size
            next(itertools.islice(self.collector.batches, read, read), None)
        for about, (rollout, metrics) in from_text(self._restored) if keep_ahead else []:
            ahead = _Ahead(about["step"], about["version"], self._here(), about["drawn"])
            ahead.clock.seconds = about["seconds"]
            rows: dict[int, Prompt] = {}  # the data columns are not saved, so the prompts are read again
            while self.collector.drawn < ahead.drawn:
                for prompt in next(self.collector.batches):
                    rows[self.collector.drawn] = prompt
                    self.collector.drawn += 1
            problems = [
                dataclasses.replace(problem, columns=rows[problem.number].columns, source=rows[problem.number].source)
                for problem in rollout.problems
            ]
            ahead.sampled.set_result(None)
            ahead.collected.set_result((rollout._replace(problems=problems), metrics))
            self._ahead.append(ahead)
        self._restored = "[]"

    def wait(self) -> None:
        """Waits until no thread uses the engine or the rewards."""
        wait([ahead.collected for ahead in self._ahead])

    def close(self) -> None:
        """Drops the groups that were collected for later steps, and resets the data to the position before them. A
        running sampling thread stops after the next finished completion."""
        self._dropped.set()
        for executor in (self._sampling_thread, self._scoring_thread):
            executor.shutdown(cancel_futures=True)
        position = self._ahead[0].position if self._ahead else None
        self._ahead.clear()
        if position is not None:
            self._return_to(position)

    def _placed(self, params: Any, clock: Clock) -> Any:
        placed = self.engine.place(params)
        clock.lap("reshard")
        return placed

    def _here(self) -> _Position:
        return _Position(None if self._iterator is None else self._iterator.get_state(), self.collector.drawn)

    def _first(self) -> _Position:
        """Returns the position in the data before the first step that was not taken."""
        if not self._ahead:
            return self._here()
        wait([self._ahead[0].sampled])
        assert self._ahead[0].position is not None
        return self._ahead[0].position

    def _return_to(self, position: _Position) -> None:
        self.collector.drawn = position.drawn
        if self._iterator is not None:
            self._iterator.set_state(position.state)

    def _collect(self, step: int, params: Any, clock: Clock) -> Collected | None:
        before = self._here()
        try:
            return self.collector(step, params, clock)
        except EngineLost:
            self._return_to(before)
            raise
