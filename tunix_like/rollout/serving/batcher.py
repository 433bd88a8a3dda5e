"""Samples completions with continuous batching: one decoder samples the completions of all callers together.

A job is a prompt with its completions. A slot holds one completion with its prompt. A thread repeats two actions: it
starts completions in free slots, and then samples some tokens of all completions. This file is independent of HTTP.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tunix_like.models.sharding import scope
from tunix_like.rollout.serving.device import Sampled, Slots
from tunix_like.rollout.serving.jobs import Job, Part
from tunix_like.rollout.serving.programs import MOST_STEPS, prompts_at_once

SECONDS_OF_CALL = 0.04
"""Target time in seconds of one call of the decode loop. Between two calls, the new tokens are delivered and waiting
completions are started."""

FEWEST_STEPS = 4
"""Minimum number of decode steps in one call of the decode loop, even if these steps take longer than the target time
of a call. Each call copies the caches and waits for the host, so very short calls are inefficient."""

STEPS_BESIDE_WAITING = 4
"""Maximum number of decode steps in one call of the decode loop if completions wait although slots are free. This
happens if the next prompts would exceed the limit `PREFILL_TOKENS`."""

PREFILL_TOKENS = 2048
"""Maximum number of prompt tokens, padding included, that are prefilled between two calls of the decode loop. The limit
does not apply to the first prefill after a call, or if no completion is running."""

_LOG = logging.getLogger(__name__)

Deliver = Callable[[Sequence[tuple[Job, Part]]], None]
"""`f(parts)`: receives new tokens of completions. The function is called in the thread that samples, and must not
block."""


class _Row(NamedTuple):
    """A completion that is being sampled: its job (a prompt with its completions), and its index in this job."""

    job: Job
    sample: int


class Batcher:
    """Samples the completions of jobs in a separate thread. A job is a prompt with its completions.

    Args:
      slots: the arrays on the device. After `start`, only the batcher's thread uses these arrays.
      deliver: called with new tokens of completions, as `Part` objects. The parts of a completion are delivered in
        their order. After a completion is cancelled, at most one more part of it is delivered.
    """

    def __init__(self, slots: Slots, deliver: Deliver):
        self.slots, self.deliver = slots, deliver
        self._rows: list[_Row | None] = [None] * slots.count
        self._keep = np.ones(slots.count, bool)
        self._waiting: collections.deque[Job] = collections.deque()
        self._cancelled: list[tuple[Job, int | None]] = []
        self._changed = threading.Condition()
        self._closed = self._lost = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        """Starts the thread that samples."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, each a prompt with its completions, to the queue. This method can be called from any thread."""
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job, sample: int | None = None) -> None:
        """Cancels completion `sample` of a job, or all completions of the job if `sample` is None. A job is a prompt
        with its completions. Completions that have ended are not affected."""
        with self._changed:
            self._cancelled.append((job, sample))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the current call of the decode loop, and waits until the thread has ended. Completions
        that have not ended are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Number of submitted completions that have not been started."""
        with self._changed:
            return sum(job.count - job.started for job in self._waiting)

    @property
    def running(self) -> int:
        """Number of completions that are being sampled."""
        return sum(row is not None for row in self._rows)

    def _run(self) -> None:
        with scope(self.slots.mesh):
            while self._wait():
                try:
                    self._step()
                except Exception:  # e.g. lack of memory: the requests fail and the server continues
                    _LOG.exception("the batcher failed; all requests are answered with an error")
                    self._fail()

    def _wait(self) -> bool:
        """Blocks until a completion can be started, sampled or cancelled, or until the batcher is closed. Returns False
        if the batcher is closed."""
        with self._changed:
            while not (self._closed or self._waiting or self._cancelled or self.running):
                self._changed.wait()
            return not self._closed

    def _step(self) -> None:
        if self._lost:
            self.slots.reset()
            self._lost = False
        self._cancel()
        self._start()
        live = self.running
        if not live:
            return
        self._fit(0)
        waiting = bool(self._waiting)
        steps = int(np.clip(SECONDS_OF_CALL / max(self.slots.pace, 1e-6), FEWEST_STEPS, MOST_STEPS))
        if waiting and live < self.slots.count:
            steps = min(steps, STEPS_BESIDE_WAITING)
        stop_at = max(0, live - max(1, self.slots.count // 8)) if waiting else 0
        sampled = self.slots.advance(self._keep, stop_at, steps)
        self._keep[:] = True
        parts = self._parts(sampled)
        if parts:
            self.deliver(parts)

    def _occupied(self) -> list[int]:
        return [slot for slot, row in enumerate(self._rows) if row is not None]

    def _fit(self, prompt: int) -> None:
        """Makes the caches of keys and values wide enough for one more token of each running completion, for the
        prompts of these completions, and for a new prompt that is padded to `prompt` tokens."""
        rows = [row for row in self._rows if row is not None]
        prompts = [self.slots.prompt_width(len(row.job.prompt)) for row in rows]
        self.slots.fit(max([prompt, *prompts]), int(self.slots.ages[self._occupied()].max(initial=0)) + 1)

    def _cancel(self) -> None:
        """Frees the slots of cancelled completions, and removes cancelled jobs from the queue. A slot holds one running
        completion, and a job is a prompt with its completions."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            for job, sample in cancelled:
                if sample is None and job in self._waiting:
                    self._waiting.remove(job)
                    job.prefilled = None
        wanted = {(id(job), sample) for job, sample in cancelled}
        for slot, row in enumerate(self._rows):
            if row is not None and ((id(row.job), None) in wanted or (id(row.job), row.sample) in wanted):
                self._rows[slot], self._keep[slot] = None, False

    def _start(self) -> None:
        """Starts waiting completions in free slots, in the order in which their prompts arrived. A slot holds one
        completion with its prompt."""
        computed, beside = 0, bool(self.running)
        while free := [slot for slot, row in enumerate(self._rows) if row is None]:
            jobs = self._next_jobs(len(free))
            if not jobs:
                return
            width = self.slots.prompt_width(max(len(job.prompt) for job in jobs))
            if jobs[0].prefilled is None:
                tokens = width * (1 if len(jobs) == 1 else prompts_at_once(width))
                if computed and beside and computed + tokens > PREFILL_TOKENS:
                    return
                computed += tokens
                found = self.slots.prefill([job.prompt for job in jobs], width)
                for job, prefilled in zip(jobs, found, strict=True):
                    job.prefilled = prefilled
            assert jobs[0].prefilled is not None
            self._place(jobs, free, jobs[0].prefilled.width)

    def _next_jobs(self, most: int) -> list[Job]:
        """Returns the waiting jobs whose prompts the next prefill should compute together: at most `most`, in the order
        in which the jobs arrived. A job is a prompt with its completions.

        A prefill of several prompts is padded to a fixed number of prompts (`prompts_at_once`). If fewer than half of
        this number of jobs can be taken, only the first waiting job is returned. If the prompt of the first job was
        prefilled earlier, only this job is returned, and no prefill is needed. If no job waits, the list is empty.
        """
        with self._changed:
            jobs = list(itertools.islice(self._waiting, most))
        if not jobs or jobs[0].prefilled is not None:
            return jobs[:1]
        chosen = jobs[:1]
        for job in jobs[1:]:
            width = self.slots.prompt_width(max(len(each.prompt) for each in (*chosen, job)))
            if len(chosen) >= prompts_at_once(width) or job.prefilled is not None:
                break
            chosen.append(job)
        # A prefill of several prompts is padded to a fixed number of prompts. For few prompts, single prefills are
        # faster.
        width = self.slots.prompt_width(max(len(job.prompt) for job in chosen))
        return chosen if 2 * len(chosen) >= prompts_at_once(width) else chosen[:1]

    def _place(self, jobs: Sequence[Job], free: Sequence[int], width: int) -> None:
        """Assigns completions of `jobs` to the slots `free`, and starts these completions. A job is a prompt with its
        completions, and a slot holds one completion. One prefill must have computed the prompts of all `jobs`, each
        padded to `width` tokens."""
        places, left = [], list(free)
        for job in jobs:
            while left and job.started < job.count:
                places.append((left.pop(0), job, job.started))
                job.started += 1
        self._fit(width)
        self.slots.start(places)
        for slot, job, sample in places:
            self._rows[slot], self._keep[slot] = _Row(job, sample), True
        for job in jobs:
            if job.started == job.count:
                job.prefilled = None
                with self._changed:
                    if job in self._waiting:
                        self._waiting.remove(job)

    def _parts(self, sampled: Sampled) -> list[tuple[Job, Part]]:
        """Returns the new tokens of each running completion as a `Part`. Frees the slots (places in the arrays) of
        completions that have ended."""
        parts = []
        for slot in self._occupied():
            row, count = self._rows[slot], int(sampled.counts[slot])
            assert row is not None
            tokens = sampled.tokens[slot, :count].tolist()
            logprobs = sampled.logprobs[slot, :count].tolist()
            reason = None if sampled.live[slot] else "stop" if sampled.ended[slot] else "length"
            stop_ids = row.job.sampling.stop_ids
            stop = next((place for place, token in enumerate(tokens) if token in stop_ids), None) if stop_ids else None
            stop_id = None
            if stop is not None:
                stop_id, reason = tokens[stop], "stop"
                tokens, logprobs = tokens[: stop + 1], logprobs[: stop + 1]
            if reason is not None:
                self._rows[slot], self._keep[slot] = None, False
            if tokens or reason is not None:
                parts.append((row.job, Part(row.sample, tokens, logprobs, reason, stop_id)))
        return parts

    def _fail(self) -> None:
        """Ends all running and waiting completions with an error. Marks the arrays on the device as lost, so that they
        are allocated again before the next completion is started."""
        with self._changed:
            jobs = [*self._waiting]
            self._waiting.clear()
        found = {(id(row.job), row.sample): row for row in self._rows if row is not None}
        for job in jobs:
            job.prefilled = None
            found |= {(id(job), sample): _Row(job, sample) for sample in range(job.started, job.count)}
        self._rows, self._keep = [None] * self.slots.count, np.ones(self.slots.count, bool)
        self.deliver([(row.job, Part(row.sample, [], [], "error")) for row in found.values()])
        self._lost = True
