"""Samples tokens from logits with temperature, top-k and top-p. Each sampled token needs one uniform random number.

The algorithm needs no sort over the vocabulary, and no random number for each vocabulary entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key, UInt

from tunix_like.models.sharding import row_axes
from tunix_like.types import SamplingParams

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

LARGEST_BLOCK = 256
"""Largest number of tokens in a block of the vocabulary. The inverse-CDF search first selects a block and then a token
of this block: short running sums keep the float32 rounding errors small."""

LOWEST_LOGIT = -80.0
"""A token gets weight 0 if its scaled logit minus the maximum scaled logit is at most this value. The exact weight of
such a token is at most `exp(-80)`, which is too small to change the total weight in float32. Without this limit,
differences below -87.3 would give denormal numbers, which make the sums several times slower on CPU."""


def uniform_number(key: Key[Array, ""]) -> Float[Array, ""]:
    """Draws a random number that `choose` turns into a token. `jax.random.uniform` has 23 random bits and can be 0."""
    return from_bits(jax.random.bits(key, dtype=jnp.uint32))


def from_bits(bits: UInt[Array, "*N"]) -> Float[Array, "*N"]:
    """Maps 32 random bits to `(bits + 1/2) / 2**32`, rounded down to float32, so the result is in (0, 1).

    Half a cell keeps 0 out, which would draw the first token of any positive weight. Rounding down keeps 1 out, and
    makes the result less than any float32 threshold in [0, 1] for the right number of bit patterns.
    """
    dropped = jnp.right_shift(jnp.uint32(0xFF), jnp.minimum(jax.lax.clz(bits), 8))  # float32 has 24 significant bits
    kept = jnp.bitwise_and(bits, ~dropped).astype(jnp.float32)
    return (kept + jnp.where(bits < 1 << 23, 0.5, 0.0)) * 2.0**-32


def in_blocks(head: Float[Array, "D V"]) -> Float[Array, "D V"] | Float[Array, "D B b"]:
    """Splits the vocabulary of an output matrix into blocks of one size, so that the logits of `choose` have them. To
    split the logits would copy them for each token.

    The matrix is unchanged if no size from 8 to `LARGEST_BLOCK` divides the vocabulary, or the part of it that each
    device along the mesh axis `tp` has.
    """
    size = _block_size(head.shape[1] // _parts(head.shape[1]))
    return head if size is None else head.reshape(len(head), -1, size)


def _parts(tokens: int) -> int:
    """Returns the number of devices along the mesh axis `tp` if it divides the vocabulary, otherwise 1."""
    parts = jax.sharding.get_abstract_mesh().shape.get("tp", 1)
    return parts if tokens % parts == 0 else 1


def _block_size(tokens: int) -> int | None:
    return next((size for size in range(LARGEST_BLOCK, 7, -1) if tokens % size == 0), None)


def choose(
    logits: Float[Array, "N *V"], uniform: Float[Array, "N"], params: SamplingParams
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples one token per row of `logits` by inverse CDF.

    Args:
      logits: float32 logits, `[N V]` or in blocks, `[N B b]` (products with a matrix from `in_blocks`).
      uniform: one random number in (0, 1) per row, from `uniform_number`.
      params: sampling parameters; temperature 0 is greedy decoding.

    Returns:
      the tokens and their log-probabilities. The log-probabilities are values of `log_softmax(logits / temperature)`
      over the whole vocabulary, before truncation by top-k or top-p. The trainer computes the same quantity. Greedy
      decoding returns the log-probabilities at temperature 1.
    """
    scaled = logits / params.temperature if params.temperature > 0 else logits
    if params.temperature > 0 and params.top_k is None and params.top_p == 1.0:
        return _choose_by_parts(scaled, uniform)
    scaled = _blocks(scaled)
    largest = scaled.max(axis=(1, 2))
    weights = _exponentials(scaled, largest)
    normaliser = jnp.log(weights.sum(axis=(1, 2)))
    if params.temperature == 0:
        tokens = _most_likely_token(scaled)
    else:
        if params.top_k is not None and params.top_k < logits[0].size:
            weights = keep_top_k(weights, params.top_k)
        if params.top_p < 1.0:
            weights = keep_top_p(weights, params.top_p)
        tokens = inverse_cdf(weights, uniform)
    return tokens, _entry(scaled, tokens) - largest - normaliser


class RowSampling(NamedTuple):
    """Sampling parameters of each row of the logits. The values have the same meaning as in `SamplingParams`.

    Attributes:
      top_k: number of most probable tokens to keep; the vocabulary size means that every token is kept.
    """

    temperature: Float[AnyArray, "N"]
    top_p: Float[AnyArray, "N"]
    top_k: Int[AnyArray, "N"]


def choose_each(
    logits: Float[Array, "N *V"], uniform: Float[Array, "N"], sampling: RowSampling
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples one token per row of `logits` like `choose`, but with separate sampling parameters for each row.

    The token of a row does not depend on the other rows.
    """
    greedy = sampling.temperature == 0
    scaled = _blocks(logits / _column(jnp.where(greedy, 1.0, sampling.temperature), logits))
    largest = scaled.max(axis=(1, 2))
    weights = _exponentials(scaled, largest)
    normaliser = jnp.log(weights.sum(axis=(1, 2)))
    of_k = sampling.top_k < logits[0].size
    of_p = sampling.top_p < 1.0

    def keep_k(weights: Array) -> Array:
        return jnp.where(_column(of_k, weights), keep_each_top_k(weights, sampling.top_k), weights)

    def keep_p(weights: Array) -> Array:
        return jnp.where(_column(of_p, weights), keep_top_p(weights, sampling.top_p), weights)

    def drawn(weights: Array) -> Array:
        weights = jax.lax.cond((of_k & ~greedy).any(), keep_k, lambda x: x, weights)
        weights = jax.lax.cond((of_p & ~greedy).any(), keep_p, lambda x: x, weights)
        return inverse_cdf(weights, uniform)

    best = _most_likely_token(scaled)
    tokens = jnp.where(greedy, best, jax.lax.cond(greedy.all(), lambda _: best, drawn, weights))
    return tokens, _entry(scaled, tokens) - largest - normaliser


def most_likely(
    logits: Float[Array, "N *V"], temperature: Float[Array, "N"], count: int
) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
    """Returns the `count` most probable tokens of each row, in descending order, and their log-probabilities as
    `choose_each` defines them."""
    scaled = logits.reshape(len(logits), -1) / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    values, tokens = jax.lax.top_k(scaled, count)
    return tokens, values - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)


def _exponentials(scaled: Float[Array, "N *V"], largest: Float[Array, "N"]) -> Float[Array, "N *V"]:
    """Returns the exponentials of the differences of the logits `scaled` and their maximum `largest`. The exponential
    is 0 if the difference is at most `LOWEST_LOGIT`."""
    shifted = scaled - _column(largest, scaled)
    return jnp.where(shifted > LOWEST_LOGIT, jnp.exp(shifted), 0.0)


def _column(values: Array, like: Array) -> Array:
    """Reshapes one value per row to be broadcast against `like`."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _blocks(values: Float[Array, "N *V"], filler: float = -jnp.inf) -> Float[Array, "N B b"]:
    """Splits the vocabulary into blocks if it is not split yet. Where no block size divides it, `filler` completes the
    last block."""
    if values.ndim == 3:
        return values
    size = _block_size(values.shape[1]) or LARGEST_BLOCK // 2
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % size)), constant_values=filler)
    return padded.reshape(len(values), -1, size)


def _row_block(blocks: Float[Array, "N B b"], block: Int[Array, "N"]) -> Float[Array, "N b"]:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _entry(blocks: Float[Array, "N B b"], tokens: Int[Array, "N"]) -> Float[Array, "N"]:
    size = blocks.shape[-1]
    return jnp.take_along_axis(_row_block(blocks, tokens // size), tokens[:, None] % size, axis=1)[:, 0]


def _most_likely_token(scaled: Float[Array, "N B b"]) -> Int[Array, "N"]:
    """Returns the first token of the largest logit: first the block, because an `argmax` over the flattened blocks
    would copy them."""
    block = jnp.argmax(scaled.max(axis=-1), axis=-1)
    return (block * scaled.shape[-1] + jnp.argmax(_row_block(scaled, block), axis=-1)).astype(jnp.int32)


def _choose_by_parts(scaled: Float[Array, "N *V"], uniform: Float[Array, "N"]) -> tuple[Array, Array]:
    """Samples like `choose`; each device along the mesh axis `tp` computes its part of the vocabulary.

    Otherwise the compiler would gather the logits of the whole vocabulary on every device.
    """
    parts = _parts(scaled[0].size)
    if parts == 1 or scaled.shape[1] % parts:
        return _choose_from_part(scaled, uniform, None)
    rows = PartitionSpec(row_axes(jax.sharding.get_abstract_mesh(), scaled.shape[0]))
    run = jax.shard_map(
        functools.partial(_choose_from_part, axis="tp"),
        in_specs=(PartitionSpec(*rows, "tp"), rows),
        out_specs=(rows, rows),
        check_vma=False,
    )
    return run(scaled, uniform)


def _choose_from_part(
    scaled: Float[Array, "N *v"], uniform: Float[Array, "N"], axis: str | None
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples like `choose` from the logits of `v` tokens: the whole vocabulary, or with `axis` the part that this
    device along a mesh axis has.

    The logits are read twice: for their maximum and for the sums of the blocks. The devices exchange one maximum and
    one sum per row. The uniform number of a row selects a part of the vocabulary, then a block, then a token.
    """
    size = scaled[0].size
    scaled = _blocks(scaled)
    largest = scaled.max(axis=(1, 2))
    if axis is not None:
        largest = jax.lax.pmax(largest, axis)
    sums = _exponentials(scaled, largest).sum(axis=-1)
    total = sums.sum(axis=-1)
    target = uniform * total
    if axis is not None:
        totals = jax.lax.all_gather(total, axis, axis=1)
        total = totals.sum(axis=-1)
        part, target = _first_above(totals, uniform * total)
    block, rest = _first_above(sums, target)
    logits = _row_block(scaled, block)
    index, _ = _first_above(_exponentials(logits, largest), rest)
    token = block * scaled.shape[-1] + index
    shifted = jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0] - largest
    if axis is not None:
        device = jax.lax.axis_index(axis)
        token += device * size
        token, shifted = (jax.lax.psum(jnp.where(part == device, x, 0), axis) for x in (token, shifted))
    return token.astype(jnp.int32), shifted - jnp.log(total)


def keep_top_k(probs: Float[Array, "N *V"], k: int) -> Float[Array, "N *V"]:
    """Keeps the probabilities of the `k` most probable tokens, and sets all other probabilities to 0. Tokens with the
    same probability as the `k`-th token are kept too."""
    threshold = jax.lax.top_k(probs.reshape(len(probs), -1), k)[0][:, -1]
    return jnp.where(probs >= _column(threshold, probs), probs, 0.0)


def keep_each_top_k(probs: Float[Array, "N *V"], k: Int[Array, "N"]) -> Float[Array, "N *V"]:
    """Keeps the probabilities of the `k` most probable tokens, and sets all other probabilities to 0; `k` differs
    between rows. Tokens with the same probability as the `k`-th token are kept too."""
    return _keep_enough(probs, lambda kept: _total(kept > 0) >= k)


def keep_top_p(probs: Float[Array, "N *V"], top_p: float | Float[Array, "N"]) -> Float[Array, "N *V"]:
    """Keeps the smallest set of most probable tokens with at least the fraction `top_p` of the row's total probability.
    Tokens with the same probability as the least probable token of this set are kept too. All other probabilities
    become 0."""
    wanted = top_p * _total(probs)
    return _keep_enough(probs, lambda kept: _total(kept) >= wanted)


def _total(x: Array) -> Array:
    return x.sum(axis=range(1, x.ndim))


def _keep_enough(probs: Float[Array, "N *V"], enough_of: Callable[[Array], Array]) -> Float[Array, "N *V"]:
    """Keeps the smallest set of most probable tokens that satisfies `enough_of`. Tokens with the same probability as
    the least probable token of this set are kept too.

    The lowest kept probability is found by bisection over the bit patterns of float32 numbers. Read as integers, the
    bit patterns of non-negative numbers have the same order as the numbers. The bisection needs 31 calls of
    `enough_of` instead of a sort.

    Args:
      enough_of: `f(kept: [N *V]) -> [N]`: returns for each row whether the kept probabilities are enough. Probabilities
        that are not kept are 0.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = enough_of(jnp.where(probs >= _column(threshold, probs), probs, 0.0))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    top = jax.lax.bitcast_convert_type(probs.max(axis=range(1, probs.ndim)), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(top), top + 1))
    return jnp.where(probs >= _column(jax.lax.bitcast_convert_type(low, jnp.float32), probs), probs, 0.0)


def inverse_cdf(weights: Float[Array, "N *V"], uniform: Float[Array, "N"]) -> Int[Array, "N"]:
    """Returns for each row the first token at which the running sum of the weights exceeds `uniform` times their total.
    Tokens of weight 0 are never returned."""
    blocks = _blocks(weights, 0.0)
    sums = blocks.sum(axis=-1)
    block, rest = _first_above(sums, uniform * sums.sum(axis=-1))
    index, _ = _first_above(_row_block(blocks, block), rest)
    return (block * blocks.shape[-1] + index).astype(jnp.int32)


def _first_above(weights: Float[Array, "N K"], target: Float[Array, "N"]) -> tuple[Array, Array]:
    """Returns the first index at which the running sum of `weights` exceeds `target`, and `target` minus the sum before
    that index.

    The entry at the index always has a positive weight. If rounding moves `target` above the last sum, the index is
    that of the last positive weight. If rounding moves `target` below zero, the index is that of the first positive
    weight.
    """
    running = jnp.cumsum(weights, axis=-1)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    index = jnp.minimum((running <= jnp.maximum(target, 0.0)[:, None]).sum(axis=-1), last)
    before = jnp.take_along_axis(running - weights, index[:, None], axis=1)[:, 0]
    return index, target - before
