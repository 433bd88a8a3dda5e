"""Defines the types that all packages share: problems, rollout batches, the engine protocol and the signatures of user
functions.

Array axes used in the whole library: `P` prompts (groups), `G` completions per prompt, `S` prompt positions, `T`
completion positions, `V` vocabulary, `D` model width, `H`/`K` query/key heads, `h` head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

if TYPE_CHECKING:
    AnyArray = Any  # a numpy array on the host, a jax array on the device, or a tracer

Message = Mapping[str, str]
"""One chat turn: `{"role": "system" | "user" | "assistant", "content": text}`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of the data stream with its rendered and tokenized prompt.

    Attributes:
      number: running number in the data stream. It is unique within a run, so random keys derived from it are also
        unique.
      text: the rendered prompt, as the model and the reward functions receive it.
      tokens: the token ids of the prompt.
      columns: all other columns of the row, passed to reward functions by name.
      source: the prompt before rendering: a text, or a list of messages.
      opened: `source` with the first observation of an environment; None without one.
      row: index of the row in the training data; None without a curriculum.
      weight: factor of the loss of the prompt's completions; None without a curriculum that corrects its draws.
      moment: step and progress of the run, which user functions can ask for (see `runtime.moment`); None: before a run.
    """

    number: int
    text: str
    tokens: Sequence[int]
    columns: Mapping[str, Any]
    source: Any = None
    row: int | None = None
    weight: float | None = None
    opened: Any = None
    moment: Mapping[str, float] | None = None


class GroupBatch(NamedTuple):
    """The rollouts of one training step. Prompts and completions are in separate arrays, because all completions of a
    group have the same prompt.

    All arrays are padded on the right. Masks are derived from lengths, never from token values. The end-of-sequence
    token is part of a completion and counts in its length.

    Attributes:
      trained: False for completions that count in the group statistics but not in the loss (None: all are trained).
      estimator_ids: index of each group's advantage estimator in `Objective.estimators` (None: all groups use the
        estimator of the run).
      token_mask: True for tokens sampled by the policy, which can be trained on; False for padding and for tokens from
        another source (None: the policy sampled every token of each completion).
      segment_start: index of the first token of each token's segment. A token sees only the prompt and the earlier
        tokens of its own segment, so a completion can contain several contexts (None: each completion is one segment).
      prompt_weights: factor of each group's loss (None: 1).
      experts, prompt_experts: as in `Completions`: the experts that the policy uses (None: those of its router).
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
    segment_start: Int[AnyArray, "P G T"] | None = None
    prompt_weights: Float[AnyArray, "P"] | None = None
    experts: Integer[AnyArray, "P G T l k"] | None = None
    prompt_experts: Integer[AnyArray, "P S l k"] | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """The lengths of the padded prompts and of the padded completions."""
        return self.prompt_tokens.shape[1], self.completion_tokens.shape[2]

    @property
    def routed_freely(self) -> GroupBatch:
        """The batch without recorded experts: for other models than the policy, and for the devices, which get the
        experts with the packed completions."""
        return self._replace(experts=None, prompt_experts=None)

    @property
    def group_estimators(self) -> Int[np.ndarray, "P"]:
        """`estimator_ids`, or 0 for each group: the estimator of the run."""
        return np.zeros(len(self.scored), np.int32) if self.estimator_ids is None else np.asarray(self.estimator_ids)

    @property
    def sampled(self) -> Bool[AnyArray, "P G T"]:
        """Mask of the tokens that the policy sampled: `token_mask`, or all tokens of the completions if it is None."""
        if self.token_mask is not None:
            return self.token_mask
        return np.arange(self.completion_tokens.shape[-1])[None, None] < self.completion_lengths[..., None]

    @property
    def sampled_lengths(self) -> Int[AnyArray, "P G"]:
        """Returns, for each completion, the number of tokens that the policy sampled."""
        return self.completion_lengths if self.token_mask is None else self.token_mask.sum(axis=-1, dtype=np.int32)


class ById:
    """A hashable key for an object, which need not be hashable. Two keys are equal only if they hold the same object.
    The key keeps a reference to the object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy decoding; `top_p` 1 and `top_k` None keep every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


class Request(NamedTuple):
    """A prompt, and the number of completions of its group.

    Attributes:
      tokens: the token ids of the prompt.
      number: distinguishes the requests of one call of `Engine.generate`. The random numbers of a completion depend
        only on `number`, the index of the completion in its group, and the `key` of the call.
      samples: number of completions.
    """

    tokens: Sequence[int]
    number: int
    samples: int


class Sample(NamedTuple):
    """One sampled completion of `n` tokens.

    Attributes:
      request: index of the request in the call of `Engine.generate`.
      sample: index of the completion in its group.
      tokens: token ids, including the end-of-sequence token.
      logprobs: log-probability of each token in nats, under the weights that `Engine.generate` gets, with the sampling
        temperature and before truncation by top-k or top-p.
      finished: False if the token limit truncated the completion.
      token_mask: True for tokens that the policy sampled, False for tokens from a `Responder`, such as an environment
        (None: the policy sampled every token).
      segment_start: for each token, the index of the first token of its segment. A segment is a part of the completion
        whose tokens see only the prompt and the earlier tokens of the same part. A new segment starts at 0 and at the
        first token of each `Reply` with `restart`. None: the completion is one segment.
      experts, prompt_experts: for each token of the completion and of the prompt, and each layer with experts, the
        indices of the experts that processed it, by descending weight. `rollout.routing_replay` needs them. Those of
        the completion's last token have no effect.
    """

    request: int
    sample: int
    tokens: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "n"]
    finished: bool
    token_mask: Bool[np.ndarray, "n"] | None = None
    segment_start: Int[np.ndarray, "n"] | None = None
    experts: Integer[np.ndarray, "n l k"] | None = None
    prompt_experts: Integer[np.ndarray, "s l k"] | None = None


class Completions(NamedTuple):
    """The samples of one call of `Engine.generate`, as numpy arrays on the host. Values at or after a completion's
    length have no meaning.

    Attributes:
      tokens: token ids [P, G, T]. `T` is at least the length of the longest completion.
      lengths: number of tokens of each completion, including the end-of-sequence token.
      logprobs, finished, token_mask, segment_start: as in `Sample`. `token_mask` is False beyond the length.
      experts, prompt_experts: as in `Sample`; the prompt's are those of its first sample, and `S` is at least the
        length of the longest prompt. None: not recorded.
    """

    tokens: Int[np.ndarray, "P G T"]
    lengths: Int[np.ndarray, "P G"]
    logprobs: Float[np.ndarray, "P G T"]
    finished: Bool[np.ndarray, "P G"]
    token_mask: Bool[np.ndarray, "P G T"] | None = None
    segment_start: Int[np.ndarray, "P G T"] | None = None
    experts: Integer[np.ndarray, "P G T l k"] | None = None
    prompt_experts: Integer[np.ndarray, "P S l k"] | None = None


class Turn(NamedTuple):
    """A finished turn of a trajectory: the tokens that the policy sampled until an end-of-sequence token or the token
    limit.

    Attributes:
      group: index of the prompt.
      sample: index of the completion in its group.
      tokens: the tokens sampled in this turn. If an end-of-sequence token ended the turn, it is the last of these
        tokens.
      truncated: whether the token limit ended the turn. If so, the trajectory has ended too.
    """

    group: int
    sample: int
    tokens: Sequence[int]
    truncated: bool


class Reply(NamedTuple):
    """The answer to one turn of a completion: to the tokens that the policy sampled before it stopped.

    Attributes:
      tokens: the tokens to append before the policy samples the next turn; None ends the trajectory.
      restart: whether `tokens` directly follow the prompt. If True, `tokens` and all later tokens do not see the
        earlier tokens of the completion. The earlier tokens stay in the completion and count in its length.
    """

    group: int
    sample: int
    tokens: Sequence[int] | None
    restart: bool = False


@runtime_checkable
class Responder(Protocol):
    """Answers each turn of a trajectory (the tokens that the policy sampled before it stopped) with further tokens.
    `environments` implements this protocol, and engines call it."""

    @property
    def lockstep(self) -> bool:
        """Whether the engine waits for the replies of all environments before it samples further tokens.

        If True, the order of the computations does not depend on how fast the replies come, so a rollout can be
        repeated bit for bit.
        """

    def opening(self, group: int, sample: int) -> Sequence[int]:
        """Returns the tokens to insert between the prompt of a group and the first tokens that the policy samples.

        The returned tokens are part of the completion `sample` of the group. The sequence is often empty.
        """

    def submit(self, turns: Sequence[Turn]) -> None:
        """Starts to answer finished turns. Every turn that the token limit did not truncate gets one reply, which
        `replies` returns later."""

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the replies to submitted turns that are ready and were not returned before.

        Args:
          wait: whether to wait if no reply is ready. If the property `lockstep` is True, the call waits for the replies
            to all submitted turns; otherwise, for one reply.
        """


@runtime_checkable
class Engine(Protocol):
    """Generates completions. `rollout.sampler.Sampler` is the in-process implementation."""

    @property
    def max_prompt_length(self) -> int:
        """The maximum prompt length of `generate`, in tokens."""

    @property
    def row_steps(self) -> int:
        """The number of token positions that the engine has computed so far, used or not; 0 if it is not known.

        The utilisation of the engine in a training step is the number of tokens sampled in this step divided by the
        increase of `row_steps`.
        """

    def place(self, params: Any) -> Any:
        """Converts the trainer's weights to the form that `generate` takes. Several calls of `generate` can use the
        same result.

        With `rollout.max_staleness` 0, the result is freed before the next update of the weights. With
        `rollout.max_staleness` above 0, the result is still used during this update, which deletes the arrays of the
        trainer's weights. The result must then not contain these arrays. It is freed before the next call of `place`.
        """

    def generate(
        self,
        params: Any,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
        responder: Responder | None = None,
    ) -> Iterator[Sample]:
        """Samples the completions of all requests, and yields each completion as soon as it is finished, in any order.

        Args:
          params: the weights, from `place`.
          requests: each request has 1 to `max_prompt_length` tokens and a unique `number`.
          responder: answers each turn of a completion. A turn ends with an end-of-sequence token or at the token limit.
            A completion ends at the token limit, or if the reply to a turn has `tokens` None. If `responder` is None, a
            completion has a single turn. An engine that supports only single turns may omit this parameter.
        """


AdvantageEstimator = Callable[..., Float[Array, "P G"]]
"""`f(rewards: Float[P G], *, scored: Bool[P G], lengths: Int[P G], <parameters>) -> Float[P G]`.

Maps the rewards of whole groups to advantages. The function is traced once inside the training step. `scored` is False
for completions that could not be scored. These completions get advantage 0 and are excluded from the group statistics.
`lengths` are completion lengths in tokens. Further parameters are keyword-only and are read from the config keys of the
same name.
"""


RewardFunction = Callable[..., Sequence[float | None]]
"""`f(prompts, completions, **columns) -> one number per completion (None: does not apply; NaN: cannot be scored)`.

The function is called once with all completions of a rollout batch or, in a worker, once per group. If the call fails,
it is called again with fewer completions. Each column is a list of the same length as `completions`. Parameters `step`
and `progress` get one number (see `runtime.moment`), unless columns have these names.
"""
