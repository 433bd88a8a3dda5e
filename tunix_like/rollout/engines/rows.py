"""Tracks the completions of one call of `VLLMEngine.generate`: the tokens so far, and which completions need another
request to a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tunix_like.rollout.engines.server import SampledTokens
from tunix_like.rollout.requests import opening_of
from tunix_like.types import Request, Responder, Sample, Turn


@dataclasses.dataclass
class Row:
    """A completion that is being sampled.

    A reply of the `Responder` can start a new segment of the completion. From then on, the model sees only the prompt
    and this segment.

    Attributes:
      prompt: the tokens of the prompt.
      tokens, logprobs, mask: the tokens of the completion so far, their log-probabilities, and whether the policy
        sampled each token.
      starts: for each token, the index of the first token of the same segment.
      first: the index of the first token of the current segment.
    """

    request: int
    sample: int
    prompt: Sequence[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    first: int = 0

    @property
    def context(self) -> list[int]:
        """The tokens that the model sees before it samples the next token."""
        return [*self.prompt, *self.tokens[self.first :]]

    def append(self, tokens: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        """Appends tokens to the completion. `sampled` is True if the policy sampled the tokens, and False if the
        `Responder`, which answers the turns of the policy, sent the tokens."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [sampled] * len(tokens)
        self.starts += [self.first] * len(tokens)

    def finished(self, complete: bool) -> Sample:
        """Returns the completion as a `Sample`. `complete` is False if the token limit ended the completion."""
        tokens = np.array(self.tokens, np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        starts = np.array(self.starts, np.int32) if self.first else None
        return Sample(self.request, self.sample, tokens, logprobs, complete, np.array(self.mask, bool), starts)


class RowStates:
    """The state of all completions of one call of `VLLMEngine.generate`. Each completion is a `Row`.

    Attributes:
      limit: maximum number of tokens of a completion.
      running: number of requests that were sent to servers and are not answered yet, at most one per completion.
    """

    def __init__(self, requests: Sequence[Request], limit: int, responder: Responder | None):
        self.rows = [
            Row(index, sample, request.tokens)
            for index, request in enumerate(requests)
            for sample in range(request.samples)
        ]
        self.limit = limit
        self.responder = responder
        if responder is not None:
            for row in self.rows:
                opening = opening_of(responder, row.request, row.sample, limit)
                row.append(opening, [0.0] * len(opening), sampled=False)
        self._places = {(row.request, row.sample): index for index, row in enumerate(self.rows)}
        self._unsent = list(range(len(self.rows)))
        self._waiting: set[int] = set()  # rows whose turn has ended and has no reply yet
        self._left = len(self.rows)
        self.running = 0

    @property
    def done(self) -> bool:
        """Whether all completions are finished."""
        return not self._left

    @property
    def wanted(self) -> int:
        """The minimum number of answers for which the engine waits before it sends further requests to servers. With
        `Responder.lockstep`, the engine waits for the answers to all requests. Otherwise the number is 1, or 0 if all
        requests are answered."""
        if self.responder is not None and self.responder.lockstep:
            return self.running
        return min(self.running, 1)

    @property
    def has_replies(self) -> bool:
        """Whether replies of the `Responder` can arrive while the engine waits for answers of servers."""
        return self.responder is not None and not self.responder.lockstep and bool(self._waiting)

    def to_send(self) -> list[int]:
        """Returns the indices of the completions whose next turn must be requested from a server. Adds the number of
        these completions to `running`, the number of unanswered requests."""
        unsent = self._unsent
        self._unsent = []
        self.running += len(unsent)
        return unsent

    def take(self, answers: Mapping[int, SampledTokens]) -> list[Sample]:
        """Appends the answers of servers to the completions, and sends the new turns to the `Responder`. Then appends
        the replies of the `Responder` that are ready. Returns the completions that are now finished.

        Args:
          answers: the answers by index of the completion.
        """
        samples: list[Sample] = []
        turns: list[Turn] = []
        for index in sorted(answers):
            row = self.rows[index]
            answer = answers[index]
            self.running -= 1
            row.append(answer.tokens, answer.logprobs, sampled=True)
            turns.append(Turn(row.request, row.sample, answer.tokens, not answer.stopped))
            if self.responder is not None and answer.stopped:
                self._waiting.add(index)
            else:
                samples.append(row.finished(answer.stopped))
        if self.responder is not None:
            samples += self._reply(self.responder, turns)
        self._left -= len(samples)
        return samples

    def _reply(self, responder: Responder, turns: Sequence[Turn]) -> list[Sample]:
        """Sends the turns to the `Responder`, which answers them. Appends each reply that is ready to its completion.
        Returns the completions that end because of these replies."""
        if turns:
            responder.submit(turns)
        if not self._waiting:
            return []
        samples = []
        for group, sample, tokens, restart in responder.replies(wait=not self.running):
            index = self._places[group, sample]
            self._waiting.remove(index)
            row = self.rows[index]
            if tokens is None or len(row.tokens) + len(tokens) >= self.limit:
                samples.append(row.finished(tokens is None))
            else:
                row.first = len(row.tokens) if restart else row.first
                row.append(tokens, [0.0] * len(tokens), sampled=False)
                self._unsent.append(index)
        return samples
