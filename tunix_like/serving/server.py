"""Passes requests from the event loop of the HTTP server to the thread that samples, and new tokens back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tunix_like.environments.chat_messages import RequestError
from tunix_like.serving.answers import Answer, Choice
from tunix_like.serving.batcher import Batcher, NewTokens
from tunix_like.serving.requests import Settings
from tunix_like.serving.runner import Job, Runner
from tunix_like.text.tokenizer import Tokenizer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of a histogram, in seconds."""


class Failed(Exception):
    """Raised if an error ended the sampling of a request."""


class Metrics:
    """The metrics of one server."""

    def __init__(self, batcher: Batcher) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"tunix_like_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"tunix_like_{name}", text, buckets=SECONDS, registry=registry)

        self.requests = counter("requests", "Answered requests by route and HTTP status.", ("route", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of accepted requests.")
        self.reused_tokens = counter(
            "reused_prompt_tokens", "Tokens of prompts that were not computed, because earlier prompts begin with them."
        )
        self.generated_tokens = counter("generated_tokens", "Sampled tokens.")
        running = Gauge("tunix_like_running", "Completions that are being sampled.", registry=registry)
        running.set_function(lambda: batcher.running)
        waiting = Gauge("tunix_like_waiting", "Completions that wait for a free row.", registry=registry)
        waiting.set_function(lambda: batcher.waiting)
        self.latency = histogram("request_seconds", "Time from a request to the end of its answer.")
        self.first_token = histogram("first_token_seconds", "Time from a request to its first token.")

    def value(self, name: str) -> float:
        return self.registry.get_sample_value(f"tunix_like_{name}") or 0.0


class ModelServer:
    """A model that answers requests: its settings, the thread that samples, and the requests that it samples for.

    Attributes:
      read: bytes of the bodies of requests that are being read and parsed.
      large: held while a large body is parsed.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, runner: Runner):
        self.settings = settings
        self.tokenizer = tokenizer
        self.batcher = Batcher(runner, self._from_thread)
        self.metrics = Metrics(self.batcher)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.read = 0
        self.large = asyncio.Lock()
        self.queues: dict[Job, asyncio.Queue[tuple[Job, NewTokens]]] = {}

    def open(self, warm_up: bool = False, when_compiled: Callable[[], None] = lambda: None) -> None:
        """Starts the thread that samples (`Batcher.start`). This method must be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.batcher.start(warm_up, when_compiled)

    def check_room(self) -> None:
        """Raises RequestError with the status 429 if at least `max_waiting` completions wait to be started."""
        waiting = self.batcher.waiting
        most = self.settings.max_waiting
        if waiting >= most:
            message = f"{waiting} completions are waiting, and the limit is {most}; try again later"
            raise RequestError(message, http=429, kind="rate_limit_error")

    def retry_after(self) -> int:
        """Returns an estimate of the time until the waiting completions are started: 1 to 60 seconds."""
        mean = self.metrics.value("request_seconds_sum") / max(self.metrics.value("request_seconds_count"), 1)
        return max(1, min(60, math.ceil(mean * self.batcher.waiting / self.batcher.runner.rows)))

    def _from_thread(self, parts: Sequence[tuple[Job, NewTokens]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, parts)
        except RuntimeError:  # the loop has ended, so there are no requests
            return

    def _deliver(self, parts: Sequence[tuple[Job, NewTokens]]) -> None:
        self.metrics.generated_tokens.inc(sum(len(part.tokens) for _, part in parts))
        for job, part in parts:
            if (queue := self.queues.get(job)) is not None:
                queue.put_nowait((job, part))

    async def sample(self, answer: Answer, began: float) -> AsyncGenerator[tuple[Choice, str, slice], None]:
        """Samples the completions of a request. Yields for each new part of a completion the completion, its new text
        and the indices of its new tokens. Completions that have not ended when the generator is closed are cancelled.

        Raises:
          Failed: an error ended the sampling.
        """
        jobs = answer.request.jobs
        left = set(answer.choices)
        queue: asyncio.Queue[tuple[Job, NewTokens]] = asyncio.Queue()
        self.queues |= dict.fromkeys(jobs, queue)
        self.metrics.prompt_tokens.inc(sum(len(job.prompt) for job in jobs))
        self.batcher.submit(jobs)
        first = True
        try:
            while left:
                job, part = await queue.get()
                if (job, part.sample) not in left:
                    continue
                if first:
                    self.metrics.first_token.observe(time.monotonic() - began)
                    first = False
                if part.reason == "error":
                    raise Failed
                choice = answer.choices[job, part.sample]
                before = len(choice.tokens)
                text = choice.add(part)
                if choice.reason is not None:
                    left.discard((job, part.sample))
                    if part.reason is None:  # a stop string ended it
                        self.batcher.cancel(job, part.sample)
                yield choice, text, slice(before, len(choice.tokens))
        finally:
            self.metrics.reused_tokens.inc(sum(job.reused for job in jobs))
            for job in jobs:
                del self.queues[job]
            for job in {job for job, _ in left}:
                self.batcher.cancel(job)
