"""Passes requests from the event loop of the HTTP server to the thread that samples, and new tokens back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from tunix_like.rollout.serving.batcher import Batcher
from tunix_like.rollout.serving.device import Slots
from tunix_like.rollout.serving.fields import RequestError
from tunix_like.rollout.serving.jobs import Job, Part
from tunix_like.rollout.serving.metrics import Metrics


class Hub:
    """Connects the event loop of the HTTP server with the `Batcher`, which samples completions in its own thread.

    Args:
      max_waiting: a new request is refused if at least this number of completions waits.
    """

    def __init__(self, slots: Slots, metrics: Metrics, max_waiting: int):
        self.batcher = Batcher(slots, self._from_thread)
        self.metrics, self._max_waiting, self._rows = metrics, max_waiting, slots.count
        self._loop: asyncio.AbstractEventLoop | None = None
        self.queues: dict[Job, asyncio.Queue[tuple[Job, Part]]] = {}

    def open(self) -> None:
        """Starts the thread that samples. This method must be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.batcher.start()

    def check_room(self) -> None:
        """Raises RequestError with the status 429 if at least `max_waiting` completions wait to be started."""
        waiting = self.batcher.waiting
        if waiting >= self._max_waiting:
            message = f"{waiting} completions are waiting, and the limit is {self._max_waiting}; try again later"
            raise RequestError(message, http=429, kind="rate_limit_error")

    def retry_after(self) -> int:
        """Returns an estimate of the time until the waiting completions are started: 1 to 60 seconds."""
        latency = self.metrics.latency
        mean = latency.sum / max(sum(latency.counts), 1)
        return max(1, min(60, math.ceil(mean * self.batcher.waiting / self._rows)))

    def _from_thread(self, parts: Sequence[tuple[Job, Part]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, parts)
        except RuntimeError:  # the loop has ended, so there are no requests
            return

    def _deliver(self, parts: Sequence[tuple[Job, Part]]) -> None:
        for job, part in parts:
            self.metrics.generated_tokens += len(part.tokens)
            if (queue := self.queues.get(job)) is not None:
                queue.put_nowait((job, part))


class Exchange:
    """Submits the prompts of one request for sampling, and receives the new tokens of their completions.

    An exchange is an asynchronous context manager. On exit, completions that have not ended are cancelled.
    """

    def __init__(self, hub: Hub, jobs: Sequence[Job], began: float):
        self._hub, self._jobs, self._began = hub, jobs, began
        self._left = {(job, sample) for job in jobs for sample in range(job.count)}
        self._queue: asyncio.Queue[tuple[Job, Part]] = asyncio.Queue()

    async def __aenter__(self) -> Exchange:
        for job in self._jobs:
            self._hub.queues[job] = self._queue
        self._hub.metrics.prompt_tokens += sum(len(job.prompt) for job in self._jobs)
        self._hub.batcher.submit(self._jobs)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            del self._hub.queues[job]
        for job in {job for job, _ in self._left}:
            self._hub.batcher.cancel(job)

    async def parts(self) -> AsyncIterator[tuple[Job, Part]]:
        """Yields the new tokens of a request's completions, until all completions have ended. Each item is a pair of a
        job (a prompt with its completions) and a `Part` (new tokens of one completion)."""
        first = True
        while self._left:
            job, part = await self._queue.get()
            if (job, part.sample) not in self._left:
                continue
            if first:
                self._hub.metrics.first_token.add(time.monotonic() - self._began)
                first = False
            if part.reason is not None:
                self._left.discard((job, part.sample))
            yield job, part

    def stop(self, job: Job, sample: int) -> None:
        """Cancels completion `sample` of a job, which is a prompt with its completions. Afterwards the iterator `parts`
        yields no further tokens of this completion."""
        if (job, sample) in self._left:
            self._left.discard((job, sample))
            self._hub.batcher.cancel(job, sample)
