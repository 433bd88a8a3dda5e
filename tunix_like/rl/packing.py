"""Rollouts to micro-batches, on the host: which rows of which groups go through the model together.

A micro-batch holds `p` prompts with `g` completions each; a prompt is computed once per micro-batch that holds it. This
module knows no model, no loss and no jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray


class MicroBatches(NamedTuple):
    """`M` micro-batches stacked along the first axis. `group` and `sample` say where a row stands in the `[P, G]`
    batch; a row of length 0 is padding."""

    prompt_tokens: Int[AnyArray, "M p S"]
    prompt_lengths: Int[AnyArray, "M p"]
    tokens: Int[AnyArray, "M p g T"]
    lengths: Int[AnyArray, "M p g"]
    group: Int[AnyArray, "M p"]
    sample: Int[AnyArray, "M p g"]
    rollout_logprobs: Float[AnyArray, "M p g T"] | None
    old_logprobs: Float[AnyArray, "M p g T"] | None
    ref_logprobs: Float[AnyArray, "M p g T"] | None


def split_shape(
    num_generations: int, micro_batch_size: int | None, most_prompts: int, device_parts: int = 1
) -> tuple[int, int]:
    """Prompts and completions per prompt of one micro-batch of at most `micro_batch_size` completions (None: one
    group), and of at most `most_prompts` prompts.

    Whole groups where they fit; else even parts of one group, the prompt being computed once per part. The number of
    prompts is rounded up to a multiple of `device_parts`, so that every device has as many.
    """
    size = micro_batch_size or num_generations
    prompts, parts = max(1, size // num_generations), -(-num_generations // min(size, num_generations))
    prompts = -(-min(prompts, most_prompts) // device_parts) * device_parts
    return prompts, -(-num_generations // parts)


def pack(
    batch: GroupBatch,
    rows: Bool[np.ndarray, "P G"],
    shape: tuple[int, int],
    room: int | None = None,
    old_logprobs: np.ndarray | None = None,
    ref_logprobs: np.ndarray | None = None,
) -> MicroBatches:
    """Lays completions out in micro-batches of `shape = (p, g)`, every one of the same shape.

    Args:
      rows: the completions to lay out; those of one group stand together, `g` of them beside one copy of its prompt.
      room: make as many micro-batches as this many whole groups need (None: as the given rows need), whatever the
        number of rows, so that the step is compiled once; what is missing at the end is padding of length 0.
    """
    prompts, size = shape
    total = rows.shape[1]
    entries = []
    for number in np.flatnonzero(rows.any(axis=1)):
        live = np.flatnonzero(rows[number])
        entries += [(number, live[start : start + size]) for start in range(0, len(live), size)]
    parts = -(-total // size)
    count = -(-max(len(entries), (room or 0) * parts, 1) // prompts)
    group = np.full(count * prompts, entries[-1][0] if entries else 0, np.int32)
    sample, real = np.zeros((len(group), size), np.int32), np.zeros((len(group), size), bool)
    for place, (number, chosen) in enumerate(entries):
        group[place], sample[place, : len(chosen)], real[place, : len(chosen)] = number, chosen, True

    def by_row(values: np.ndarray) -> np.ndarray:
        picked = values[group[:, None], sample]
        return picked.reshape(count, prompts, size, *picked.shape[2:])

    def by_prompt(values: np.ndarray) -> np.ndarray:
        return values[group].reshape(count, prompts, *values.shape[1:])

    return MicroBatches(
        prompt_tokens=by_prompt(np.asarray(batch.prompt_tokens)),
        prompt_lengths=by_prompt(np.asarray(batch.prompt_lengths)),
        tokens=by_row(np.asarray(batch.completion_tokens)),
        lengths=by_row(np.asarray(batch.completion_lengths)) * real.reshape(count, prompts, size),
        group=group.reshape(count, prompts),
        sample=sample.reshape(count, prompts, size),
        rollout_logprobs=None if batch.rollout_logprobs is None else by_row(np.asarray(batch.rollout_logprobs)),
        old_logprobs=None if old_logprobs is None else by_row(old_logprobs),
        ref_logprobs=None if ref_logprobs is None else by_row(ref_logprobs),
    )


def unpack(values: np.ndarray, micro: MicroBatches, shape: tuple[int, ...]) -> np.ndarray:
    """Puts per-row results `[M p g ...]` back to `[P G ...]`; rows that were not packed are 0."""
    out = np.zeros(shape + values.shape[3:], values.dtype)
    real = np.asarray(micro.lengths) > 0
    sample = np.asarray(micro.sample)
    group = np.broadcast_to(np.asarray(micro.group)[..., None], sample.shape)
    out[group[real], sample[real]] = values[real]
    return out
