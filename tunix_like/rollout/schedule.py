"""Schedules one call of `Sampler.generate`: decides which completion is in which row of the arrays, when waiting
completions are started in free rows, and when the arrays shrink.

A slot holds one prompt and several rows, and a row holds one completion. When no completion waits, the unfinished
completions are moved to arrays with fewer rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from tunix_like.models.sharding import fetch, place_prompts, place_slots, prompt_parts
from tunix_like.rollout import decoding
from tunix_like.rollout.shapes import (
    FEWEST_ROWS,
    FEWEST_ROWS_ELSEWHERE,
    FEWEST_TOKENS_LEFT,
    FIRST_CACHE,
    length_bucket,
    pad_tokens,
    rounded,
    slot_shape,
)
from tunix_like.types import Request, Sample, SamplingParams

REPORTED_STEPS = {"cpu": 16}
REPORTED_STEPS_ELSEWHERE = 128
"""Decode steps after which progress is reported. The number is fixed, so that processes of a run do the same steps."""


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What all calls of `Sampler.generate` have in common. The fields are arguments of `Sampler`."""

    graphdef: Any
    eos_ids: tuple[int, ...]
    max_prompt_length: int
    max_tokens: int
    max_concurrent_rows: int | Callable[[int, int], int] | None
    mesh: Mesh | None
    record_experts: bool


class RowSchedule:
    """The state of one call of `Sampler.generate` in which each completion has a single turn.

    A slot holds one prompt and several rows, and a row holds one completion of this prompt or is free. A completion
    waits until it is started in a free row.

    Attributes:
      slot_prompt: `[a]`, index of the prompt in slot `a`.
      row_sample: `[a, i]`, index of the completion in row `i` of slot `a` among the completions of its prompt; -1 if
        the row is free.
      ages: `[a, i]`, number of tokens of the completion in row `i` of slot `a`.
      next_sample: `[p]`, index of the first completion of prompt `p` that has not been started.
      done: whether all completions are finished.
      row_steps: as `Sampler.row_steps`, since the caller last set this number to 0.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        params: Any,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
    ):
        self.settings = settings
        self.row_steps = 0
        self.params = params
        self.key = key
        self.sampling = sampling
        prompts = [request.tokens for request in requests]
        size = requests[0].samples
        self.tokens = pad_tokens(prompts, length_bucket(max(len(p) for p in prompts), settings.max_prompt_length))
        self.lengths = np.array([len(p) for p in prompts], np.int32)
        self.numbers = np.array([request.number for request in requests], np.uint32)
        self.size = size
        total = len(prompts)
        limit = settings.max_tokens
        at_once = total * size if (most := settings.max_concurrent_rows) is None else most
        at_once = at_once if isinstance(at_once, int) else at_once(total, size)
        slots, width = slot_shape(total, size, at_once, settings.max_prompt_length, limit, prompt_parts(settings.mesh))
        self.slot_prompt = np.repeat(np.arange(total), 1 if slots == total else -(-size // width))[:slots]
        self.row_sample = np.full((slots, width), -1)
        self.ages = np.zeros((slots, width), int)
        self.next_sample = np.zeros(total, int)
        self.steps = 0
        chosen = np.unique(self.slot_prompt)
        self.prompts = self._prefill(chosen if len(chosen) == slots else self._divisible(chosen))
        if len(chosen) < slots:
            self.prompts = decoding.pick(self.prompts, self.slot_prompt, settings.mesh)
        words = jax.random.key_data(key).shape[-1]
        rows = decoding.empty_rows(self.prompts, width, limit, min(FIRST_CACHE, limit), words)
        self.rows = self._placed(rows)
        self.done = False
        self._fill()

    def step(self, report: Callable[[], None] = lambda: None) -> list[Sample]:
        """Samples tokens, then starts waiting completions in the places of finished ones. If no completion waits, may
        move the unfinished completions to smaller arrays. Returns the completions that finished in this step. Calls
        `report` while it samples."""
        self._make_room()
        stop_at = np.int32(self._stop_at(int((self.row_sample >= 0).sum())))
        every = REPORTED_STEPS.get(jax.default_backend(), REPORTED_STEPS_ELSEWHERE)
        while True:
            last = self.steps + every
            self.rows = self._placed(
                decoding.advance(
                    self.settings.graphdef,
                    self.params,
                    self.prompts,
                    self.rows,
                    stop_at,
                    self.sampling,
                    self.settings.eos_ids,
                    np.int32(last),
                )
            )
            live, ended, ages = self._state()
            self.ages = np.where(self.row_sample >= 0, ages, 0)
            if self.steps < last:  # not the number of steps, but the completions or the cache ended the call
                break
            report()
        samples = self._collect(live, ended, ages)
        self._fill()
        self.done = not self._waiting() and not (self.row_sample >= 0).any()
        if not self.done and not self._waiting():
            self._compact()
        return samples

    def _make_room(self) -> None:
        """Enlarges the cache of keys and values if a completion has filled it."""
        if self.rows.room <= int(self.ages.max()):
            self._grow()

    def _grow(self) -> None:
        self.rows = self._placed(decoding.grow(self.rows, min(2 * self.rows.room, self.settings.max_tokens)))

    def _prefill(self, chosen: Int[np.ndarray, "N"]) -> decoding.Prompts:
        settings = self.settings
        inputs = place_prompts((self.tokens[chosen], self.lengths[chosen]), settings.mesh, axis=0)
        return self._placed(decoding.prefill(settings.graphdef, self.params, *inputs, record=settings.record_experts))

    def _divisible(self, chosen: Int[np.ndarray, "N"]) -> Int[np.ndarray, "M"]:
        """Repeats the last prompt until the number of prompts is divisible by the number of devices over which prompts
        are sharded. Otherwise every device would prefill all prompts."""
        return np.pad(chosen, (0, -len(chosen) % prompt_parts(self.settings.mesh)), mode="edge")

    def _placed(self, tree: Any) -> Any:
        """Reshards the result of a compiled program to the layout that the next program was compiled for."""
        return place_slots(tree, self.settings.mesh)

    def _waiting(self) -> bool:
        """Returns whether any completion has not been started yet."""
        return bool((self.next_sample < self.size).any())

    def _stop_at(self, live: int) -> int:
        """Returns the number of unfinished completions at which the decode loop should stop. `live` is the current
        number.

        While further completions wait to be started, the loop stops when completions in an eighth of the rows have
        ended. (A row of the arrays holds one completion.) If no completion waits, the loop stops when the unfinished
        completions may fit into arrays with half of the rows. If the arrays cannot be halved, or the move is not worth
        its cost, the loop stops when all completions have ended.
        """
        if self._waiting():
            return max(0, live - max(1, self.row_sample.size // 8))
        fewer = self._smaller_shapes()
        if not fewer or not self._worth_compacting():
            return 0
        target = fewer[0][0] * fewer[0][1]
        return target if live > target else max(0, live - max(1, target // 8))

    def _collect(
        self, live: Bool[np.ndarray, "A g"], ended: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"]
    ) -> list[Sample]:
        """Returns the finished completions, and frees their rows in the arrays for other completions."""
        self.ages = np.where(live, ages, 0)
        return self._take((self.row_sample >= 0) & ~live, ages, ended)

    def _state(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `live`, `ended` and `age` of the completions (see `decoding.Rows`). Also increases `row_steps` by the
        number of decode steps since the last call times the number of rows, each of which holds one completion or is
        free."""
        rows = self.rows
        live, ended, ages, steps = fetch((rows.live, rows.ended, rows.age, rows.steps), self.settings.mesh)
        self.row_steps += (int(steps) - self.steps) * self.row_sample.size
        self.steps = int(steps)
        return live, ended, ages

    def _take(
        self, done: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"], finished: Bool[np.ndarray, "A g"]
    ) -> list[Sample]:
        """Returns the completions in the rows of the arrays for which `done` is True, and frees these rows."""
        if not done.any():
            return []
        rows = self.rows
        mesh = self.settings.mesh
        tokens, logprobs = fetch((rows.tokens, rows.logprobs), mesh)
        experts, of_prompts = fetch((rows.experts, self.prompts.experts), mesh)
        samples = []
        for slot, row in np.argwhere(done):
            index = (slot, row)
            length = ages[slot, row]
            samples.append(
                Sample(
                    int(self.slot_prompt[slot]),
                    int(self.row_sample[index]),
                    tokens[index][:length].copy(),  # a copy, because a view keeps the tokens of all rows
                    logprobs[index][:length].copy(),
                    bool(finished[index]),
                    experts=None if experts is None else experts[index][:length].copy(),
                    prompt_experts=None
                    if of_prompts is None
                    else of_prompts[slot, : self.lengths[self.slot_prompt[slot]]].copy(),
                )
            )
        self.row_sample[done] = -1
        return samples

    def _fill(self) -> None:
        """Starts waiting completions in free rows. A slot holds one prompt and several rows, and a row holds one
        completion of this prompt or is free.

        A slot takes waiting completions of its own prompt. If its prompt has no waiting completion and the slot is
        empty, the slot takes completions of the first prompt that has waiting completions.
        """
        if not self._waiting():
            return
        held = self.slot_prompt.copy()
        samples = np.zeros(self.row_sample.shape, np.uint32)
        take = np.zeros(self.row_sample.shape, bool)
        for slot, prompt in enumerate(held.tolist()):  # first, so that a prompt stays in its slot if possible
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
        """Assigns waiting completions of a prompt to the free rows of a slot, which holds the prompt and one completion
        per row. For each of these rows, sets `take` to True and `samples` to the index of the completion among those of
        the prompt."""
        free = np.flatnonzero(self.row_sample[slot] < 0)[: self.size - self.next_sample[prompt]]
        take[slot, free] = True
        samples[slot, free] = self.row_sample[slot, free] = self.next_sample[prompt] + np.arange(len(free))
        self.next_sample[prompt] += len(free)

    def _replace_prompts(self, held: Int[np.ndarray, "A"]) -> None:
        """Writes prefilled prompts into the slots of the arrays whose prompt has changed. A slot holds one prompt;
        `held` has the previous prompt of each slot.

        If a slot held the new prompt before, the prompt is copied from this slot; otherwise it is prefilled once. The
        number of replaced prompts and the number of prefilled prompts are rounded up to powers of two, so that few
        shapes are compiled.
        """
        slots = np.flatnonzero(self.slot_prompt != held)
        if not len(slots):
            return
        wanted = self.slot_prompt[slots]
        fresh = np.setdiff1d(wanted, held)
        source = np.array([np.argmax(held == p) if p in held else len(held) + np.argmax(fresh == p) for p in wanted])
        new = self._prefill(self._divisible(rounded(fresh, len(held)))) if len(fresh) else None
        targets = rounded(slots, len(held), fill=len(held))  # slot numbers out of range are dropped
        sources = rounded(source, len(held))
        self.prompts = self._placed(decoding.replace_prompts(self.prompts, targets, sources, new))

    def _smaller_shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes `(slots, rows per slot)` of smaller arrays to which the unfinished completions may be
        moved. A slot holds one prompt, and each of its rows holds one completion. The shapes have about half, a
        quarter, ... of the current number of rows.

        The list is short, because programs are compiled for each shape. The number of slots stays divisible by the
        number of devices over which slots are sharded.
        """
        slots, width = self.row_sample.shape
        parts = prompt_parts(self.settings.mesh)
        shapes = []
        while width > 1 or (slots % 2 == 0 and (slots // 2) % parts == 0):
            slots, width = (slots, -(-width // 2)) if width > 1 else (slots // 2, 1)
            if slots * width < parts * FEWEST_ROWS.get(jax.default_backend(), FEWEST_ROWS_ELSEWHERE):
                break
            shapes.append((slots, width))
        return shapes

    def _compact(self) -> None:
        """Moves the unfinished completions to the smallest arrays, among those of `_smaller_shapes`, that can hold
        them. Does nothing if there are no such arrays, or if the move is not worth its cost. Afterwards the arrays can
        contain a prompt several times, each time with other completions."""
        if not self._worth_compacting():
            return
        live = self.row_sample >= 0
        prompts = dict.fromkeys(self.slot_prompt.tolist())
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
        source = np.zeros(slots, np.int32)
        picked = np.zeros((slots, width), np.int32)
        samples = np.full((slots, width), -1)
        for slot, chunk in enumerate(chunks):
            source[slot] = chunk[0] // old
            picked[slot, : len(chunk)] = chunk
            samples[slot, : len(chunk)] = self.row_sample.reshape(-1)[chunk]
        self.ages = np.where(samples >= 0, self.ages.reshape(-1)[picked], 0)
        self.slot_prompt = self.slot_prompt[source]
        self.row_sample = samples
        moved = decoding.regroup(self.prompts, self.rows, source, picked, samples >= 0, self.settings.mesh)
        self.prompts, self.rows = self._placed(moved)

    def _worth_compacting(self) -> bool:
        live = self.ages[self.row_sample >= 0]
        room = self.settings.max_tokens - int(live.min()) if live.size else 0
        return room >= FEWEST_TOKENS_LEFT
