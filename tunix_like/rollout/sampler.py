"""The in-process sampler with continuous batching: its cost is proportional to the number of live tokens.

A prompt is prefilled once and placed in one or more slots, each with some of its completions as rows. Free rows are
filled with waiting completions of the slot's prompt, and an empty slot with the next prompt. When no completions wait,
live rows are compacted into fewer rows. The cache is a ring buffer that grows by powers of two. The tokens of a
completion do not depend on the schedule, because its random numbers are `fold_in(key, problem number, sample,
position)`. The weights are an argument of `generate`, so there is no copy to synchronise with the trainer; on a mesh,
`place` lays them out once for several calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from tunix_like.models.sharding import fetch, parameter_shardings, place_prompts, place_slots, prompt_parts, scope
from tunix_like.rollout import decoding
from tunix_like.runtime import progress
from tunix_like.types import Completions, SamplingParams

FIRST_CACHE = 128
"""Initial number of cache columns; it doubles as needed. Each size is compiled separately."""

FEWEST_ROWS = {"cpu": 8}
FEWEST_ROWS_ELSEWHERE = 64
"""Minimum number of rows per device after compaction, by backend and on other backends. With fewer rows the cost of a
step is dominated by reading the weights."""

FEWEST_TOKENS_LEFT = 16
"""Rows are compacted only if some row may still grow by at least this many tokens."""


def length_bucket(length: int, limit: int | None = None) -> int:
    """Rounds `length` up to the next of 16, 24, 32, 48, 64, 96, 128, ..., at most `limit`.

    This bounds the number of compiled shapes. At most a third of the padded length is padding.
    """
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(length, min(size, limit))


def pad_tokens(rows: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "N W"]:
    """Stacks rows of different lengths, padded on the right with 0."""
    out = np.zeros((len(rows), width), np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def slot_shape(prompts: int, size: int, at_once: int, prompt_length: int, max_tokens: int) -> tuple[int, int]:
    """Chooses the number of slots and of rows per slot, for at most `at_once` rows.

    If all completions fit, each slot holds a whole group. Otherwise a slot takes the next prompt only when all of its
    rows are done: with exponentially distributed lengths, `w` rows take `1 + 1/2 + ... + 1/w` times the mean length.
    This favours few rows per slot. Many rows per slot, however, share the reads of the prompt's keys at every step.
    """
    if at_once >= prompts * size:
        return prompts, size

    def cost(width: int) -> float:
        waiting = sum(1 / i for i in range(1, width + 1))
        return (max_tokens / 2 + prompt_length / width) * min(waiting, 2.5)  # 2.5: lengths are at most max_tokens

    width = min((w for w in {*(1 << i for i in range(size.bit_length())), size} if w <= at_once), key=cost)
    return min(prompts * -(-size // width), at_once // width), width


def jit_place(graphdef: Any, params: Any, mesh: Mesh) -> Any:
    """Returns the jitted function `(graphdef, params) -> params` behind `Sampler.place`.

    `params` may be arrays or shapes.
    """
    shapes = jax.eval_shape(functools.partial(decoding.cast_params, graphdef), params)
    return jax.jit(decoding.cast_params, static_argnums=0, out_shardings=parameter_shardings(shapes, mesh))


class Sampler:
    """The in-process `Engine`: samples completions with a decoder's graph and the weights passed to `generate`.

    Args:
      graphdef: graph of a `Decoder` (`nnx.split(model)`).
      eos_ids: end-of-sequence token ids; a completion includes the first of them and ends there.
      max_prompt_length, max_tokens: limits of prompt and completion, in tokens.
      max_concurrent_rows: maximum number of completions that are sampled at the same time; None means no limit.
      mesh: prompts are sharded over its `data` and `fsdp` axes, heads over `tp`; None means a single device.

    Attributes:
      row_steps: number of rows times decode steps so far. Sampled tokens divided by its increase is the fraction of
        useful work.
    """

    def __init__(
        self,
        graphdef: Any,
        eos_ids: Sequence[int],
        *,
        max_prompt_length: int,
        max_tokens: int,
        max_concurrent_rows: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.graphdef = graphdef
        self.eos_ids = tuple(int(i) for i in eos_ids)
        self.max_prompt_length = max_prompt_length
        self.max_tokens = max_tokens
        self.max_concurrent_rows = max_concurrent_rows
        self.mesh = mesh
        self.row_steps = 0
        self._place: Any = None

    def place(self, params: Any) -> Any:
        """Lays the weights out for sampling: over the sampler's mesh, matrices in the compute dtype.

        Without a mesh, `params` itself, which the programs cast.
        """
        if self.mesh is None:
            return params
        if self._place is None:
            self._place = jit_place(self.graphdef, params, self.mesh)
        return jax.block_until_ready(self._place(self.graphdef, params))

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        num_generations: int,
        key: Array,
        sampling: SamplingParams,
    ) -> Completions:
        """Samples `num_generations` completions of each prompt (see `types.Engine`)."""
        # A copy, because the key may have been made on the trainer's mesh.
        data, kind = jax.device_get(jax.random.key_data(key)), jax.random.key_impl(key)
        with scope(self.mesh):
            key = jax.random.wrap_key_data(data, impl=kind)
            with progress.task("sampling", len(prompts) * num_generations) as advance:
                return _Run(self, params, prompts, numbers, num_generations, key, sampling).finish(advance)


class _Run:
    """The state of one call of `generate`: waiting completions, the contents of each row, and finished completions.

    Attributes:
      slot_prompt: `[a]`, the prompt of slot `a`.
      row_sample: `[a, i]`, the sample index of the completion in row `i` of slot `a`; -1 if the row is free.
      ages: `[a, i]`, the number of tokens of that completion.
      next_sample: `[p]`, the first sample of prompt `p` that has not been started.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        size: int,
        key: Array,
        sampling: SamplingParams,
    ):
        self.sampler, self.params, self.key, self.sampling = sampler, params, key, sampling
        self.tokens = pad_tokens(prompts, length_bucket(max(len(p) for p in prompts), sampler.max_prompt_length))
        self.lengths = np.array([len(p) for p in prompts], np.int32)
        self.numbers, self.size = np.array(numbers, np.uint32), size
        total, limit = len(prompts), sampler.max_tokens
        at_once = total * size if sampler.max_concurrent_rows is None else sampler.max_concurrent_rows
        slots, width = slot_shape(total, size, at_once, self.tokens.shape[1], limit)
        if slots * width < total * size:  # some completions wait: use the same number of slots on each device
            slots = max(slots - slots % prompt_parts(sampler.mesh), 1)
        self.slot_prompt = np.repeat(np.arange(total), -(-size // width))[:slots]
        self.row_sample, self.ages = np.full((slots, width), -1), np.zeros((slots, width), int)
        self.next_sample, self.steps = np.zeros(total, int), 0
        self.prompts = self._prefill(np.unique(self.slot_prompt))
        if width < size:
            self.prompts = self._placed(decoding.pick_prompts(self.prompts, self.slot_prompt))
        words = jax.random.key_data(key).shape[-1]
        rows = decoding.empty_rows(self.prompts, width, limit, min(FIRST_CACHE, limit), words)
        self.rows = self._placed(rows)
        self.out = Completions(
            np.zeros((total, size, limit), np.int32),
            np.zeros((total, size), np.int32),
            np.zeros((total, size, limit), np.float32),
            np.zeros((total, size), bool),
        )

    def finish(self, advance: progress.Advance) -> Completions:
        """Samples all completions and returns them; reports finished completions to `advance`."""
        self._fill()
        while True:
            live = int((self.row_sample >= 0).sum())
            rows = decoding.advance(
                self.sampler.graphdef,
                self.params,
                self.prompts,
                self.rows,
                np.int32(self._stop_at(live)),
                self.sampling,
                self.sampler.eos_ids,
            )
            self.rows = self._placed(rows)
            advance(self._collect_finished(), f"up to {self.ages.max()} of {self.sampler.max_tokens} tokens")
            if not self._waiting() and not (self.row_sample >= 0).any():
                return self.out
            self._fill()
            if not self._waiting():
                self._compact()
            if self.rows.room <= int(self.ages.max()):
                self.rows = self._placed(decoding.grow(self.rows, min(2 * self.rows.room, self.sampler.max_tokens)))

    def _prefill(self, chosen: Int[np.ndarray, "N"]) -> decoding.Prompts:
        inputs = place_prompts((self.tokens[chosen], self.lengths[chosen]), self.sampler.mesh, axis=0)
        return self._placed(decoding.prefill(self.sampler.graphdef, self.params, *inputs))

    def _placed(self, tree: Any) -> Any:
        """Reshards the result of a program as the next program expects it, so that it is not compiled again."""
        return place_slots(tree, self.sampler.mesh)

    def _waiting(self) -> bool:
        """Returns whether any completion has not been started."""
        return bool((self.next_sample < self.size).any())

    def _stop_at(self, live: int) -> int:
        """Returns the number of live rows at which the decode loop should stop.

        While completions wait, this is when an eighth of the rows is free; then when the live rows fit into half of the
        rows.
        """
        if self._waiting():
            return max(0, live - max(1, self.row_sample.size // 8))
        fewer = self._smaller_shapes()
        if not fewer or not self._worth_compacting():
            return 0
        target = fewer[0][0] * fewer[0][1]
        return target if live > target else max(0, live - max(1, target // 8))

    def _collect_finished(self) -> int:
        """Copies finished completions to the output and frees their rows; returns their number."""
        rows, out = self.rows, self.out
        live, ended, ages, steps = fetch((rows.live, rows.ended, rows.age, rows.steps), self.sampler.mesh)
        self.sampler.row_steps += (int(steps) - self.steps) * self.row_sample.size
        self.steps = int(steps)
        done = (self.row_sample >= 0) & ~live
        self.ages = np.where(live, ages, 0)
        if not done.any():
            return 0
        tokens, logprobs = fetch((rows.tokens, rows.logprobs), self.sampler.mesh)
        for slot, row in np.argwhere(done):
            index, length = (self.slot_prompt[slot], self.row_sample[slot, row]), ages[slot, row]
            out.tokens[index][:length] = tokens[slot, row, :length]
            out.logprobs[index][:length] = logprobs[slot, row, :length]
            out.lengths[index], out.finished[index] = length, ended[slot, row]
        self.row_sample[done] = -1
        return int(done.sum())

    def _fill(self) -> None:
        """Starts waiting completions in free rows.

        A slot takes completions of its own prompt; an empty slot takes those of the first prompt that has waiting ones.
        """
        if not self._waiting():
            return
        held, samples = self.slot_prompt.copy(), np.zeros(self.row_sample.shape, np.uint32)
        take = np.zeros(self.row_sample.shape, bool)
        for slot, prompt in enumerate(held.tolist()):  # before empty slots, so that prompts stay in their slots
            self._start(slot, prompt, take, samples)
        for slot in np.flatnonzero((self.row_sample < 0).all(axis=1)).tolist():
            if not self._waiting():
                break
            self.slot_prompt[slot] = prompt = int(np.argmax(self.next_sample < self.size))
            self._start(slot, prompt, take, samples)
        self._replace_prompts(held)
        if take.any():
            numbers = self.numbers[self.slot_prompt]
            self.rows = self._placed(decoding.fill(self.rows, self.prompts, take, numbers, samples, self.key))

    def _start(self, slot: int, prompt: int, take: np.ndarray, samples: np.ndarray) -> None:
        """Assigns waiting completions of a prompt to the free rows of a slot; writes `take` and `samples` in place."""
        free = np.flatnonzero(self.row_sample[slot] < 0)[: self.size - self.next_sample[prompt]]
        take[slot, free] = True
        samples[slot, free] = self.row_sample[slot, free] = self.next_sample[prompt] + np.arange(len(free))
        self.next_sample[prompt] += len(free)

    def _replace_prompts(self, held: Int[np.ndarray, "A"]) -> None:
        """Writes the prompts of slots whose prompt changed: copies them from another slot, or prefills each once.

        The number of prompts is rounded up to a power of two, so that few shapes are compiled.
        """
        slots = np.flatnonzero(self.slot_prompt != held)
        if not len(slots):
            return
        wanted = self.slot_prompt[slots]
        fresh = np.setdiff1d(wanted, held)
        source = np.array([np.argmax(held == p) if p in held else len(held) + np.argmax(fresh == p) for p in wanted])
        new = self._prefill(_rounded(fresh, len(held))) if len(fresh) else None
        targets = _rounded(slots, len(held), fill=len(held))  # slot numbers out of range are dropped
        sources = _rounded(source, len(held))
        self.prompts = self._placed(decoding.replace_prompts(self.prompts, targets, sources, new))

    def _smaller_shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes (slots, rows per slot) for compaction, largest first: half, a quarter, ... of the rows.

        There are few shapes because each one is compiled. The number of slots stays divisible by the mesh.
        """
        slots, width = self.row_sample.shape
        parts, shapes = prompt_parts(self.sampler.mesh), []
        while width > 1 or (slots % 2 == 0 and (slots // 2) % parts == 0):
            slots, width = (slots, -(-width // 2)) if width > 1 else (slots // 2, 1)
            if slots * width < parts * FEWEST_ROWS.get(jax.default_backend(), FEWEST_ROWS_ELSEWHERE):
                break
            shapes.append((slots, width))
        return shapes

    def _compact(self) -> None:
        """Compacts the live rows into the smallest shape that holds them; a prompt may then be in several slots."""
        if not self._worth_compacting():
            return
        live, prompts = self.row_sample >= 0, dict.fromkeys(self.slot_prompt.tolist())
        of_prompt = {p: np.flatnonzero((self.slot_prompt[:, None] == p) & live) for p in prompts}
        fits = [
            (slots, width)
            for slots, width in self._smaller_shapes()
            if sum(-(-len(rows) // width) for rows in of_prompt.values()) <= slots
        ]
        if not fits:
            return
        slots, width = fits[-1]
        old = self.row_sample.shape[1]
        chunks = [rows[i : i + width] for rows in of_prompt.values() for i in range(0, len(rows), width)]
        source, picked = np.zeros(slots, np.int32), np.zeros((slots, width), np.int32)
        samples = np.full((slots, width), -1)
        for slot, chunk in enumerate(chunks):
            source[slot], picked[slot, : len(chunk)] = chunk[0] // old, chunk
            samples[slot, : len(chunk)] = self.row_sample.reshape(-1)[chunk]
        self.ages = np.where(samples >= 0, self.ages.reshape(-1)[picked], 0)
        self.slot_prompt, self.row_sample = self.slot_prompt[source], samples
        moved = decoding.regroup(self.prompts, self.rows, source, picked, samples >= 0)
        self.prompts, self.rows = self._placed(moved)

    def _worth_compacting(self) -> bool:
        live = self.ages[self.row_sample >= 0]
        room = self.sampler.max_tokens - int(live.min()) if live.size else 0
        return room >= FEWEST_TOKENS_LEFT


def _rounded(numbers: Int[np.ndarray, "N"], most: int, fill: int | None = None) -> Int[np.ndarray, "M"]:
    """Pads `numbers` to the next power of two (at most `most`) with `fill`, by default the last number."""
    count = max(len(numbers), min(1 << (len(numbers) - 1).bit_length(), most))
    return np.pad(numbers, (0, count - len(numbers)), constant_values=numbers[-1] if fill is None else fill)
