"""Chooses the array shapes of rollouts: rounded lengths of prompts and completions, and numbers of prompts and
completions that are sampled at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

FIRST_CACHE = 128
"""Initial number of columns of the cache of keys and values. The number doubles as needed. Programs are compiled for
each number separately."""

FEWEST_ROWS = {"cpu": 8}
FEWEST_ROWS_ELSEWHERE = 64
"""Minimum number of rows per device after live rows were moved to smaller arrays. `FEWEST_ROWS` has this number for
some backends; `FEWEST_ROWS_ELSEWHERE` is the number for all other backends. With fewer rows, most of the time of a
decode step is spent on reading the weights."""

PREFILL_TOKENS = 2**16
"""Number of prompt tokens per device above which prompts are processed in pieces. With fewer tokens, weights and caches
take more memory than activations (Qwen3-8B: 5 GB in a layer's MLP)."""

FEWEST_PREFILLED = 512
"""Minimum number of tokens of a prompt in a piece."""

FEWEST_TOKENS_LEFT = 16
"""Live rows are moved to smaller arrays only if at least one row can still get this many tokens."""


def length_bucket(length: int, limit: int | None = None) -> int:
    """Rounds `length` up to the next of 16, 24, 32, 48, 64, 96, 128, ..., at most `limit`. A `length` above `limit` is
    returned unchanged.

    The rounding bounds the number of compiled shapes. If `length` is above 16, at most a third of the padded length is
    padding.
    """
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(length, min(size, limit))


def prefill_piece(prompts: int, width: int) -> int:
    """Returns how many tokens of each of `prompts` prompts of `width` tokens a device processes at once: all of them,
    or a power of two that makes about `PREFILL_TOKENS`."""
    if prompts * width <= PREFILL_TOKENS:
        return width
    return min(width, max(FEWEST_PREFILLED, 1 << max(PREFILL_TOKENS // prompts, 1).bit_length() - 1))


def pad_tokens(rows: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "N W"]:
    """Stacks token sequences of different lengths to one array. Each sequence is padded on the right with 0 to `width`
    tokens."""
    out = np.zeros((len(rows), width), np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


def slot_shape(
    prompts: int, size: int, at_once: int, prompt_length: int, max_tokens: int, parts: int = 1
) -> tuple[int, int]:
    """Chooses the number of slots and the number of rows per slot, with at most `at_once` rows in total. A slot holds
    one prompt, and each of its rows holds one completion of this prompt.

    If `at_once` rows suffice, each prompt has one slot, whose rows sample its `size` completions in as few turns of
    equal size as possible. Otherwise the shape with the lowest estimated cost is chosen. Few rows per slot are good,
    because a slot takes the next prompt only when all of its rows have ended. If lengths are distributed exponentially,
    `w` rows need `1 + 1/2 + ... + 1/w` times the mean length until all have ended. Many rows per slot are good, because
    the rows of a slot share the reads of the prompt's keys and values.

    Args:
      parts: number of devices over which slots are sharded. If completions wait, it divides the number of slots.
    """
    if at_once >= prompts * size:
        return prompts, size
    if at_once >= prompts and prompts % parts == 0:
        turns = -(-size // (at_once // prompts))
        return prompts, -(-size // turns)

    def cost(width: int) -> float:
        waiting = sum(1 / i for i in range(1, width + 1))
        return (max_tokens / 2 + prompt_length / width) * min(waiting, 2.5)  # at most 2.5: lengths are limited

    width = min((w for w in {*(1 << i for i in range(size.bit_length())), size} if w <= at_once), key=cost)
    slots = min(prompts * -(-size // width), at_once // width)
    return max(slots - slots % parts, 1), width


def rounded(numbers: Int[np.ndarray, "N"], most: int, fill: int | None = None) -> Int[np.ndarray, "M"]:
    """Pads `numbers` with `fill`. The new length is the next power of two, or `most` if `most` is smaller.

    If `fill` is None, the last number is repeated.
    """
    count = max(len(numbers), min(1 << (len(numbers) - 1).bit_length(), most))
    return np.pad(numbers, (0, count - len(numbers)), constant_values=numbers[-1] if fill is None else fill)
