"""What attention works on: keys and values with a mask, which is an array or, for long sequences, a description of one.

This module computes nothing; the ways to attend are its neighbours' business.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Lengths(NamedTuple):
    """Every query of batch entry `i` sees its first `lengths[i]` keys; with `starts`, those from its own start on."""

    lengths: Int[Array, "B"]
    starts: Int[Array, "B N"] | None = None


class Causal(NamedTuple):
    """Queries and keys are the same positions: each sees itself and what stands before it, and with `segments` only
    what belongs to the same one. Segment -1 is padding, which sees nothing and is not seen. With `window`, a query sees
    as many positions at most, its own included.

    Right padding needs no segments: a real position stands before all padding, and what padding sees is no one's
    concern.
    """

    segments: Int[Array, "B U"] | None = None
    window: int | Int[Array, ""] | None = None


Mask = Bool[Array, "#B #N U"] | Lengths | Causal
"""Which keys a query sees: an array, or what describes one without `N * U` elements."""


class Part(NamedTuple):
    """Keys and values that every query of a batch entry may look at, where `mask` allows.

    Attributes:
      k, v: one row of keys and values per batch entry, laid out as the two products read them: a cache in this layout
        is never transposed.
      mask: query n may see key u; an array need only be broadcastable to `[B, N, U]`.
    """

    k: Float[Array, "B K h U"]
    v: Float[Array, "B K U h"]
    mask: Mask

    @property
    def described(self) -> bool:
        """Whether the mask is a description, of which blocks can be made."""
        return isinstance(self.mask, Lengths | Causal)

    @property
    def only_causal(self) -> bool:
        """Whether a query sees all that is not behind it, which every kernel can do."""
        return isinstance(self.mask, Causal) and self.mask.segments is None and self.mask.window is None

    @property
    def windowed(self) -> bool:
        """Whether a query does not see everything from its first key on."""
        if isinstance(self.mask, Causal):
            return self.mask.window is not None
        return isinstance(self.mask, Lengths) and self.mask.starts is not None


def part_of(k: Float[Array, "... U K h"], v: Float[Array, "... U K h"], mask: Mask) -> Part:
    """A part of keys and values as projections give them, positions before heads."""
    return Part(*laid_out(k, v), mask)


def laid_out(k: Float[Array, "*B U K h"], v: Float[Array, "*B U K h"]) -> tuple[Array, Array]:
    """Keys `[*B K h U]` and values `[*B K U h]`."""
    return jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2)


def segment_ids(part: Part, count: int) -> tuple[Int[Array, "B N"], Int[Array, "B U"]]:
    """Of a described mask: segments of the `count` queries and of the keys. A query sees the keys of its own segment
    (under `Causal`, those not behind it); queries at padding have -2 and keys there -1, so that none meets another."""
    batch, width = part.k.shape[0], part.k.shape[-1]
    if isinstance(part.mask, Causal) and part.mask.segments is not None:
        segments = part.mask.segments
        return jnp.where(segments < 0, -2, segments), jnp.maximum(segments, -1)
    keys = jnp.zeros((batch, width), jnp.int32)
    if isinstance(part.mask, Lengths):
        keys = jnp.where(jnp.arange(width)[None] < part.mask.lengths[:, None], keys, -1)
    return jnp.zeros((batch, count), jnp.int32), keys


def first_keys(part: Part, count: int) -> Int[Array, "B N"] | None:
    """Of a described mask with windows: the first key that each of the `count` queries may see."""
    if isinstance(part.mask, Lengths):
        return part.mask.starts
    if not isinstance(part.mask, Causal) or part.mask.window is None:
        return None
    return jnp.broadcast_to(jnp.arange(count) - part.mask.window + 1, (part.k.shape[0], count))


def dense_mask(part: Part, count: int) -> Bool[Array, "#B #N U"]:
    """The mask of a part as an array, for `count` queries."""
    if not part.described:
        return part.mask  # type: ignore[return-value]
    if isinstance(part.mask, Lengths):
        seen = segment_ids(part, 1)[1][:, None] == 0
    else:
        seen = jnp.tril(jnp.ones((count, count), bool))[None]
        if part.mask.segments is not None:  # type: ignore[union-attr]
            queries, keys = segment_ids(part, count)
            seen &= queries[:, :, None] == keys[:, None]
    if (starts := first_keys(part, count)) is None:
        return seen
    return seen & (jnp.arange(part.k.shape[-1])[None, None] >= starts[:, :, None])
