"""Defines the input and the output of the batcher, which samples completions: jobs, each a prompt with its completions,
and new tokens of the completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tunix_like.rollout.serving.device import Prefilled


@dataclasses.dataclass(frozen=True)
class JobSampling:
    """Sampling parameters of a job, which is a prompt with its completions.

    Attributes:
      max_tokens: maximum number of tokens of a completion, end-of-sequence token included.
      top_k: number of most probable tokens that are kept; None keeps every token.
      seed: seed of the random numbers, from 0 to 2**64 - 1.
      stop_ids: token ids that end a completion, in addition to the end-of-sequence token ids of the model.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()


class Part(NamedTuple):
    """New tokens of a completion.

    Attributes:
      sample: index of the completion among the completions of its prompt.
      reason: why the completion has ended: "stop" (an end-of-sequence token or one of `JobSampling.stop_ids`), "length"
        or "error"; None if the completion has not ended.
      stop_id: the token id from `JobSampling.stop_ids` that ended the completion; otherwise None.
    """

    sample: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: str | None
    stop_id: int | None = None


class Job:
    """One prompt and its completions.

    Args:
      prompt: token ids, at least one.
      count: number of completions.
      number: index of the prompt in its request. The random numbers of a completion depend only on the seed of the job,
        on `number`, on the index of the completion in the job and on the position of the token.

    Attributes:
      started: number of completions that were started.
      prefilled: the result of the prompt's prefill; None before the prefill and after all completions are started.
    """

    def __init__(self, prompt: Sequence[int], count: int, sampling: JobSampling, number: int = 0):
        self.prompt, self.count, self.sampling, self.number = prompt, count, sampling, number
        self.started = 0
        self.prefilled: Prefilled | None = None
