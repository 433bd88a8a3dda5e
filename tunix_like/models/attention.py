"""Softmax attention over one or several parts of the keys, with grouped heads; scores and softmax in float32.

A part is a set of keys and values with a mask. Completions of one prompt share the prompt's part, which therefore
exists once per group. This module knows no weights, no cache and no positions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30
"""Score of a masked key: finite, so that a row whose every key is masked yields finite garbage and no NaN gradient."""


class Part(NamedTuple):
    """Keys and values that every query of a batch entry may look at, where `mask` allows.

    Attributes:
      k, v: one row of keys and values per batch entry, laid out as the two products read them: a cache in this layout
        is never transposed.
      mask: broadcastable to `[B, N, U]`: query n may see key u.
    """

    k: Float[Array, "B K h U"]
    v: Float[Array, "B K U h"]
    mask: Bool[Array, "#B #N U"]


def part_of(k: Float[Array, "... U K h"], v: Float[Array, "... U K h"], mask: Bool[Array, "#B #N U"]) -> Part:
    """A part of keys and values as projections give them, positions before heads."""
    return Part(*laid_out(k, v), mask)


def laid_out(k: Float[Array, "*B U K h"], v: Float[Array, "*B U K h"]) -> tuple[Array, Array]:
    """Keys `[*B K h U]` and values `[*B K U h]`."""
    return jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2)


def attention(q: Float[Array, "B N H h"], part: Part) -> Float[Array, "B N H h"]:
    """`softmax(q k^T / sqrt(h)) v` over one part; query head `i` uses key head `i // (H // K)`."""
    scores = _scores(q, part)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = _unfold(weights.sum(-1, keepdims=True), q.shape[2])
    return (_unfold(_values(weights, part), q.shape[2]) / total).astype(q.dtype)


def group_attention(q: Float[Array, "P G T H h"], prompt: Part, *own: Part) -> Float[Array, "P G T H h"]:
    """Attention of completions over their prompt's keys (stored once per group) and their own, under ONE softmax.

    Args:
      q: queries of every completion of every prompt.
      prompt: part with `B = P`; its mask broadcasts over the `G * T` queries of a prompt.
      own: parts with `B = P * G`: each completion's own keys.

    The parts are joined by their common maximum and the sum of their exponentials, so no `[T, S + T]` array is
    assembled, and the gradient flows through all (unlike the residual of `jax.nn.dot_product_attention`).
    """
    groups, size, steps, heads, width = q.shape
    by_prompt = q.reshape(groups, size * steps, heads, width)
    by_row = q.reshape(groups * size, steps, heads, width)

    def to_rows(x: Array) -> Array:  # [P K R (G T) 1] -> [(P G) K R T 1]
        x = x.reshape(*x.shape[:3], size, steps, 1)
        return jnp.moveaxis(x, 3, 1).reshape(groups * size, *x.shape[1:3], steps, 1)

    def to_prompts(x: Array) -> Array:  # [(P G) K R T 1] -> [P K R (G T) 1]
        x = x.reshape(groups, size, *x.shape[1:])
        return jnp.moveaxis(x, 1, 3).reshape(groups, *x.shape[2:4], size * steps, 1)

    prompt_scores, own_scores = _scores(by_prompt, prompt), [_scores(by_row, part) for part in own]
    tops = [to_rows(prompt_scores.max(-1, keepdims=True)), *(scores.max(-1, keepdims=True) for scores in own_scores)]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    prompt_exp = jnp.exp(prompt_scores - to_prompts(top))
    total = to_rows(prompt_exp.sum(-1, keepdims=True))
    out = _unfold(_values(prompt_exp, prompt), heads).reshape(q.shape)
    for scores, part in zip(own_scores, own, strict=True):
        own_exp = jnp.exp(scores - top)
        total += own_exp.sum(-1, keepdims=True)
        out += _unfold(_values(own_exp, part), heads).reshape(q.shape)
    # Normalised last: dividing `h` numbers a query instead of `S + T` saves a third of the backward pass on the CPU.
    return (out / _unfold(total, heads).reshape(*q.shape[:4], 1)).astype(q.dtype)


def _scores(q: Float[Array, "B N H h"], part: Part) -> Float[Array, "B K R N U"]:
    """Scaled and masked scores. Heads stand before positions, so that the product is a plain batched one: on the CPU
    its gradient takes half the time of one whose batch axes lie in between."""
    batch, count, heads, width = q.shape
    key_heads = part.k.shape[1]
    split = (q * width**-0.5).reshape(batch, count, key_heads, heads // key_heads, width)
    folded = split.transpose(0, 2, 3, 1, 4).reshape(batch, key_heads, -1, width)
    scores = jnp.matmul(folded, part.k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, key_heads, heads // key_heads, count, -1)
    return jnp.where(part.mask[:, None, None], scores, MASKED)


def _values(weights: Float[Array, "B K R N U"], part: Part) -> Float[Array, "B K R N h"]:
    folded = weights.astype(part.v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.matmul(folded, part.v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:4], -1)


def _unfold(x: Float[Array, "B K R N h"], heads: int) -> Float[Array, "B N H h"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], heads, -1)
