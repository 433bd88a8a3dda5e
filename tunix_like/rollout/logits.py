"""Samples tokens from logits with temperature, top-k and top-p. Each sampled token needs one uniform random number.

The algorithm needs no sort over the vocabulary, and no random number for each vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from tunix_like.models.sharding import row_axes
from tunix_like.types import SamplingParams

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

BLOCK = 256
"""Block size of the inverse-CDF search, in tokens. Short running sums keep the float32 rounding errors small."""


LOWEST_LOGIT = -80.0
"""A token gets weight 0 if its scaled logit minus the maximum scaled logit is at most this value. The exact weight of
such a token is at most `exp(-80)`, which is too small to change the total weight in float32. Without this limit,
differences below -87.3 would give denormal numbers, which make the sums several times slower on CPU."""


def choose(
    logits: Float[Array, "N V"], uniform: Float[Array, "N"], params: SamplingParams
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples one token per row of `logits` by inverse CDF.

    Args:
      logits: float32 logits.
      uniform: one uniform random number in [0, 1) per row.
      params: sampling parameters; temperature 0 is greedy decoding.

    Returns:
      the tokens and their log-probabilities. The log-probabilities are values of `log_softmax(logits / temperature)`
      over the whole vocabulary, before truncation by top-k or top-p. The trainer computes the same quantity. Greedy
      decoding returns the log-probabilities at temperature 1.
    """
    scaled = logits / params.temperature if params.temperature > 0 else logits
    whole = params.temperature > 0 and params.top_k is None and params.top_p == 1.0
    parts = jax.sharding.get_abstract_mesh().shape.get("tp", 1)
    if whole and parts > 1 and logits.shape[-1] % parts == 0:
        return _choose_by_parts(scaled, uniform)
    shifted, weights = _exponentials(scaled, scaled.max(axis=-1))
    normaliser = jnp.log(weights.sum(axis=-1))
    if params.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        if params.top_k is not None and params.top_k < logits.shape[-1]:
            weights = keep_top_k(weights, params.top_k)
        if params.top_p < 1.0:
            weights = keep_top_p(weights, params.top_p)
        tokens = inverse_cdf(weights, uniform)
    return tokens.astype(jnp.int32), jnp.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0] - normaliser


class RowSampling(NamedTuple):
    """Sampling parameters of each row of the logits. The values have the same meaning as in `SamplingParams`.

    Attributes:
      top_k: number of most probable tokens to keep; the vocabulary size means that every token is kept.
    """

    temperature: Float[AnyArray, "N"]
    top_p: Float[AnyArray, "N"]
    top_k: Int[AnyArray, "N"]


def choose_each(
    logits: Float[Array, "N V"], uniform: Float[Array, "N"], sampling: RowSampling
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples one token per row of `logits` like `choose`, but with separate sampling parameters for each row.

    The token of a row does not depend on the other rows.
    """
    greedy = sampling.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    shifted, weights = _exponentials(scaled, scaled.max(axis=-1))
    normaliser = jnp.log(weights.sum(axis=-1))
    of_k, of_p = sampling.top_k < logits.shape[-1], sampling.top_p < 1.0

    def keep_k(weights: Array) -> Array:
        return jnp.where(of_k[:, None], keep_each_top_k(weights, sampling.top_k), weights)

    def keep_p(weights: Array) -> Array:
        return jnp.where(of_p[:, None], keep_top_p(weights, sampling.top_p), weights)

    def drawn(weights: Array) -> Array:
        weights = jax.lax.cond((of_k & ~greedy).any(), keep_k, lambda x: x, weights)
        weights = jax.lax.cond((of_p & ~greedy).any(), keep_p, lambda x: x, weights)
        return inverse_cdf(weights, uniform).astype(jnp.int32)

    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.where(greedy, best, jax.lax.cond(greedy.all(), lambda _: best, drawn, weights))
    return tokens, jnp.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0] - normaliser


def _exponentials(scaled: Float[Array, "N V"], largest: Float[Array, "N"]) -> tuple[Array, Array]:
    """Returns the differences of the logits `scaled` and their maximum `largest`, and the exponentials of the
    differences. The exponential is 0 if the difference is at most `LOWEST_LOGIT`."""
    shifted = scaled - largest[:, None]
    return shifted, jnp.where(shifted > LOWEST_LOGIT, jnp.exp(shifted), 0.0)


def _choose_by_parts(scaled: Float[Array, "N V"], uniform: Float[Array, "N"]) -> tuple[Array, Array]:
    """Samples like `choose`; each device along the mesh axis `tp` computes its part of the vocabulary.

    Without this function, the compiler would gather the logits of the whole vocabulary on every device.
    """
    rows = PartitionSpec(row_axes(jax.sharding.get_abstract_mesh(), scaled.shape[0]))
    run = jax.shard_map(
        _choose_from_part, in_specs=(PartitionSpec(*rows, "tp"), rows), out_specs=(rows, rows), check_vma=False
    )
    return run(scaled, uniform)


def _choose_from_part(
    scaled: Float[Array, "N v"], uniform: Float[Array, "N"]
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Samples like `choose`, on a device that has the logits of a part of the vocabulary: `v` tokens.

    The devices exchange one maximum and one sum per row instead of the logits. The uniform number of a row selects a
    part of the vocabulary, and then a token of this part.
    """
    axis = "tp"
    shifted, weights = _exponentials(scaled, jax.lax.pmax(scaled.max(axis=-1), axis))
    sums, blocks = _block_sums(weights)
    totals = jax.lax.all_gather(sums.sum(axis=-1), axis, axis=1)
    total = totals.sum(axis=-1)
    part, rest = _first_above(totals, uniform * total)
    token = _token_at(sums, blocks, rest)
    logprob = jnp.take_along_axis(shifted, token[:, None], axis=1)[:, 0]
    here, first = part == jax.lax.axis_index(axis), jax.lax.axis_index(axis) * scaled.shape[-1]
    token, logprob = (jax.lax.psum(jnp.where(here, x, 0), axis) for x in (token + first, logprob))
    return token.astype(jnp.int32), logprob - jnp.log(total)


def keep_top_k(probs: Float[Array, "N V"], k: int) -> Float[Array, "N V"]:
    """Keeps the probabilities of the `k` most probable tokens, and sets all other probabilities to 0. Tokens with the
    same probability as the `k`-th token are kept too."""
    threshold = jax.lax.top_k(probs, k)[0][:, -1:]
    return jnp.where(probs >= threshold, probs, 0.0)


def keep_each_top_k(probs: Float[Array, "N V"], k: Int[Array, "N"]) -> Float[Array, "N V"]:
    """Keeps the probabilities of the `k` most probable tokens, and sets all other probabilities to 0; `k` differs
    between rows. Tokens with the same probability as the `k`-th token are kept too."""
    return _keep_enough(probs, lambda kept: (kept > 0).sum(axis=-1) >= k)


def keep_top_p(probs: Float[Array, "N V"], top_p: float | Float[Array, "N"]) -> Float[Array, "N V"]:
    """Keeps the smallest set of most probable tokens with at least the fraction `top_p` of the row's total probability.
    Tokens with the same probability as the least probable token of this set are kept too. All other probabilities
    become 0."""
    wanted = top_p * probs.sum(axis=-1)
    return _keep_enough(probs, lambda kept: kept.sum(axis=-1) >= wanted)


def _keep_enough(probs: Float[Array, "N V"], enough_of: Callable[[Array], Array]) -> Float[Array, "N V"]:
    """Keeps the smallest set of most probable tokens that satisfies `enough_of`. Tokens with the same probability as
    the least probable token of this set are kept too.

    The lowest kept probability is found by bisection over the bit patterns of float32 numbers. Read as integers, the
    bit patterns of non-negative numbers have the same order as the numbers. The bisection needs 31 calls of
    `enough_of` instead of a sort.

    Args:
      enough_of: `f(kept: [N V]) -> [N]`: returns for each row whether the kept probabilities are enough. Probabilities
        that are not kept are 0.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = enough_of(jnp.where(probs >= threshold[:, None], probs, 0.0))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    top = jax.lax.bitcast_convert_type(probs.max(axis=-1), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(top), top + 1))
    return jnp.where(probs >= jax.lax.bitcast_convert_type(low, jnp.float32)[:, None], probs, 0.0)


def inverse_cdf(weights: Float[Array, "N V"], uniform: Float[Array, "N"]) -> Int[Array, "N"]:
    """Returns for each row the first token at which the running sum of the weights exceeds `uniform` times their total.

    Tokens of weight 0 are never returned. The search first selects a block of tokens and then a token of this block.
    Two short running sums replace one long running sum, which keeps the rounding errors small.
    """
    sums, blocks = _block_sums(weights)
    return _token_at(sums, blocks, uniform * sums.sum(axis=-1))


def _block_sums(weights: Float[Array, "N V"]) -> tuple[Float[Array, "N B"], Float[Array, "N B 256"]]:
    """Splits the weights into blocks of 256 tokens, padded with 0. Returns the sum of each block, and the blocks."""
    rows, width = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -width % BLOCK))).reshape(rows, -1, BLOCK)
    return blocks.sum(axis=-1), blocks


def _token_at(sums: Float[Array, "N B"], blocks: Float[Array, "N B 256"], target: Float[Array, "N"]) -> Array:
    """Returns the first token at which the running sum of the weights exceeds `target`. `blocks` has the weights in
    blocks of 256 tokens, and `sums` has the sum of each block."""
    block, rest = _first_above(sums, target)
    inner, _ = _first_above(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], rest)
    return block * BLOCK + inner


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
