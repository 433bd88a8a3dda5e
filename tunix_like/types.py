"""The nouns every room shares: what a problem, a rollout batch and the user's functions are.

Axes used everywhere: `P` prompts (groups), `G` completions of one prompt, `S` prompt positions, `T` completion
positions, `V` vocabulary, `D` model width, `H`/`K` query/key heads, `h` head width. This module knows no model and
no training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int

if TYPE_CHECKING:
    AnyArray = Any  # numpy on the host, jax on the device, a tracer in between

Message = Mapping[str, str]
"""One chat turn: `{"role": "system" | "user" | "assistant", "content": text}`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of the data stream, ready to be sampled from.

    Attributes:
      number: running number in the data stream; it never repeats within a run, so random keys made from it do not.
      text: the rendered prompt, as the model sees it and as reward functions receive it.
      tokens: its token ids.
      columns: every other column of the row, handed to reward functions by name.
    """

    number: int
    text: str
    tokens: Sequence[int]
    columns: Mapping[str, Any]


class GroupBatch(NamedTuple):
    """The rollouts of one step. Prompts and completions stay apart because a prompt is computed once per group.

    Padding is to the right everywhere; masks come from lengths, never from token values. A completion's end-of-sequence
    token belongs to it and is counted in its length.

    Attributes:
      trained: False for completions that count in their group's statistics but not in the loss (None: all are trained).
      estimator_ids: which of the objective's estimators a group has (None: the run's own).
      token_mask: True where the policy sampled a token, which may be trained on; False for padding and for tokens that
        something else wrote (None: the policy sampled every token of each completion).
    """

    prompt_tokens: Int[AnyArray, "P S"]
    prompt_lengths: Int[AnyArray, "P"]
    completion_tokens: Int[AnyArray, "P G T"]
    completion_lengths: Int[AnyArray, "P G"]
    rollout_logprobs: Float[AnyArray, "P G T"] | None
    rewards: Float[AnyArray, "P G"]
    scored: Bool[AnyArray, "P G"]
    trained: Bool[AnyArray, "P G"] | None = None
    estimator_ids: Int[AnyArray, "P"] | None = None
    token_mask: Bool[AnyArray, "P G T"] | None = None

    @property
    def sampled(self) -> Bool[AnyArray, "P G T"]:
        """`token_mask`, filled in where it is None."""
        if self.token_mask is not None:
            return self.token_mask
        return np.arange(self.completion_tokens.shape[-1])[None, None] < self.completion_lengths[..., None]

    @property
    def sampled_lengths(self) -> Int[AnyArray, "P G"]:
        """Tokens of each completion that the policy sampled."""
        return self.completion_lengths if self.token_mask is None else self.token_mask.sum(axis=-1, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose a token. `temperature` 0 is greedy; `top_p` 1 and `top_k` None keep every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


class Completions(NamedTuple):
    """What was sampled, on the host. Entries at or beyond a row's length are 0.

    `lengths` counts the end-of-sequence token; `finished` is False where the token limit cut the row.
    """

    tokens: Int[np.ndarray, "P G T"]
    lengths: Int[np.ndarray, "P G"]
    logprobs: Float[np.ndarray, "P G T"]
    finished: Bool[np.ndarray, "P G"]


@runtime_checkable
class Engine(Protocol):
    """Generates completions; `rollout.sampler.Sampler` is the one that runs in the process.

    Attributes:
      max_prompt_length: the longest prompt that `generate` takes, in tokens.
      row_steps: token positions computed so far, used or not. Tokens sampled over the growth of this number is the
        share of the work that was useful.
    """

    max_prompt_length: int
    row_steps: int

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        num_generations: int,
        key: Array,
        sampling: SamplingParams,
    ) -> Completions:
        """Samples `num_generations` completions of each prompt with the weights `params`.

        Args:
          prompts: token ids, each with 1 to `max_prompt_length` tokens.
          numbers: one distinct number per prompt; the random numbers of a completion depend on it, on its place in the
            group and on `key`, and on nothing else.
        """


AdvantageEstimator = Callable[..., Float[Array, "P G"]]
"""`f(rewards: Float[P G], *, scored: Bool[P G], lengths: Int[P G], <its own>) -> Float[P G]`.

Rewards of whole groups to advantages, traced once inside the training step. `scored` is False where a completion could
not be scored: it gets advantage 0 and takes no part in its group's statistics. `lengths` counts completion tokens.
Parameters of the estimator's own are keyword-only and are read from the config's keys of the same name.
"""


RewardFunction = Callable[..., Sequence[float | None]]
"""`f(prompts, completions, **columns) -> one number (or None: could not be scored) per completion`.

It is called once with every completion of a rollout batch or, in a worker, once for each group; when it fails, again
with fewer of them. Each column arrives as a list as long as `completions`.
"""
