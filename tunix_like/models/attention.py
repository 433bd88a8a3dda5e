"""Softmax attention over one or several parts of the keys, with grouped heads; scores and softmax in float32.

A part is a set of keys and values with a mask. Completions of one prompt share the prompt's part, which therefore
exists once per group. This module knows no weights, no cache and no positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30
"""Score of a masked key: finite, so that a row whose every key is masked yields finite garbage and no NaN gradient."""


class Part(NamedTuple):
    """Keys and values that every query of a batch entry may look at, where `mask` allows.

    Attributes:
      k, v: one row of keys and values per batch entry.
      mask: broadcastable to `[B, N, U]`: query n may see key u.
    """

    k: Float[Array, "B U K h"]
    v: Float[Array, "B U K h"]
    mask: Bool[Array, "#B #N U"]


def _scores(q: Float[Array, "B N K R h"], part: Part) -> Float[Array, "B K R N U"]:
    scores = jnp.einsum("bnkrh,bukh->bkrnu", q, part.k, preferred_element_type=jnp.float32)
    return jnp.where(part.mask[:, None, None], scores, MASKED)


def _values(weights: Float[Array, "B K R N U"], part: Part) -> Float[Array, "B N K R h"]:
    return jnp.einsum("bkrnu,bukh->bnkrh", weights.astype(part.v.dtype), part.v, preferred_element_type=jnp.float32)


def attention(q: Float[Array, "B N H h"], part: Part) -> Float[Array, "B N H h"]:
    """`softmax(q k^T / sqrt(h)) v` over one part; query head `i` uses key head `i // (H // K)`."""
    split = _split_heads(q, part.k.shape[2])
    weights = jax.nn.softmax(_scores(split, part), axis=-1)
    return _values(weights, part).reshape(q.shape).astype(q.dtype)


def group_attention(q: Float[Array, "P G T H h"], prompt: Part, own: Part) -> Float[Array, "P G T H h"]:
    """Attention of completions over their prompt's keys (stored once per group) and their own, under ONE softmax.

    Args:
      q: queries of every completion of every prompt.
      prompt: part with `B = P`; its mask broadcasts over the `G * T` queries of a prompt.
      own: part with `B = P * G`: each completion's own keys.

    The two parts are joined by their common maximum and the sum of their exponentials, so no `[T, S + T]` array is
    assembled, and the gradient flows through both (unlike the residual of `jax.nn.dot_product_attention`).
    """
    groups, size, steps, heads, width = q.shape
    key_heads = prompt.k.shape[2]
    repeat = heads // key_heads
    by_prompt = _split_heads(q.reshape(groups, size * steps, heads, width), key_heads)
    by_row = _split_heads(q.reshape(groups * size, steps, heads, width), key_heads)

    def to_rows(x: Array) -> Array:  # [P K R (G T) X] -> [(P G) K R T X]
        x = x.reshape(groups, key_heads, repeat, size, steps, -1)
        return jnp.moveaxis(x, 3, 1).reshape(groups * size, key_heads, repeat, steps, -1)

    def to_prompts(x: Array) -> Array:  # [(P G) K R T X] -> [P K R (G T) X]
        x = x.reshape(groups, size, key_heads, repeat, steps, -1)
        return jnp.moveaxis(x, 1, 3).reshape(groups, key_heads, repeat, size * steps, -1)

    prompt_scores, own_scores = _scores(by_prompt, prompt), _scores(by_row, own)
    top = jnp.maximum(to_rows(prompt_scores.max(-1, keepdims=True)), own_scores.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    prompt_exp, own_exp = jnp.exp(prompt_scores - to_prompts(top)), jnp.exp(own_scores - top)
    total = to_rows(prompt_exp.sum(-1, keepdims=True)) + own_exp.sum(-1, keepdims=True)
    out = _values(prompt_exp, prompt).reshape(q.shape) + _values(own_exp, own).reshape(q.shape)
    # Normalised last: dividing `h` numbers a query instead of `S + T` saves a third of the backward pass on the CPU.
    total = total.reshape(groups, size, heads, steps).swapaxes(2, 3)[..., None]
    return (out / total).astype(q.dtype)


def _split_heads(q: Float[Array, "B N H h"], key_heads: int) -> Float[Array, "B N K R h"]:
    """Scales the queries and lines them up with the key heads they read."""
    batch, count, heads, width = q.shape
    return (q * width**-0.5).reshape(batch, count, key_heads, heads // key_heads, width)
