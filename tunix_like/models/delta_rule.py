"""Computes the gated delta rule (Yang et al., arXiv 2412.06464), the linear attention of recurrent layers.

A head has a state `S [k, v]`, which the token at position t decays and corrects, and then reads:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
    o_t = S_t^T q_t

The inputs of q, k and v pass a causal convolution over the last tokens. State and last inputs of the convolution are
the `Memory` of a layer: all that later tokens need. A block of tokens is described by `offsets`: for each place, how
many tokens of the same sequence are before it in the block; -1 for padding. At an offset of 0 a sequence starts, from
the memory that the block is given, so several sequences with the same past (completions of a prompt) can share a block.
Padding changes nothing.

`chunked_delta_rule` processes a block by matrix products over chunks of tokens, `delta_rule_step` a single token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64
"""Tokens per chunk; a power of two. Work inside a chunk is quadratic in it, work between chunks is sequential."""


_PRECISION = jax.lax.Precision.HIGH
"""Of the products that invert a matrix: on a TPU three passes in bfloat16, which take hardly longer than one for
matrices of this size. Errors of a single pass would grow to 7e-3 of the largest entry."""


class Memory(NamedTuple):
    """What the tokens after a sequence need from a recurrent layer.

    Attributes:
      state: state of each of H value heads, with key width k and value width v; float32.
      tail: the last `w = W - 1` inputs of the convolution, whose width is W; 0 before the first token.
    """

    state: Float[Array, "B H k v"]
    tail: Float[Array, "B w C"]


class Past(NamedTuple):
    """How a block of tokens continues earlier ones: the memory before its sequences, and the offsets of its tokens."""

    memory: Memory
    offsets: Int[Array, "B T"]


def convolve(
    x: Float[Array, "B T C"], weight: Float[Array, "C 1 W"], tail: Float[Array, "B w C"], offsets: Int[Array, "B T"]
) -> Float[Array, "B T C"]:
    """Computes the causal convolution of each channel. Inputs before the start of a sequence are those of `tail`."""
    width = weight.shape[-1]
    taps = weight[:, 0].T.astype(x.dtype)
    out = x * taps[None, None, -1]
    for lag in range(1, width):
        own = jnp.pad(x, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]]
        for offset in range(lag):  # the places whose input at this lag is before their sequence
            earlier = tail[:, None, width - 1 + offset - lag].astype(x.dtype)
            own = jnp.where((offsets == offset)[..., None], earlier, own)
        out += own * taps[None, None, -1 - lag]
    return out


def tail_after(
    x: Float[Array, "B T C"], tail: Float[Array, "B w C"], offsets: Int[Array, "B T"]
) -> Float[Array, "B w C"]:
    """Returns the last inputs of the convolution after the last token of each block."""
    places = jnp.arange(x.shape[1])[None]
    last = jnp.max(jnp.where(offsets >= 0, places, -1), axis=1, keepdims=True)
    count = jnp.where(last >= 0, jnp.take_along_axis(offsets, jnp.maximum(last, 0), axis=1) + 1, 0)
    lags = jnp.arange(tail.shape[1])[::-1][None]
    own = jnp.take_along_axis(x, jnp.maximum(last - lags, 0)[..., None], axis=1)
    earlier = jnp.take_along_axis(
        tail, jnp.minimum(tail.shape[1] - 1 + count - lags, tail.shape[1] - 1)[..., None], axis=1
    )
    return jnp.where((lags < count)[..., None], own, earlier.astype(x.dtype))


def _normalized(x: Float[Array, "... k"]) -> Float[Array, "... k"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def chunked_delta_rule(
    q: Float[Array, "B T K k"],
    k: Float[Array, "B T K k"],
    v: Float[Array, "B T H v"],
    decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H k v"],
    offsets: Int[Array, "B T"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H v"], Float[Array, "B H k v"]]:
    """Applies the delta rule to blocks of tokens. Value head `i` uses key head `i // (H // K)`.

    Args:
      q, k: are normalised here; q is also divided by `sqrt(k)`.
      decay: the logarithm g of the factor of the state; at most 0.
      state: state before each sequence of the block.

    Returns:
      the outputs (undefined for padding) and the states after the last token of the blocks.
    """
    batch, count, key_heads, width = k.shape
    heads, value_width = v.shape[2:]
    chunk = min(chunk, 1 << (count - 1).bit_length())
    steps = -(-count // chunk)

    dtype = v.dtype

    def cut(x: Array, *axes: int) -> Array:  # [B T *axes w] -> [n B *axes c w], chunks of c tokens
        x = jnp.pad(x, ((0, 0), (0, steps * chunk - count), *[(0, 0)] * (x.ndim - 2)))
        x = x.reshape(batch, steps, chunk, *axes, -1)
        return jnp.moveaxis(jnp.moveaxis(x, 2, -2), 1, 0)

    real = (offsets >= 0)[..., None]
    per_key = key_heads, heads // key_heads
    # Moved in the dtype of the inputs, and then cast.
    q = _normalized(cut(q, key_heads)) * width**-0.5
    k = _normalized(cut(k, key_heads))
    v = cut(v, *per_key)
    beta = cut(jnp.where(real, beta, 0), *per_key)
    g = cut(jnp.where(real, decay, 0), *per_key)[..., 0]
    begins = jnp.pad(offsets == 0, ((0, 0), (0, steps * chunk - count))).reshape(batch, steps, chunk)
    number = jnp.cumsum(begins.swapaxes(0, 1), axis=-1)  # of the sequence within the chunk; 0: it goes on from before

    same = (number[..., :, None] == number[..., None, :]) & jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
    total = jnp.einsum("nbij,nbhrj->nbhri", same.astype(jnp.float32), g, precision=jax.lax.Precision.HIGHEST)
    same = same[:, :, None, None]
    # exp(sum of g from j + 1 to i), the decay between two tokens; the inner `where` keeps gradients finite
    pairs = jnp.where(same, jnp.exp(jnp.where(same, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    factor = jnp.exp(total)[..., None]  # of the state before the sequence or chunk

    by_key = lambda x: x[:, :, :, None]  # noqa: E731
    products = by_key(jnp.matmul(k, k.swapaxes(-1, -2)))
    inverse = _unit_lower_inverse(
        beta * products * pairs * jnp.tril(jnp.ones((chunk, chunk)), -1)[None, None, None, None]
    )
    written = jnp.matmul(inverse, beta * v.astype(jnp.float32))
    seen = jnp.matmul(inverse, beta * factor * by_key(k))  # `written - seen @ S` are the corrections
    scores = by_key(jnp.matmul(q, k.swapaxes(-1, -2))) * pairs
    asked = factor * by_key(q)
    left = pairs[..., -1, :, None] * by_key(k)  # what a token adds to the state after the chunk

    state = state.reshape(batch, *per_key, width, value_width).astype(jnp.float32)
    carried = (number == 0)[:, :, None, None, :, None]
    fresh = jnp.where(carried, 0.0, 1.0)
    written -= fresh * jnp.matmul(seen, state[None])
    out = fresh * jnp.matmul(asked, state[None])
    seen, asked = jnp.where(carried, seen, 0.0), jnp.where(carried, asked, 0.0)
    last = factor[..., -1:, :], fresh[..., -1:, :]

    def step(carry: Array, given: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        written, seen, asked, left, factor, fresh = given
        corrections = written - jnp.matmul(seen, carry)
        read = jnp.matmul(asked, carry)
        before = jnp.where(fresh > 0, state, carry)
        return factor * before + jnp.matmul(left.swapaxes(-1, -2), corrections), (corrections, read)

    final, (corrections, read) = jax.lax.scan(step, state, (written, seen, asked, left, *last))
    out = (out + read + jnp.matmul(scores, corrections)).astype(dtype)  # [n B K r c v]
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), -2, 2).reshape(batch, steps * chunk, heads, value_width)
    return out[:, :count], final.reshape(batch, heads, width, value_width)


@jax.custom_vjp
def _unit_lower_inverse(a: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """Returns `(1 + a)^-1` of strictly lower triangular matrices, whose size is a power of two.

    Blocks on the diagonal are inverted, from size 1 on in pairs: with the inverses X of the blocks of a pair and the
    block C below the diagonal, the entry of the larger inverse is `-X C X`. A series of powers of `a` would need
    fewer products, but cancels digits if keys are alike.
    """
    size = a.shape[-1]
    row = jnp.arange(size)[:, None]
    column = jnp.arange(size)[None]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    half = 1
    while half < size:
        below = (row // (2 * half) == column // (2 * half)) & (row // half % 2 == 1) & (column // half % 2 == 0)
        block = jnp.where(below.reshape(*[1] * (a.ndim - 2), size, size), a, 0.0)
        if half > 1:
            block = jnp.matmul(jnp.matmul(inverse, block, precision=_PRECISION), inverse, precision=_PRECISION)
        inverse = inverse - block
        half = 2 * half
    return inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-jnp.matmul(jnp.matmul(turned, cotangent), turned),)


_unit_lower_inverse.defvjp(lambda a: (_unit_lower_inverse(a),) * 2, _inverse_backward)


def delta_rule(
    q: Float[Array, "B T K k"],
    k: Float[Array, "B T K k"],
    v: Float[Array, "B T H v"],
    decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H k v"],
    offsets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T H v"], Float[Array, "B H k v"]]:
    """Applies the delta rule to blocks of any length; as `chunked_delta_rule`."""
    if q.shape[1] > 1:
        return chunked_delta_rule(q, k, v, decay, beta, state, offsets)
    out, after = delta_rule_step(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], state)
    return out[:, None], jnp.where(offsets[..., None, None] < 0, state, after)


def delta_rule_step(
    q: Float[Array, "B K k"],
    k: Float[Array, "B K k"],
    v: Float[Array, "B H v"],
    decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H k v"],
) -> tuple[Float[Array, "B H v"], Float[Array, "B H k v"]]:
    """Applies the delta rule to one token. Arguments and results are those of `chunked_delta_rule`."""
    repeats = v.shape[1] // k.shape[1]
    q = jnp.repeat(_normalized(q) * k.shape[-1] ** -0.5, repeats, 1)
    k = jnp.repeat(_normalized(k), repeats, 1)
    factor = jnp.exp(decay.astype(jnp.float32))[..., None]
    # Both reads of the old state come first: a single pass over the state computes them.
    known, asked = (factor * (state * x[..., None]).sum(axis=-2) for x in (k, q))
    correction = beta[..., None].astype(jnp.float32) * (v.astype(jnp.float32) - known)
    out = asked + (q * k).sum(-1, keepdims=True) * correction
    return out.astype(v.dtype), factor[..., None] * state + k[..., None] * correction[..., None, :]
