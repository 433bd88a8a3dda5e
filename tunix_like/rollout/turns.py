"""Schedules a call of `Sampler.generate` whose completions have several turns: completions wait for replies and then
continue.

The keys and values of a completion stay in the cache while it waits, so its earlier turns are not computed again. The
model computes only the tokens of the replies, in blocks that contain all completions with a reply. A reply can also
restart its completion. Such a reply contains the whole history after the prompt, and the model computes this history
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from tunix_like.models.sharding import fetch
from tunix_like.rollout import decoding
from tunix_like.rollout.requests import opening_of
from tunix_like.rollout.schedule import RowSchedule, SamplerSettings
from tunix_like.rollout.shapes import length_bucket
from tunix_like.types import Reply, Request, Responder, Sample, SamplingParams, Turn

MOST_APPENDED = 64
"""Maximum number of tokens of a reply that one call of `decoding.append` appends to a row. This limit bounds the
memory. Longer replies take several calls."""


class TurnSchedule(RowSchedule):
    """The state of one call of `Sampler.generate` with a `Responder`, which replies to the turns of completions.

    A reply can restart its completion: the tokens from this reply on do not see the earlier tokens of the completion.
    Restarts divide a completion into segments.

    Attributes:
      pending: `[p, i]`, whether completion `i` of prompt `p` waits for a reply.
      turn_start: `[p, i]`, index of the first token of the current turn of this completion.
      first: `[p, i]`, index of the first token of the current segment of this completion.
      segment_start: `[p, i, t]`, index of the first token of the segment of token `t`.
      sampled: `[p, i, t]`, whether the policy sampled token `t` of the completion.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        params: Any,
        requests: Sequence[Request],
        key: Array,
        sampling: SamplingParams,
        responder: Responder,
    ):
        self.responder = responder
        shape = len(requests), requests[0].samples
        self.pending, self.turn_start = np.zeros(shape, bool), np.zeros(shape, int)
        self.sampled = np.zeros((*shape, settings.max_tokens), bool)
        self.first = np.zeros(shape, int)
        self.segment_start = np.zeros(self.sampled.shape, np.int32)
        super().__init__(settings, params, requests, key, sampling)  # last, because this starts rows

    def _stop_at(self, live: int) -> int:
        live -= int(self._waits().sum())
        return 0 if self.responder.lockstep else max(0, live - max(1, live // 8))

    def _waits(self) -> Bool[np.ndarray, "A g"]:
        """Returns for each row of the arrays whether the completion in this row waits for a reply."""
        return (self.row_sample >= 0) & self._of_rows(self.pending)

    def _of_rows(self, values: np.ndarray) -> np.ndarray:
        """Returns for each row of the arrays the value of the completion in this row. `values` has the value of
        completion `i` of prompt `p` at `[p, i]`. For a row without a completion, the result has no meaning."""
        return values[self.slot_prompt[:, None], np.maximum(self.row_sample, 0)]

    def _make_room(self) -> None:
        """Makes space in the cache for another token of every completion that is being sampled, without overwriting
        tokens of completions that wait for a reply. Also sets `Rows.held`, which marks the completions that can get
        more tokens."""
        self._free_columns(1)
        self.rows = self._placed(self.rows._replace(held=jnp.asarray(self._kept())))

    def _kept(self) -> Bool[np.ndarray, "A g"]:
        """Returns for each row of the arrays whether it holds a completion that can get more tokens."""
        return (self.row_sample >= 0) & (self.ages < self.settings.max_tokens)

    def _grow(self) -> None:
        """Enlarges the cache of keys and values, which has a column per token. Its largest size is `max_tokens` columns
        for the tokens of a completion plus `MOST_APPENDED` columns for the replies that are appended next."""
        if self.rows.room < self.settings.max_tokens:
            super()._grow()
        else:
            self.rows = self._placed(decoding.grow(self.rows, self.settings.max_tokens + MOST_APPENDED))

    def _free_columns(self, count: int) -> None:
        """Makes sure that the next `count` columns of the cache are free in all completions that can get more tokens. A
        column holds the keys and values of one token of each completion, or is empty for some completions.

        If one of these columns is not free or is beyond the end of the cache, this method enlarges the cache or removes
        empty columns. The cache is enlarged if the tokens of a completion and `count` columns do not fit. The cache is
        also enlarged if it has fewer than `max_tokens` columns and a completion has tokens in at least half of its
        columns.
        """
        spans, column = fetch((self.rows.span, self.rows.column), self.settings.mesh)
        kept = self._kept()
        cached = self.ages - self._of_rows(self.first)
        used, most = (int(np.where(kept, each, 0).max()) for each in (spans, cached))
        if used + count <= self.rows.room and column + count <= self.rows.room:
            return
        if most + count > self.rows.room or (self.rows.room < self.settings.max_tokens and self.rows.room <= 2 * most):
            self._grow()
            self._free_columns(count)
        else:
            self.rows = self._placed(decoding.compact_columns(self.rows))

    def _fill(self) -> None:
        """Starts waiting completions in free rows of the arrays, and appends to these completions the tokens that
        precede the first turn (`Responder.opening`)."""
        free = self.row_sample < 0
        super()._fill()
        openings: dict[tuple[int, int], Sequence[int]] = {}
        for slot, row in np.argwhere(free & (self.row_sample >= 0)).tolist():
            group = int(self.slot_prompt[slot])
            sample = int(self.row_sample[slot, row])
            if tokens := opening_of(self.responder, group, sample, self.settings.max_tokens):
                openings[slot, row] = tokens
                self.turn_start[group, sample] = len(tokens)
        if openings:
            self._append(openings)

    def _collect(
        self, live: Bool[np.ndarray, "A g"], ended: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"]
    ) -> list[Sample]:
        """Passes the turns that have ended to the `Responder`, which replies to them. Appends the replies that are
        ready, and returns the finished completions."""
        used = self.row_sample >= 0
        self.ages = np.where(used, ages, 0)
        samples = self._submit(used & ~live & ~self._waits(), ended, ages)
        # If a row is still live, decoding stopped because the cache was full, or because replies are used when they
        # arrive.
        all_ended = not (used & live).any()
        if self.pending.any() and (all_ended or not self.responder.lockstep):
            samples += self._reply(self.responder.replies(wait=all_ended), ages)
        self.ages = np.where(self.row_sample >= 0, self.ages, 0)
        return samples

    def _take(
        self, done: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"], finished: Bool[np.ndarray, "A g"]
    ) -> list[Sample]:
        samples = []
        for each in super()._take(done, ages, finished):
            own = each.request, each.sample, slice(len(each.tokens))
            start = self.segment_start[own] if self.first[own[:2]] else None
            samples.append(each._replace(token_mask=self.sampled[own], segment_start=start))
        return samples

    def _submit(
        self, stopped: Bool[np.ndarray, "A g"], ended: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"]
    ) -> list[Sample]:
        """Passes the current turns of the completions for which `stopped` is True to the `Responder`, which replies to
        them. If `ended` is False for a completion, the token limit truncated its turn.

        Returns the completions whose turn was truncated. A truncated turn is the last turn of its completion.
        """
        if not stopped.any():
            return []
        tokens = fetch(self.rows.tokens, self.settings.mesh)
        turns = []
        for slot, row in np.argwhere(stopped).tolist():
            group, sample = index = int(self.slot_prompt[slot]), int(self.row_sample[slot, row])
            turn = slice(self.turn_start[index], ages[slot, row])
            self.sampled[index][turn] = True
            turns.append(Turn(group, sample, tokens[slot, row, turn].tolist(), not ended[slot, row]))
            self.pending[index] = ended[slot, row]
        self.responder.submit(turns)
        return self._take(stopped & ~ended, ages, ended)

    def _reply(self, replies: Sequence[Reply], ages: Int[np.ndarray, "A g"]) -> list[Sample]:
        """Appends replies to the completions that wait for them.

        Returns the completions that end here: those for which `Reply.tokens` is None, or whose reply leaves no space
        for another token.
        """
        index_of = {
            (int(self.slot_prompt[slot]), int(self.row_sample[slot, row])): (slot, row)
            for slot, row in np.argwhere(self.row_sample >= 0).tolist()
        }
        done, finished = np.zeros(ages.shape, bool), np.zeros(ages.shape, bool)
        appended: dict[tuple[int, int], Sequence[int]] = {}
        restarted = np.zeros(ages.shape, bool)
        for group, sample, tokens, restart in replies:
            index = index_of[group, sample]
            self.pending[group, sample] = False
            if tokens is None or ages[index] + len(tokens) >= self.settings.max_tokens:
                done[index] = True
                finished[index] = tokens is None
            else:
                appended[index] = tokens
                restarted[index] = restart
                self.turn_start[group, sample] = ages[index] + len(tokens)
        samples = self._take(done, ages, finished)
        if restarted.any():
            self._restart(restarted, ages)
        if appended:
            self._append(appended)
        return samples

    def _restart(self, chosen: Bool[np.ndarray, "A g"], ages: Int[np.ndarray, "A g"]) -> None:
        """Restarts the completions for which `chosen` is True: the model computes their next tokens as if they followed
        the prompt directly. These tokens begin a new segment of the completion."""
        for slot, row in np.argwhere(chosen).tolist():
            index = (self.slot_prompt[slot], self.row_sample[slot, row])
            first = ages[slot, row]
            self.first[index] = first
            self.segment_start[index][first:] = first
        self.rows = self._placed(decoding.restart(self.rows, self.prompts, chosen))

    def _append(self, replies: dict[tuple[int, int], Sequence[int]]) -> None:
        """Appends tokens to completions, which are then sampled further. `replies` maps the index `(slot, row)` of a
        completion in the arrays to the tokens."""
        longest = max(map(len, replies.values()))
        short = max(-(-longest // 4) * 4, 4)  # the smallest bucket would add much padding to a short block
        width = min(short, length_bucket(min(longest, MOST_APPENDED)))
        for start in range(0, longest, width):
            block = np.zeros((*self.ages.shape, width), np.int32)
            counts = np.zeros(self.ages.shape, np.int32)
            for index, tokens in replies.items():
                part = tokens[start : start + width]
                counts[index] = len(part)
                block[index][width - len(part) :] = part
            self._free_columns(width)
            self.rows = self._placed(
                decoding.append(self.settings.graphdef, self.params, self.prompts, self.rows, block, counts)
            )
            self.ages = self.ages + counts
            self.row_steps += block.size
        resumed = np.zeros(self.ages.shape, bool)
        for index in replies:
            resumed[index] = True
        live = self.rows.live | resumed
        ended = self.rows.ended & ~resumed
        self.rows = self._placed(self.rows._replace(live=live, ended=ended))
