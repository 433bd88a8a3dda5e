"""Holds the arrays of the server's slots on the device, and calls the compiled programs with these arrays. A slot holds
one completion with its prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from tunix_like.models.sharding import fetch, place_prompts, place_slots, scope
from tunix_like.rollout import decoding
from tunix_like.rollout.logits import RowSampling
from tunix_like.rollout.serving import programs
from tunix_like.rollout.serving.jobs import Job
from tunix_like.runtime import progress


class Weights(NamedTuple):
    """The model that the server uses.

    Attributes:
      graphdef: graph of a `Decoder`.
      params: the weights.
      eos_ids: token ids that end a completion.
      mesh: the mesh that the weights are on; None means a single device.
    """

    graphdef: Any
    params: Any
    eos_ids: tuple[int, ...]
    mesh: Mesh | None = None


class Sampled(NamedTuple):
    """The tokens that one call of `Slots.advance` sampled. Row `a` has the tokens of one completion; the first
    `counts[a]` tokens are valid.

    Attributes:
      live: False if the completion has ended: by an end-of-sequence token if `ended` is True, otherwise by its token
        limit.
    """

    counts: Int[np.ndarray, "A"]
    tokens: Int[np.ndarray, "A K"]
    logprobs: Float[np.ndarray, "A K"]
    live: Bool[np.ndarray, "A"]
    ended: Bool[np.ndarray, "A"]


class Prefilled(NamedTuple):
    """A prefilled prompt: entry `row` of the batch `prompts`, whose prompts were padded to `width` tokens."""

    prompts: decoding.Prompts
    row: int
    width: int


class Slots:
    """The arrays on the device for the completions that are being sampled. A slot of the arrays holds one completion
    with its prompt.

    Args:
      rows: number of slots. This is the maximum number of completions that are sampled at the same time.
      longest: maximum number of tokens of prompt and completion together.
    """

    state: programs.State

    def __init__(self, weights: Weights, rows: int, longest: int):
        self.graphdef, self.eos_ids, self.mesh = weights.graphdef, weights.eos_ids, weights.mesh
        self.count, self.longest = rows, longest
        self.widths, self.prompt_widths = programs.widths_of(longest), programs.prompt_widths_of(longest)
        # Not jitted, because a jitted function would copy weights that already have the compute dtype.
        self.params = jax.tree.map(jnp.asarray, decoding.cast_params(weights.graphdef, weights.params))
        self.head = nnx.merge(self.graphdef, self.params).head()
        self.vocab_size = self.head.shape[1]
        self.pace = 0.0
        """Seconds of one step of `advance`, averaged over the last calls."""
        self.reset()

    def reset(self) -> None:
        """Allocates empty arrays for prompts and completions. The previous arrays are lost."""
        self.__dict__.pop("state", None)  # frees the memory before the new arrays are allocated
        with scope(self.mesh):
            state = programs.empty_state(self.graphdef, self.params, self.count, self.widths[0])
            if self.mesh is None:
                # Commits the arrays to their device, like the results of the other programs. Otherwise `start` is
                # compiled twice.
                state = jax.device_put(state, next(iter(self.head.devices())))
            self.state = self._placed(state)
        self.ages, self._steps = np.zeros(self.count, np.int64), 0

    def _placed(self, tree: Any) -> Any:
        return place_slots(tree, self.mesh)

    def prompt_width(self, length: int) -> int:
        """Returns the number of tokens to which a prompt of `length` tokens is padded."""
        return next(width for width in self.prompt_widths if width >= length)

    def fit(self, prompt: int, needed: int) -> None:
        """Resizes the caches of keys and values for prompts of `prompt` tokens, padding included, and completions of
        `needed` tokens.

        A cache shrinks only if at most half of the smaller width is needed. The cache of completions is at least as
        wide as the cache of prompts, so that programs are compiled for fewer pairs of widths.
        """
        prompt_width = self._fitting(prompt, self.state.prompt_width)
        width = self._fitting(max(needed, prompt_width), self.state.width)
        if (prompt_width, width) != (self.state.prompt_width, self.state.width):
            self.pace *= max(1.0, width / self.state.width)  # wider caches take longer to read
            self.state = self._placed(programs.resized(self.state, prompt_width, width))

    def _fitting(self, needed: int, current: int) -> int:
        wanted = next(width for width in self.widths if width >= needed)
        return wanted if wanted > current or 2 * needed <= wanted else current

    def prefill(self, prompts: Sequence[Sequence[int]], width: int) -> list[Prefilled]:
        """Runs the prefill of `prompts`, each padded to `width` tokens. At most `programs.prompts_at_once(width)`
        prompts are allowed."""
        count = 1 if len(prompts) == 1 else programs.prompts_at_once(width)
        tokens, lengths = np.zeros((count, width), np.int32), np.ones(count, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        inputs = place_prompts((tokens, lengths), self.mesh, axis=0)
        out = self._placed(decoding.prefill(self.graphdef, self.params, *inputs))
        return [Prefilled(out, row, width) for row in range(len(prompts))]

    def start(self, places: Sequence[tuple[int, Job, int]]) -> None:
        """Starts completion `sample` of `job` in `slot`, for each `(slot, job, sample)` of `places`. A job is a prompt
        with its completions, and a slot holds one completion. The prompts of all jobs must be results of one call of
        `prefill`, and the caches must have room for the completions."""
        if not places:
            return
        starts = no_starts(self.count)
        for slot, job, sample in places:
            assert job.prefilled is not None
            sampling = job.sampling
            starts.take[slot], starts.source[slot] = True, job.prefilled.row
            starts.seed[slot] = sampling.seed >> 32, sampling.seed & 0xFFFFFFFF
            starts.number[slot], starts.sample[slot] = job.number, sample
            starts.limits[slot] = sampling.max_tokens
            starts.sampling.temperature[slot], starts.sampling.top_p[slot] = sampling.temperature, sampling.top_p
            starts.sampling.top_k[slot] = self.vocab_size if sampling.top_k is None else sampling.top_k
            self.ages[slot] = 0
        fresh = places[0][1].prefilled
        assert fresh is not None
        self.state = self._placed(programs.start(self.state, fresh.prompts, starts))

    def advance(self, keep: Bool[np.ndarray, "A"], stop_at: int, steps: int) -> Sampled:
        """Samples up to `steps` tokens of each running completion. Stops earlier when at most `stop_at` completions are
        unfinished, or when the cache of a completion is full. Completions for which `keep` is False are cancelled."""
        until, began = np.array([stop_at, steps], np.int32), time.perf_counter()
        state = programs.advance(self.graphdef, self.params, self.head, self.state, keep, until, self.eos_ids)
        self.state = state = self._placed(state)
        rows = state.rows
        wanted = rows.age, rows.live, rows.ended, rows.tokens, rows.logprobs, rows.steps
        ages, live, ended, tokens, logprobs, done = fetch(wanted, self.mesh)
        if (count := int(done) - self._steps) > 0:
            seconds = (time.perf_counter() - began) / count
            self.pace = seconds if not self.pace else 0.8 * self.pace + 0.2 * seconds
        self._steps = int(done)
        counts, self.ages = np.where(keep, ages[:, 0] - self.ages, 0), ages[:, 0].astype(np.int64)
        return Sampled(counts, tokens[:, 0], logprobs[:, 0], live[:, 0], ended[:, 0])

    def warm_up(self) -> None:
        """Compiles and runs every program in every shape that can occur, so that no request waits for a compilation."""
        shapes = [
            (width, count)
            for width in self.prompt_widths
            for count in dict.fromkeys((1, programs.prompts_at_once(width)))
        ]
        pairs = [(prompt, width) for width in self.widths for prompt in self.widths if prompt <= width]
        with scope(self.mesh), progress.task("compiling", len(shapes) + len(pairs)) as advance:
            fresh = {}
            for width, count in shapes:
                fresh[width, count] = jax.block_until_ready(self.prefill([[0]] * count, width)[0].prompts)
                advance(1, f"prompts of {width} tokens")
            for columns, width in pairs:
                self.state = self._placed(programs.resized(self.state, columns, width))
                for (padded, _), prompts in fresh.items():
                    if padded <= columns:
                        self.state = self._placed(programs.start(self.state, prompts, no_starts(self.count)))
                # Only steps with live rows show whether the memory suffices and how long a step takes.
                everything = no_starts(self.count)
                everything.take[:], everything.limits[:] = True, 3
                for _ in range(2):
                    self.state = self._placed(programs.start(self.state, fresh[shapes[0]], everything))
                    self.pace = 0.0
                    self.advance(np.ones(self.count, bool), 0, 2)
                for other in self.widths:
                    jax.block_until_ready(programs.resized(self.state, other, other).limits)
                advance(1, f"{self.count} rows of {columns} and {width} columns")
        self.reset()


def no_starts(count: int) -> programs.Starts:
    """Returns `Starts` (which completions to start) for `count` slots, as arrays on the host. A slot holds one
    completion. `take` is False for every slot. The caller sets the entries of the slots in which completions start."""
    return programs.Starts(
        take=np.zeros(count, bool),
        source=np.zeros(count, np.int32),
        seed=np.zeros((count, 2), np.uint32),
        number=np.zeros(count, np.uint32),
        sample=np.zeros(count, np.uint32),
        limits=np.zeros(count, np.int32),
        sampling=RowSampling(np.zeros(count, np.float32), np.ones(count, np.float32), np.ones(count, np.int32)),
    )
