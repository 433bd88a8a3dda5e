"""Holds the arrays of the running completions on the device, and calls the compiled programs with these arrays.

The server samples up to `A` completions at once, each in a row of its own. In the terms of `decoding.py` there are `A`
slots with one row each: a row has its own copy of its prompt.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from tunix_like.models.sharding import fetch, place_prompts, place_slots, prompt_parts, scope
from tunix_like.rollout import decoding
from tunix_like.rollout.logits import RowSampling
from tunix_like.runtime import progress
from tunix_like.serving import programs
from tunix_like.serving.prefixes import Prefixes, Tokens


class Weights(NamedTuple):
    """The model that the server uses: graph and weights of a `Decoder`, the token ids that end a completion, and the
    mesh that the weights are on (None: a single device)."""

    graphdef: Any
    params: Any
    eos_ids: tuple[int, ...]
    mesh: Mesh | None = None


class Prefilled(NamedTuple):
    """A prefilled prompt: one entry of the batch `prompts`, whose prompts were padded to `width` tokens. Its first
    `reused` tokens were not computed, because an earlier prompt begins with them."""

    prompts: decoding.Prompts
    entry: int
    width: int
    reused: int = 0


@dataclasses.dataclass(frozen=True)
class JobSampling:
    """Sampling parameters of the completions of a prompt.

    Attributes:
      max_tokens: maximum number of tokens of a completion, end-of-sequence token included.
      top_k: number of most probable tokens that are kept; None keeps every token.
      seed: from 0 to 2**64 - 1.
      stop_ids: token ids that end a completion, in addition to the end-of-sequence token ids of the model.
      top: number of most probable tokens to return for each position, at most `programs.MOST_TOP`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    top: int = 0


class Job:
    """One prompt and its `count` completions.

    Attributes:
      number: index of the prompt in its request. The random numbers of a completion depend only on the seed, on
        `number`, on the index of the completion in the job and on the position of the token.
      started: number of completions that were started.
      prefilled: the result of the prompt's prefill; None before the prefill and after all completions are started.
      reused: number of tokens of the prompt that were not computed, because an earlier prompt begins with them.
    """

    def __init__(self, prompt: Sequence[int], count: int, sampling: JobSampling, number: int = 0):
        self.prompt = tuple(prompt)
        self.count = count
        self.sampling = sampling
        self.number = number
        self.started = self.reused = 0
        self.prefilled: Prefilled | None = None


class Sampled(NamedTuple):
    """The tokens that one call of `Runner.advance` sampled. The first `counts[a]` tokens of row `a` are valid.

    Attributes:
      live: False if the completion has ended: by an end-of-sequence token if `ended` is True, otherwise by its token
        limit.
      tops: the most probable tokens of each position, most probable first, and their log-probabilities; None if no
        completion needs them.
    """

    counts: Int[np.ndarray, "A"]
    tokens: Int[np.ndarray, "A K"]
    logprobs: Float[np.ndarray, "A K"]
    live: Bool[np.ndarray, "A"]
    ended: Bool[np.ndarray, "A"]
    tops: tuple[Int[np.ndarray, "K A N"], Float[np.ndarray, "K A N"]] | None = None

    def tops_of(self, row: int, count: int, most: int) -> list[list[tuple[int, float]]]:
        """Returns the `most` most probable tokens at each of the first `count` positions of a row."""
        if self.tops is None or not most:
            return []
        tokens, logprobs = (each[:count, row, :most].tolist() for each in self.tops)
        return [list(zip(*each, strict=True)) for each in zip(tokens, logprobs, strict=True)]


class Runner:
    """The arrays of `rows` completions on the device. Prompt and completion together have at most `longest` tokens.

    Attributes:
      continues: whether a prompt can be continued from a prefix that it has in common with an earlier one.
      prefixes: recent prompts, padding included at most a quarter of the tokens of the prompts of a device's rows.
    """

    state: programs.SamplingState

    def __init__(self, weights: Weights, rows: int, longest: int):
        self.graphdef = weights.graphdef
        self.eos_ids = weights.eos_ids
        self.mesh = weights.mesh
        self.rows = rows
        self.widths = programs.widths_of(longest)
        self.prompt_widths = programs.prompt_widths_of(longest)
        # Not jitted, because a jitted function would copy weights that already have the compute dtype.
        self.params = jax.tree.map(jnp.asarray, decoding.cast_params(weights.graphdef, weights.params))
        model = nnx.merge(self.graphdef, self.params)
        self.head = model.head()
        # A recurrent layer keeps no memory of the middle of an earlier prompt.
        self.continues = not model.config.recurrent_layers
        # Each device holds whole prompts, but only its part of the rows.
        self.prefixes = Prefixes[Prefilled](longest * max(1, rows // (4 * prompt_parts(self.mesh))))
        self.pace = 0.0
        """Seconds of one step of `advance`, averaged over the last calls."""
        self.reset()

    def reset(self) -> None:
        """Allocates empty arrays. The previous arrays are lost."""
        self.prefixes.clear()
        self._empty_rows()

    def _empty_rows(self) -> None:
        self.__dict__.pop("state", None)  # frees the memory before the new arrays are allocated
        with scope(self.mesh):
            state = programs.empty_state(self.graphdef, self.params, self.rows, self.widths[0])
            if self.mesh is None:
                # Commits the arrays to their device, like the results of the other programs. Otherwise `start` is
                # compiled twice.
                state = jax.device_put(state, next(iter(self.head.devices())))
            self.state = place_slots(state, self.mesh)
        self.ages = np.zeros(self.rows, np.int64)
        self._steps = 0

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
            self._resize(prompt_width, width)

    def _fitting(self, needed: int, current: int) -> int:
        wanted = next(width for width in self.widths if width >= needed)
        return wanted if wanted > current or 2 * needed <= wanted else current

    def _resize(self, prompt_width: int, width: int) -> None:
        self.state = place_slots(programs.resized(self.state, prompt_width, width), self.mesh)

    def tokens_of(self, prompts: Sequence[Tokens], width: int) -> int:
        """Returns the number of tokens, padding included, that `prefill` would compute."""
        if (found := self._earlier(prompts, width)) is not None:
            return found[1]
        return width * self._count(prompts, width)

    def prefill(self, prompts: Sequence[Tokens], width: int) -> list[Prefilled]:
        """Computes at most `programs.prompts_at_once(width)` prompts, each padded to `width` tokens. A single long
        prompt is continued from the longest prefix that it has in common with an earlier one."""
        if (found := self._earlier(prompts, width)) is not None:
            earlier, missing = found
            made = [self._continue(prompts[0], self.prefixes.use(earlier), missing, width)]
        else:
            made = self._prefill(prompts, width)
        if self.continues and len(prompts) == 1 and 2 * programs.chunk_of(width) <= width:  # not of shorter prompts
            self.prefixes.add(prompts[0], made[0], width)
        return made

    def _earlier(self, prompts: Sequence[Tokens], width: int) -> tuple[Tokens, int] | None:
        """Returns the earlier prompt from which to continue the only one of `prompts`, and the number of tokens to
        compute. Returns None if there are several prompts, or if the whole prompt should be computed."""
        if len(prompts) > 1 or (found := self.prefixes.find(prompts[0])) is None:
            return None
        earlier, common = found
        if earlier == prompts[0]:
            return earlier, 0
        # The last token is always computed, because the earlier prompt has only the hidden state of its own last token.
        chunk = programs.chunk_of(width)
        missing = max(1, len(prompts[0]) - common)
        missing = -(-missing // chunk) * chunk
        return (earlier, missing) if 2 * missing <= width and missing <= len(prompts[0]) else None

    def _continue(self, prompt: Tokens, earlier: Prefilled, missing: int, width: int) -> Prefilled:
        """Computes the last `missing` tokens of a prompt in chunks. No chunk is padded: the first one may begin with
        tokens that the earlier prompt has too."""
        prompts = earlier.prompts
        reused = len(prompt) - missing
        if earlier.width != width:
            cache = programs.resized_prompts(prompts.cache, width)
            prompts = place_slots(prompts._replace(cache=cache), self.mesh)
        for begin in range(reused, len(prompt), programs.chunk_of(width)):
            tokens = np.array([prompt[begin : begin + programs.chunk_of(width)]], np.int32)
            tokens = place_prompts(tokens, self.mesh, axis=0)
            out = programs.continue_prompt(self.graphdef, self.params, prompts, np.int32(begin), tokens)
            prompts = place_slots(out, self.mesh)
        return Prefilled(prompts, 0, width, reused)

    def _count(self, prompts: Sequence[Tokens], width: int) -> int:
        return 1 if len(prompts) == 1 else programs.prompts_at_once(width)

    def _prefill(self, prompts: Sequence[Tokens], width: int) -> list[Prefilled]:
        count = self._count(prompts, width)
        tokens = np.zeros((count, width), np.int32)
        lengths = np.ones(count, np.int32)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = prompt
            lengths[index] = len(prompt)
        inputs = place_prompts((tokens, lengths), self.mesh, axis=0)
        out = place_slots(decoding.prefill(self.graphdef, self.params, *inputs), self.mesh)
        return [Prefilled(out, index, width) for index in range(len(prompts))]

    def start(self, places: Sequence[tuple[int, Job, int]]) -> None:
        """Starts completion `sample` of `job` in `row`, for each `(row, job, sample)` of `places`. One call of
        `prefill` must have computed the prompts, and the caches must have room."""
        starts = self._no_starts()
        for row, job, sample in places:
            assert job.prefilled is not None
            sampling = job.sampling
            starts.take[row] = True
            starts.source[row] = job.prefilled.entry
            starts.seed[row] = sampling.seed >> 32, sampling.seed & 0xFFFFFFFF
            starts.number[row] = job.number
            starts.sample[row] = sample
            starts.limits[row] = sampling.max_tokens
            starts.sampling.temperature[row] = sampling.temperature
            starts.sampling.top_p[row] = sampling.top_p
            starts.sampling.top_k[row] = self.head.shape[1] if sampling.top_k is None else sampling.top_k
            self.ages[row] = 0
        prefilled = places[0][1].prefilled
        assert prefilled is not None
        self._start(prefilled.prompts, starts)

    def _start(self, prompts: decoding.Prompts, starts: programs.Starts) -> None:
        self.state = place_slots(programs.start(self.state, prompts, starts), self.mesh)

    def _no_starts(self) -> programs.Starts:
        count = self.rows
        return programs.Starts(
            take=np.zeros(count, bool),
            source=np.zeros(count, np.int32),
            seed=np.zeros((count, 2), np.uint32),
            number=np.zeros(count, np.uint32),
            sample=np.zeros(count, np.uint32),
            limits=np.zeros(count, np.int32),
            sampling=RowSampling(np.zeros(count, np.float32), np.ones(count, np.float32), np.ones(count, np.int32)),
        )

    def advance(
        self, keep: Bool[np.ndarray, "A"], stop_at: int, steps: int, top: Bool[np.ndarray, "A"] | None = None
    ) -> Sampled:
        """Samples up to `steps` tokens of each running completion. Stops earlier when at most `stop_at` completions are
        unfinished, or when the cache of a completion is full. Completions for which `keep` is False are cancelled. If
        `top` is True for a completion, the most probable tokens are returned too."""
        until = np.array([stop_at, steps], np.int32)
        began = time.perf_counter()
        top = np.zeros(self.rows, bool) if top is None else top
        state, tops = programs.advance(
            self.graphdef, self.params, self.head, self.state, keep, until, self.eos_ids, top
        )
        self.state = place_slots(state, self.mesh)
        rows = self.state.rows
        wanted = rows.age, rows.live, rows.ended, rows.tokens, rows.logprobs, rows.steps
        ages, live, ended, tokens, logprobs, done = fetch(wanted, self.mesh)
        if (count := int(done) - self._steps) > 0:
            seconds = (time.perf_counter() - began) / count
            self.pace = seconds if not self.pace else 0.8 * self.pace + 0.2 * seconds
        self._steps = int(done)
        counts = np.where(keep, ages[:, 0] - self.ages, 0)
        self.ages = ages[:, 0].astype(np.int64)
        best = fetch(tops, self.mesh) if top.any() else None
        return Sampled(counts, tokens[:, 0], logprobs[:, 0], live[:, 0], ended[:, 0], best)

    def warm_up(self) -> Iterator[None]:
        """Compiles and runs every program in every shape that can occur, so that no request waits for a compilation:
        those of a short prompt first. Yields after each shape; the runner then has no completions, and may sample some
        before the next shape."""
        shapes = [
            (width, count)
            for width in self.prompt_widths
            for count in dict.fromkeys((1, programs.prompts_at_once(width)))
        ]
        pairs = [(prompt, width) for width in self.widths for prompt in self.widths if prompt <= width]
        continued = self.prompt_widths if self.continues else ()
        fresh = {}
        chunks = [width for width in continued if 2 * programs.chunk_of(width) <= width]
        with progress.task("compiling", len(shapes) + len(pairs) + 1) as advance:
            for number, (width, count) in enumerate(shapes):
                fresh[width, count] = self._prefill([(0,)] * count, width)[0].prompts
                if not number:
                    self._try_rows(fresh, *pairs[0])
                advance(1, f"prompts of {width} tokens")
                yield
            for width in chunks:
                for other in chunks:
                    earlier = Prefilled(fresh[other, 1], 0, other)
                    self._continue((0,) * width, earlier, programs.chunk_of(width), width)
                    yield
            # The memory must also suffice for the earlier prompts.
            longest = self.prompt_widths[-1]
            number = self.prefixes.room // longest if self.continues else 0
            held = [self._prefill([(0,)], longest)[0] for _ in range(number)]
            for columns, width in pairs:
                self._try_rows(fresh, columns, width)
                advance(1, f"{self.rows} rows of {columns} and {width} columns")
                yield
            del held
            advance(1)

    def _try_rows(self, fresh: Mapping[tuple[int, int], decoding.Prompts], columns: int, width: int) -> None:
        """Compiles and runs the programs of caches with `columns` columns for prompts and `width` for completions."""
        self._resize(columns, width)
        for (padded, _), prompts in fresh.items():
            if padded <= columns:
                self._start(prompts, self._no_starts())
        # Only steps with live rows show whether the memory suffices and how long a step takes.
        everything = self._no_starts()
        everything.take[:] = True
        everything.limits[:] = 3
        for _ in range(2):
            self._start(next(iter(fresh.values())), everything)
            self.pace = 0.0
            self.advance(np.ones(self.rows, bool), 0, 2)
        for other in self.widths:
            jax.block_until_ready(programs.resized(self.state, other, other).limits)
        self._empty_rows()
