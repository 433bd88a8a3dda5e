"""Defines the inputs of attention: keys and values with a mask. A mask is an array, or one of the classes `Lengths`,
`Positions` and `Causal`, which describe such an array with fewer elements."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Lengths(NamedTuple):
    """A mask that lets the queries of batch entry `i` see the first `lengths[i]` keys of this entry. With `starts`,
    query `n` sees only the keys from index `starts[i, n]` to `lengths[i] - 1`."""

    lengths: Int[Array, "B"]
    starts: Int[Array, "B N"] | None = None


class Positions(NamedTuple):
    """An attention mask that is defined by the positions of the keys. Query `n` of batch entry `i` sees the keys of
    this entry whose position is `starts[i, n]` or higher. If `starts` is None, every query sees all keys with a
    position of 0 or higher.

    The keys can be in any order. A key with position -1 is never seen.
    """

    positions: Int[Array, "B U"]
    starts: Int[Array, "B N"] | None = None


class Causal(NamedTuple):
    """A causal mask: each position sees itself and earlier positions.

    With `segments`, the segment number of each position, a position sees only positions with its own number. Positions
    with the number -1 are padding; padding sees nothing and is not seen. With `window`, a query sees at most `window`
    positions, including its own. Padding on the right needs no segments: real positions never see later positions, and
    the outputs of padding are not used. With `queries`, there are queries at these positions only
    (`attention_sequence.py`).
    """

    segments: Int[Array, "B U"] | None = None
    window: int | Int[Array, ""] | None = None
    queries: Int[Array, "N"] | None = None

    def positions(self, count: int) -> Int[Array, "N"]:
        """Returns the positions of the `count` queries."""
        return jnp.arange(count) if self.queries is None else self.queries


Mask = Bool[Array, "#B #N U"] | Lengths | Positions | Causal
"""Defines which keys a query sees: an array, or a description with fewer than `N * U` elements."""


class Part(NamedTuple):
    """Keys and values of each batch entry, with a mask that defines which of the keys each query sees.

    Attributes:
      k, v: keys `[B, K, h, U]` and values `[B, K, U, h]` of B batch entries, K heads of width h and U keys. The two
        matrix products of attention read these layouts, so a cache in these layouts is never transposed.
      mask: which keys each query sees; an array must be broadcastable to `[B, N, U]` for N queries.
    """

    k: Float[Array, "B K h U"]
    v: Float[Array, "B K U h"]
    mask: Mask

    @property
    def described(self) -> bool:
        """Whether the mask is not an array, which the blocked implementation and the kernels do not support."""
        return isinstance(self.mask, Lengths | Positions | Causal)

    @property
    def only_causal(self) -> bool:
        """Whether the mask is causal, without segments or a window; every kernel supports it."""
        return isinstance(self.mask, Causal) and self.mask.segments is None and self.mask.window is None

    @property
    def windowed(self) -> bool:
        """Whether the mask hides early keys from some queries."""
        if isinstance(self.mask, Causal):
            return self.mask.window is not None
        return isinstance(self.mask, Lengths | Positions) and self.mask.starts is not None


def part_of(k: Float[Array, "... U K h"], v: Float[Array, "... U K h"], mask: Mask) -> Part:
    return Part(*laid_out(k, v), mask)


def laid_out(k: Float[Array, "*B U K h"], v: Float[Array, "*B U K h"]) -> tuple[Array, Array]:
    """Transposes keys and values `[*B U K h]` (positions, heads, head width) to `[*B K h U]` and `[*B K U h]`."""
    return jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2)


def segment_ids(part: Part, count: int) -> tuple[Int[Array, "B N"], Int[Array, "B U"]]:
    """Returns the segment numbers of `count` queries and of the keys of `part`. Its mask must not be an array.

    A query sees only keys with its own segment number. The causal order and windows hide further keys; the segment
    numbers do not show this. Queries that are padding have segment -2. Keys that are padding, or that the mask hides
    from all queries, have segment -1. Neither number matches any other segment.
    """
    batch = part.k.shape[0]
    width = part.k.shape[-1]
    if isinstance(part.mask, Causal) and part.mask.segments is not None:
        segments = part.mask.segments
        of_queries = segments if part.mask.queries is None else segments[:, part.mask.queries]
        return jnp.where(of_queries < 0, -2, of_queries), jnp.maximum(segments, -1)
    keys = jnp.zeros((batch, width), jnp.int32)
    if isinstance(part.mask, Lengths):
        keys = jnp.where(jnp.arange(width)[None] < part.mask.lengths[:, None], keys, -1)
    if isinstance(part.mask, Positions):
        keys = jnp.where(part.mask.positions < 0, -1, keys)
    return jnp.zeros((batch, count), jnp.int32), keys


def first_keys(part: Part, count: int) -> Int[Array, "B N"] | None:
    """Returns, for each of `count` queries, the first position in its window; None if the mask has no windows."""
    if isinstance(part.mask, Lengths | Positions):
        return part.mask.starts
    if not isinstance(part.mask, Causal) or part.mask.window is None:
        return None
    return jnp.broadcast_to(part.mask.positions(count) - part.mask.window + 1, (part.k.shape[0], count))


def key_positions(part: Part) -> Int[Array, "#B U"]:
    """Returns the position of each key, for comparison with `first_keys`; its index if the mask has no positions."""
    return part.mask.positions if isinstance(part.mask, Positions) else jnp.arange(part.k.shape[-1])[None]


def dense_mask(part: Part, count: int) -> Bool[Array, "#B #N U"]:
    if not part.described:
        return part.mask  # type: ignore[return-value]
    if isinstance(part.mask, Lengths | Positions):
        seen = segment_ids(part, 1)[1][:, None] == 0
    else:
        assert isinstance(part.mask, Causal)
        seen = (jnp.arange(part.k.shape[-1])[None] <= part.mask.positions(count)[:, None])[None]
        if part.mask.segments is not None:
            queries, keys = segment_ids(part, count)
            seen &= queries[:, :, None] == keys[:, None]
    if (starts := first_keys(part, count)) is None:
        return seen
    return seen & (key_positions(part)[:, None] >= starts[:, :, None])
