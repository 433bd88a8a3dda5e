"""Samples completions with continuous batching: one decoder samples the completions of all callers together.

Each running completion has a row of the decoder. A thread repeats two actions: it starts completions in free rows, and
then samples some tokens of all rows. This file is independent of HTTP.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tunix_like.models.sharding import scope
from tunix_like.serving.programs import MOST_STEPS, prompts_at_once
from tunix_like.serving.runner import Job, Runner, Sampled

SECONDS_OF_CALL = 0.04
"""Target time of one call of the decode loop. Between two calls, new tokens are delivered and completions started."""

FEWEST_STEPS = 4
"""Minimum number of decode steps in one call, even if they take longer than the target time. Each call copies the
caches and waits for the host, so very short calls are inefficient."""

STEPS_BESIDE_WAITING = 4
"""Maximum number of decode steps in one call if completions wait although rows are free, because the next prompts would
exceed `PREFILL_TOKENS`."""

PREFILL_TOKENS = 2048
"""Maximum number of prompt tokens, padding included, that are prefilled between two calls. The limit does not apply to
the first prefill after a call, or if no completion is running."""

_LOG = logging.getLogger(__name__)


class NewTokens(NamedTuple):
    """New tokens of completion `sample` of a job.

    Attributes:
      reason: why the completion has ended: "stop" (an end-of-sequence token or one of `JobSampling.stop_ids`), "length"
        or "error"; None if it has not ended.
      stop_id: the token id from `JobSampling.stop_ids` that ended the completion.
      tops: for each token, the `JobSampling.top` most probable tokens at its position with their log-probabilities.
    """

    sample: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: str | None
    stop_id: int | None = None
    tops: Sequence[Sequence[tuple[int, float]]] = ()


class _Running(NamedTuple):
    job: Job
    sample: int


class Batcher:
    """Samples the completions of jobs in a separate thread. Its methods can be called from any thread.

    Args:
      runner: the arrays on the device. After `start`, only the batcher's thread uses them.
      deliver: called in that thread with new tokens, and must not block. The parts of a completion come in their order.
        After a completion is cancelled, at most one more part of it is delivered.
    """

    def __init__(self, runner: Runner, deliver: Callable[[Sequence[tuple[Job, NewTokens]]], object]):
        self.runner = runner
        self.deliver = deliver
        self._rows: list[_Running | None] = [None] * runner.rows
        self._keep = np.ones(runner.rows, bool)
        self._waiting: collections.deque[Job] = collections.deque()
        self._cancelled: list[tuple[Job, int | None]] = []
        self._changed = threading.Condition()
        self._closed = self._lost = False
        self._shapes: Iterator[None] | None = None
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self, warm_up: bool = False, when_compiled: Callable[[], None] = lambda: None) -> None:
        """Starts the thread. If `warm_up` is True, it compiles the programs (`Runner.warm_up`) while it has no jobs,
        and then calls `when_compiled`."""
        self._when_compiled = when_compiled
        self._shapes = self.runner.warm_up() if warm_up else None
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job, sample: int | None = None) -> None:
        """Cancels completion `sample` of a job, or all its completions. Those that have ended are not affected."""
        with self._changed:
            self._cancelled.append((job, sample))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the current call of the decode loop, and waits for it. Completions that have not ended
        are dropped."""
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
        return sum(each is not None for each in self._rows)

    def _run(self) -> None:
        with scope(self.runner.mesh):
            while self._wait():
                try:
                    if self._shapes is None or self._has_jobs():
                        self._step()
                    elif next(self._shapes, self) is self:  # the end
                        self._shapes = None
                        self._when_compiled()
                except Exception:  # e.g. lack of memory: the requests fail and the server continues
                    _LOG.exception("the batcher failed; all requests are answered with an error")
                    self._fail()
                    self._shapes = None

    def _has_jobs(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._cancelled or self.running)

    def _wait(self) -> bool:
        """Blocks until there is something to do. Returns False if the batcher is closed."""
        with self._changed:
            while not (self._closed or self._shapes is not None or self._has_jobs()):
                self._changed.wait()
            return not self._closed

    def _step(self) -> None:
        if self._lost:
            self.runner.reset()
            self._lost = False
        self._cancel()
        self._start()
        live = self.running
        if not live:
            return
        self._fit(0)
        waiting = bool(self._waiting)
        rows = self.runner.rows
        steps = int(np.clip(SECONDS_OF_CALL / max(self.runner.pace, 1e-6), FEWEST_STEPS, MOST_STEPS))
        if waiting and live < rows:
            steps = min(steps, STEPS_BESIDE_WAITING)
        stop_at = max(0, live - max(1, rows // 8)) if waiting else 0
        top = np.array([each is not None and each.job.sampling.top > 0 for each in self._rows])
        sampled = self.runner.advance(self._keep, stop_at, steps, top)
        self._keep[:] = True
        if parts := self._parts(sampled):
            self.deliver(parts)

    def _occupied(self) -> list[tuple[int, _Running]]:
        return [(row, each) for row, each in enumerate(self._rows) if each is not None]

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self._keep[row] = False

    def _fit(self, prompt: int) -> None:
        """Makes the caches wide enough for one more token of each running completion, for the prompts of these
        completions, and for a new prompt that is padded to `prompt` tokens."""
        occupied = self._occupied()
        prompts = [self.runner.prompt_width(len(each.job.prompt)) for _, each in occupied]
        ages = [int(self.runner.ages[row]) for row, _ in occupied]
        self.runner.fit(max([prompt, *prompts]), max(ages, default=0) + 1)

    def _cancel(self) -> None:
        with self._changed:
            cancelled = self._cancelled
            self._cancelled = []
            for job, sample in cancelled:
                if sample is None and job in self._waiting:
                    self._waiting.remove(job)
                    job.prefilled = None
        ended = set(cancelled)
        for row, each in self._occupied():
            if each in ended or (each.job, None) in ended:
                self._free(row)

    def _start(self) -> None:
        """Starts waiting completions in free rows, in the order in which their prompts arrived."""
        computed = 0
        beside = bool(self.running)
        while free := [row for row, each in enumerate(self._rows) if each is None]:
            jobs = self._next_jobs(len(free))
            if not jobs:
                return
            if jobs[0].prefilled is None:
                prompts = list(dict.fromkeys(job.prompt for job in jobs))
                width = self.runner.prompt_width(max(map(len, prompts)))
                tokens = self.runner.tokens_of(prompts, width)
                if computed and beside and computed + tokens > PREFILL_TOKENS:
                    return
                computed += tokens
                prefilled = dict(zip(prompts, self.runner.prefill(prompts, width), strict=True))
                for job in jobs:
                    job.prefilled = prefilled[job.prompt]
                    job.reused = job.prefilled.reused
                    prefilled[job.prompt] = job.prefilled._replace(reused=len(job.prompt))
            self._place(jobs, free)

    def _next_jobs(self, most: int) -> list[Job]:
        """Returns the waiting jobs whose prompts the next prefill should compute together: at most `most`, in the order
        in which they arrived. Equal prompts are computed once. The first job alone if its prompt is prefilled
        already."""
        with self._changed:
            jobs = list(itertools.islice(self._waiting, most))
        chosen = jobs[:1]
        if not jobs or jobs[0].prefilled is not None:
            return chosen
        prompts = {jobs[0].prompt}
        longest = len(jobs[0].prompt)
        for job in jobs[1:]:
            more = prompts | {job.prompt}
            length = max(longest, len(job.prompt))
            if job.prefilled is not None or len(more) > self._at_once(length):
                break
            chosen.append(job)
            prompts = more
            longest = length
        # A prefill of several prompts is padded to a fixed number of prompts. For few prompts, single prefills are
        # faster.
        if len(prompts) > 1 and 2 * len(prompts) < self._at_once(longest):
            return list(itertools.takewhile(lambda job: job.prompt == jobs[0].prompt, chosen))
        return chosen

    def _at_once(self, length: int) -> int:
        return prompts_at_once(self.runner.prompt_width(length))

    def _place(self, jobs: Sequence[Job], free: list[int]) -> None:
        """Starts completions of `jobs`, whose prompts one prefill has computed, in the rows `free`."""
        samples = [(job, sample) for job in jobs for sample in range(job.started, job.count)]
        places = [(row, *sample) for row, sample in zip(free, samples, strict=False)]
        assert jobs[0].prefilled is not None
        self._fit(jobs[0].prefilled.width)
        self.runner.start(places)
        for row, job, sample in places:  # after `start`, so that a failure of it fails all completions that wait
            self._rows[row] = _Running(job, sample)
            self._keep[row] = True
            job.started += 1
        for job in jobs:
            if job.started == job.count:
                job.prefilled = None
                with self._changed:
                    if job in self._waiting:
                        self._waiting.remove(job)

    def _parts(self, sampled: Sampled) -> list[tuple[Job, NewTokens]]:
        """Returns the new tokens of each running completion, and frees the rows of those that have ended. A completion
        with a log-probability that is not finite ends with an error: the model has computed no valid logits for it."""
        parts = []
        broken = 0
        for row, (job, sample) in self._occupied():
            count = int(sampled.counts[row])
            tokens = sampled.tokens[row, :count].tolist()
            logprobs = sampled.logprobs[row, :count].tolist()
            reason = None if sampled.live[row] else "stop" if sampled.ended[row] else "length"
            stop_ids = job.sampling.stop_ids
            stop_id = next((token for token in tokens if token in stop_ids), None) if stop_ids else None
            if stop_id is not None:
                reason = "stop"
                end = tokens.index(stop_id) + 1
                tokens, logprobs = tokens[:end], logprobs[:end]
            if not np.isfinite(logprobs).all():
                tokens = []
                logprobs = []
                reason = "error"
                stop_id = None
                broken += 1
            if reason is not None:
                self._free(row)
            if tokens or reason is not None:
                tops = sampled.tops_of(row, len(tokens), job.sampling.top)
                parts.append((job, NewTokens(sample, tokens, logprobs, reason, stop_id, tops)))
        if broken:
            _LOG.error("%d completions end with an error: the model computed logits that are NaN or infinite", broken)
        return parts

    def _fail(self) -> None:
        """Ends all running and waiting completions with an error. The arrays on the device are lost: they are allocated
        again before the next completion is started."""
        with self._changed:
            jobs = [*self._waiting]
            self._waiting.clear()
        ended = dict.fromkeys(each for _, each in self._occupied())
        for job in jobs:
            job.prefilled = None
            ended |= dict.fromkeys(_Running(job, sample) for sample in range(job.started, job.count))
        self._rows = [None] * self.runner.rows
        self._keep = np.ones(self.runner.rows, bool)
        self.deliver([(job, NewTokens(sample, [], [], "error")) for job, sample in ended])
        self._lost = True
