"""A teacher on a vLLM server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.config.schema import RolloutConfig, TeacherConfig
from tunix_like.errors import EngineLost
from tunix_like.models.config import DecoderConfig
from tunix_like.rollout.engines.server import Server, Unavailable, WrongAnswer
from tunix_like.runtime.processes import by_first
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.teacher import Teacher
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch

_TEXT = "Tokens in, numbers out: 12 + 34 = 46."
"""A text that the tokenizer of a server must encode to the same ids as that of the run."""
_REQUESTS = 64
"""Number of requests that a server gets at once; it batches them."""
_REQUEST_SECONDS = 600.0
_WAIT_SECONDS = 600.0
"""Time limit of one request, and how long one is repeated while the server fails."""


class ServedTeacher(Teacher):
    """A teacher on a vLLM server, which scores prompt and completion of each request.

    Args:
      key: names the teacher in error messages, as `teacher.path` does.

    Raises:
      UserError: the server cannot be used.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        rollout: RolloutConfig,
        plays: bool,
        key: str,
    ):
        limit = settings.max_prompt_length or rollout.max_prompt_length
        super().__init__(settings, None, None, config, tokenizer, None, limit, plays)
        self.key = key
        self.most = limit + rollout.max_tokens_to_generate + 1
        self.model = by_first(lambda: _in_a_loop(self._check()))

    def identity(self, mesh: Any) -> dict[str, Any]:
        names = ("prompt", "divergence", "coef")
        return {name: getattr(self.settings, name) for name in names} | {"limit": self.limit, "server": self.model}

    def logprobs(
        self, trainer: Trainer, batch: GroupBatch, rows: Bool[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G T"]:
        """See `Teacher.logprobs`.

        Raises:
          EngineLost: the server has not answered for `_WAIT_SECONDS`.
          UserError: the server refused a request.
        """
        texts = []
        places = []
        for p, g in np.argwhere(rows):
            prompt = batch.prompt_tokens[p, : batch.prompt_lengths[p]].tolist()
            tokens = batch.completion_tokens[p, g, : batch.completion_lengths[p, g]].tolist()
            first = [0] * len(tokens) if batch.segment_start is None else batch.segment_start[p, g, : len(tokens)]
            start = 0
            for _, segment in itertools.groupby(first):
                end = start + len(list(segment))
                texts.append(prompt + tokens[start:end])  # each segment follows the prompt
                places.append((p, g, start, end))
                start = end
        out = np.zeros(batch.completion_tokens.shape, np.float32)
        found = by_first(lambda: _in_a_loop(self._score(texts)))
        for (p, g, start, end), values in zip(places, found, strict=True):
            out[p, g, start:end] = values[len(values) - (end - start) :]
        return out

    async def _check(self) -> str:
        server = self._server()
        try:
            await server.check_scorer(self.most, _TEXT, self.tokenizer.encode(_TEXT, False))
            return str(server.model)
        finally:
            await server.close()

    async def _score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        server = self._server()
        server.model = self.model
        slots = asyncio.Semaphore(_REQUESTS)

        async def score(tokens: Sequence[int]) -> list[float]:
            failed: float | None = None  # when the first of the failures in a row was
            while True:
                try:
                    async with slots:
                        return await server.score(tokens)
                except (Unavailable, WrongAnswer) as error:
                    failed = time.monotonic() if failed is None else failed
                    if time.monotonic() - failed > _WAIT_SECONDS:
                        raise EngineLost(
                            f"{self.key}: the server {server.url} has failed for {_WAIT_SECONDS:g} s: {error}. Start "
                            "it, then start the run with the same command; it resumes."
                        ) from None
                    await asyncio.sleep(1.0)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(tokens)) for tokens in texts]
            return [task.result() for task in tasks]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await server.close()

    def _server(self) -> Server:
        return Server(str(self.settings.path), _REQUEST_SECONDS, self.key)


def _in_a_loop(call: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a thread of its own, because a notebook has a running loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()
