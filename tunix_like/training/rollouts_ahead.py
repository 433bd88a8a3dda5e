"""Collects the groups of completions of each training step, optionally during the updates of the previous step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from tunix_like.data.stream import Resumable
from tunix_like.errors import EngineLost
from tunix_like.rollout.collection import Collector
from tunix_like.rollout.rollouts import Rollout
from tunix_like.runtime.profile import Clock
from tunix_like.training.engine import WrappedEngine
from tunix_like.types import Engine, Sample

_Collected = tuple[Rollout, dict[str, Any]] | None
"""The result of `Collector`."""


class _Position(NamedTuple):
    """A position in the training data: the state of the data iterator, and the number of prompts drawn so far."""

    state: Any
    drawn: int


class _DroppedError(Exception):
    """Raised in the sampling thread if the call of `train` has ended. The sampled groups are then dropped."""


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

    With `max_staleness` 1, the groups of step `n + 1` are collected in a thread while the updates of step `n` run, and
    are sampled with the weights before these updates. With `max_staleness` 0, the groups of step `n + 1` are sampled
    with the weights after the updates of step `n`. The groups of the first step of a call of `train` are always sampled
    with the current weights.

    Args:
      collector: reads prompts from the data, and samples and scores a group of completions for each prompt.
      engine: generates the completions.
      iterator: the iterator over the data from which `collector` reads; None if its position cannot be saved.
      max_staleness: 0 or 1.
    """

    def __init__(self, collector: Collector, engine: Engine, iterator: Resumable | None, max_staleness: int):
        self.collector, self.engine = collector, engine
        self._iterator = iterator
        self._executor = ThreadPoolExecutor(1, "rollout") if max_staleness else None
        self._dropped = threading.Event()
        if max_staleness:
            self.collector.engine = _Droppable(engine, self._dropped)
        self._ahead: tuple[Future[_Collected], Clock] | None = None
        self._position = _Position(None, 0)

    def take(self, step: int, params: Any, last: bool) -> _Collected:
        """Returns the groups of completions of training step `step` and their metrics, or None if the data is
        exhausted. With `max_staleness` 1, also starts to collect the groups of the next step.

        The metrics include the seconds of the parts of this step that the caller waited for (`time/<part>`). With
        `max_staleness` 1, they also include the staleness, and `sampler_time/<part>`: seconds of the parts of the
        collection that ran in the sampling thread, during the previous step.

        Args:
          params: the weights before the update of this step.
          last: whether this is the last step.

        Raises:
          The errors of the collection. After `EngineLost`, the data is reset to the position before the step.
        """
        clock = Clock()
        if self._ahead is None:
            collected = self._collect(step, self._placed(params, clock), clock)
            times = {"staleness": 0.0, "sampler_time/idle": 0.0, "time/trainer_idle": 0.0}
        else:
            future, sampler = self._ahead
            collected, self._ahead = future.result(), None
            clock.lap("trainer_idle")
            sampler.lap("idle")
            times = {"staleness": 1.0} | {f"sampler_{name}": seconds for name, seconds in sampler.seconds.items()}
        if collected is None:
            return None
        if self._executor is not None and not last:
            self._position, placed, sampler = self._here(), self._placed(params, clock), Clock()
            self._ahead = self._executor.submit(self._collect, step + 1, placed, sampler), sampler
        rollout, metrics = collected
        metrics |= getattr(self.engine, "transfer_metrics", {})  # the in-process sampler has none
        return rollout, metrics | ({} if self._executor is None else times) | clock.seconds

    def get_state(self) -> Any:
        """Returns the position in the training data without prompts that are already drawn for the next step; None if
        the position cannot be saved."""
        return (self._here() if self._ahead is None else self._position).state

    def set_state(self, state: Any) -> None:
        """Sets the position in the training data. Must not be called while the next step is collected in a thread."""
        assert self._iterator is not None
        self._iterator.set_state(state)

    @property
    def drawn(self) -> int:
        """The number of prompts drawn from the data so far, without those that are already drawn for the next step."""
        return self.collector.drawn if self._ahead is None else self._position.drawn

    def resume(self, drawn: int) -> None:
        """Continues a resumed run after the first `drawn` prompts of the data.

        If the position in the data could not be saved, these prompts are read and dropped.
        """
        self.collector.drawn, self.collector.started = drawn, True
        if self._iterator is None:
            read = drawn // self.collector.batch_size
            next(itertools.islice(self.collector.batches, read, read), None)

    def wait(self) -> None:
        """Waits until the sampling thread does not use the engine."""
        if self._ahead is not None:
            wait([self._ahead[0]])

    def close(self) -> None:
        """Drops the groups that were collected for the next step, and resets the data to the position before this step.
        A running sampling thread stops after the next finished completion."""
        self._dropped.set()
        if self._executor is not None:
            self._executor.shutdown()
        if self._ahead is not None:
            self._ahead = None
            self._return_to(self._position)

    def _placed(self, params: Any, clock: Clock) -> Any:
        placed = self.engine.place(params)
        clock.lap("reshard")
        return placed

    def _here(self) -> _Position:
        return _Position(None if self._iterator is None else self._iterator.get_state(), self.collector.drawn)

    def _return_to(self, position: _Position) -> None:
        self.collector.drawn = position.drawn
        if self._iterator is not None:
            self._iterator.set_state(position.state)

    def _collect(self, step: int, params: Any, clock: Clock) -> _Collected:
        before = self._here()
        try:
            return self.collector(step, params, clock)
        except EngineLost:
            self._return_to(before)
            raise
