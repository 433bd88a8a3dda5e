"""Computes attention in blocks, without an array of all scores in the forward or backward pass (Dao et al., arXiv
2205.14135; Dao, arXiv 2307.08691).

Several parts (`attention_parts.Part`: keys and values with a mask) share one softmax. In the forward pass, the output
and log-sum-exp of each part are computed and then combined. The backward pass computes the gradients of each part
separately, from the output and log-sum-exp over all parts. A sink is one more part, with a log-sum-exp and the output
0. A mask must be a `Lengths`, `Positions` or `Causal`, not an
array.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.models.attention_parts import Causal, Part, first_keys, key_positions, segment_ids

BLOCK = 256
"""Maximum number of queries and keys per block. On a CPU, the blocked implementation is as fast as the plain
implementation for 256 positions, and twice as fast for 1024. Blocks of 512 are not faster on a CPU."""

CAUSAL_BLOCKS = "causal_blocks"
ALL_BLOCKS = "all_blocks"
"""Names of the loops over key blocks in a compiled program, for a `Causal` mask and for other masks."""

NOTHING = -1e30
"""Log-sum-exp of a query without visible keys. The value is finite, so the difference of two such values is not NaN."""


def joined_attention(
    q: Float[Array, "*B H h"],
    parts: Sequence[Part],
    cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "*B H h"]:
    """Computes attention of the queries over the keys of all parts (keys and values with a mask) in one softmax.

    The result is `softmax([q k_1^T, q k_2^T, ...] / sqrt(h)) [v_1; v_2; ...]`, where `k_i` and `v_i` are the keys and
    values of part `i`. The mask of a part must not be an array.

    Args:
      q: queries of H heads of width h, with any leading axes. For a part with `B` batch entries, the queries are
        reshaped to `[B, N, H, h]`: N queries per entry.
      cap: scores become `cap tanh(scores / cap)`, as in Gemma 2.
      sinks: a further logit per head in the softmax, without a key, as in GPT-OSS.

    Returns:
      outputs of the shape and dtype of `q`; 0 for a query without visible keys.
    """
    return _joined(cap, q, tuple(parts), sinks)


def capped(scores: Float[Array, "*B"], cap: float | None) -> Float[Array, "*B"]:
    return scores if cap is None else cap * jnp.tanh(scores / cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined(cap: float | None, q: Array, parts: tuple[Part, ...], sinks: Array | None) -> Array:
    return _joined_forward(cap, q, parts, sinks)[0]


def _joined_forward(cap: float | None, q: Array, parts: tuple[Part, ...], sinks: Array | None) -> tuple[Array, Any]:
    results = [part_forward(_rows(q, part), part, cap) for part in parts]
    part_lses = [part_lse.reshape(q.shape[:-1]) for _, part_lse in results]
    more = [] if sinks is None else [jnp.broadcast_to(sinks, q.shape[:-1])]
    lse = functools.reduce(jnp.logaddexp, part_lses + more)
    out = jnp.zeros(q.shape, jnp.float32)
    for part_lse, (part_out, _) in zip(part_lses, results, strict=True):
        out += jnp.exp(part_lse - lse)[..., None] * part_out.reshape(q.shape)
    return out.astype(q.dtype), (q, parts, out.astype(q.dtype), lse, sinks)


def _joined_backward(cap: float | None, saved: Any, cotangent: Array) -> tuple[Array, tuple[Part, ...], Array | None]:
    """Computes the gradients with respect to queries, keys, values and sinks.

    For scores S with the log-sum-exp `lse`, values V and output O, the attention weights are `P = exp(S - lse)`, and
    the gradient of the scores is `dS = P * (dO V^T - rowsum(dO * O))`. S and P are recomputed for each block.
    """
    q, parts, out, lse, sinks = saved
    total = jnp.zeros(q.shape, jnp.float32)
    gradients = []
    for part in parts:
        level = lse.reshape(part.k.shape[0], -1, q.shape[-2])
        q_rows, cotangent_rows, out_rows = (_rows(x, part) for x in (q, cotangent, out))
        of_q, of_k, of_v = part_backward(q_rows, cotangent_rows, out_rows, level, part, cap)
        total += of_q.reshape(q.shape)
        gradients.append(Part(of_k.astype(part.k.dtype), of_v.astype(part.v.dtype), None))  # type: ignore[arg-type]
    of_sinks = None if sinks is None else sink_gradient(sinks, lse, out, cotangent)
    return total.astype(q.dtype), tuple(gradients), of_sinks


_joined.defvjp(_joined_forward, _joined_backward)


def sink_gradient(
    sinks: Float[Array, "H"],
    lse: Float[Array, "*B H"],
    out: Float[Array, "*B H h"],
    cotangent: Float[Array, "*B H h"],
) -> Float[Array, "H"]:
    """Computes the gradient of the sinks from the log-sum-exp with them: the formula of `_joined_backward` for a score
    with the weight `exp(sink - lse)` and the value 0."""
    delta = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return -(jnp.exp(jnp.broadcast_to(sinks, lse.shape) - lse) * delta).sum(tuple(range(lse.ndim - 1)))


def _rows(x: Float[Array, "*B H h"], part: Part) -> Float[Array, "B N H h"]:
    return x.reshape(part.k.shape[0], -1, *x.shape[-2:])


class _Work(NamedTuple):
    """Queries, keys and values, padded to whole blocks, and the pairs of query and key blocks that are computed.

    Attributes:
      query_ids, key_ids: segment number of each query and key. A query sees only keys with its own number.
      positions: position of each key.
      rows: position of each query, for a causal mask.
      starts: for each query, the first key position that it sees; None if the mask has no windows.
      order: for each of the n query blocks, the indices of all m key blocks. The key blocks to compute come first.
      number: for each query block, the number of key blocks to compute.
    """

    q: Float[Array, "B K R N h"]
    k: Float[Array, "B K h U"]
    v: Float[Array, "B K U h"]
    query_ids: Int[Array, "B N"]
    key_ids: Int[Array, "B U"]
    positions: Int[Array, "#B U"]
    rows: Int[Array, "N"] | None
    starts: Int[Array, "B N"] | None
    order: Int[Array, "n m"]
    number: Int[Array, "n"]


def part_forward(
    q: Float[Array, "B N H h"], part: Part, cap: float | None = None
) -> tuple[Float[Array, "B N H h"], Float[Array, "B N H"]]:
    """Computes attention over one part (keys and values with a mask), by an online softmax over blocks of keys. Returns
    the output and the log-sum-exp. For a query without visible keys, they are 0 and `NOTHING` (-1e30)."""
    work, blocks = _plan(q, part, cap)

    def of_queries(i: Array) -> tuple[Array, Array]:
        queries = blocks.queries(work.q, i)

        def step(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = state
            j = work.order[i, n]
            scores, seen = blocks.scores(work, queries, i, j)
            new = jnp.maximum(top, jnp.where(seen, scores, NOTHING).max(-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
            shrink = jnp.exp(top - new)
            values = _product(weights.astype(work.v.dtype), blocks.keys(work.v, j, 2))
            return new, total * shrink + weights.sum(-1, keepdims=True), out * shrink + values

        numbers = jnp.zeros((*queries.shape[:-1], 1), jnp.float32)
        start = numbers + NOTHING, numbers, jnp.zeros(queries.shape, jnp.float32)
        with jax.named_scope(blocks.loop):
            top, total, out = jax.lax.fori_loop(0, work.number[i], step, start)
        total = jnp.where(total > 0, total, 1.0)
        return out / total, (top + jnp.log(total))

    out, lse = jax.lax.map(of_queries, jnp.arange(work.order.shape[0]))
    return _from_blocks(out, q.shape[1]), _from_blocks(lse, q.shape[1])[..., 0]


def part_backward(
    q: Float[Array, "B N H h"],
    cotangent: Float[Array, "B N H h"],
    out: Float[Array, "B N H h"],
    lse: Float[Array, "B N H"],
    part: Part,
    cap: float | None = None,
) -> tuple[Float[Array, "B N H h"], Float[Array, "B K h U"], Float[Array, "B K U h"]]:
    """Computes the gradients (float32) of attention with respect to the queries `q` and to the keys and values of
    `part`. `out` and `lse` are the attention output and the log-sum-exp over the keys of all parts. `cotangent` is the
    gradient with respect to `out`."""
    work, blocks = _plan(q, part, cap)
    delta = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    cotangent, lse, delta = (
        padded(_fold(x, part.k.shape[1]), 3, blocks.query) for x in (cotangent, lse[..., None], delta[..., None])
    )
    scale = q.shape[-1] ** -0.5

    def of_queries(gradients: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        queries, out, level, mean = (blocks.queries(x, i) for x in (work.q, cotangent, lse, delta))

        def step(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_q, of_k, of_v = state
            j = work.order[i, n]
            scores, seen = blocks.scores(work, queries, i, j)
            weights = jnp.where(seen, jnp.exp(scores - level), 0.0)
            of_scores = weights * (_product(out, blocks.keys(work.v, j, 2).swapaxes(2, 3)) - mean)
            if cap is not None:
                of_scores *= 1 - (scores / cap) ** 2
            weights = weights.astype(queries.dtype)
            of_scores = of_scores.astype(queries.dtype)
            of_q += _product(of_scores, blocks.keys(work.k, j, 3).swapaxes(2, 3))
            of_k = blocks.added(of_k, _over_queries(queries, of_scores), j, 3)
            return of_q, of_k, blocks.added(of_v, _over_queries(weights, out), j, 2)

        start = jnp.zeros(queries.shape, jnp.float32), *gradients
        with jax.named_scope(blocks.loop):
            of_q, of_k, of_v = jax.lax.fori_loop(0, work.number[i], step, start)
        return (of_k, of_v), of_q * scale

    start = jnp.zeros(work.k.shape, jnp.float32), jnp.zeros(work.v.shape, jnp.float32)
    (of_k, of_v), of_q = jax.lax.scan(of_queries, start, jnp.arange(work.order.shape[0]))
    width = part.k.shape[-1]
    return _from_blocks(of_q, q.shape[1]), of_k[..., :width], of_v[:, :, :width]


class _Blocks(NamedTuple):
    """Sizes of the blocks of queries and of keys, the name of their loop, and the cap of the scores."""

    query: int
    key: int
    loop: str
    cap: float | None = None

    def queries(self, x: Float[Array, "B K R N x"], i: Array) -> Float[Array, "B K R b x"]:
        return jax.lax.dynamic_slice_in_dim(x, i * self.query, self.query, axis=3)

    def keys(self, x: Array, j: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, j * self.key, self.key, axis)

    def added(self, x: Array, block: Array, j: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, self.keys(x, j, axis) + block, j * self.key, axis)

    def scores(self, work: _Work, queries: Array, i: Array, j: Array) -> tuple[Array, Bool[Array, "B 1 1 b c"]]:
        """Computes the attention scores of query block `i` with key block `j`, and the mask of the visible keys. The
        scores are `[B K R b c]`: batch, key heads, query heads per key head, queries, keys."""
        query_ids = jax.lax.dynamic_slice_in_dim(work.query_ids, i * self.query, self.query, axis=1)
        seen = query_ids[:, :, None] == self.keys(work.key_ids, j, 1)[:, None]
        if work.starts is not None:
            starts = jax.lax.dynamic_slice_in_dim(work.starts, i * self.query, self.query, axis=1)
            seen &= self.keys(work.positions, j, 1)[:, None] >= starts[:, :, None]
        if work.rows is not None:
            rows = jax.lax.dynamic_slice_in_dim(work.rows, i * self.query, self.query)
            seen &= (rows[:, None] >= (j * self.key + jnp.arange(self.key))[None])[None]
        return capped(_product(queries, self.keys(work.k, j, 3)), self.cap), seen[:, None, None]


def _plan(q: Float[Array, "B N H h"], part: Part, cap: float | None) -> tuple[_Work, _Blocks]:
    count = q.shape[1]
    width = part.k.shape[-1]
    causal = part.mask if isinstance(part.mask, Causal) else None
    blocks = _Blocks(min(BLOCK, count), min(BLOCK, width), ALL_BLOCKS if causal is None else CAUSAL_BLOCKS, cap)
    rows = None if causal is None else padded(causal.positions(count), 0, blocks.query, -1)
    queries, keys = segment_ids(part, count)
    queries = padded(queries, 1, blocks.query, -2)
    keys = padded(keys, 1, blocks.key, -1)
    if (starts := first_keys(part, count)) is not None:
        starts = padded(starts, 1, blocks.query, jnp.iinfo(jnp.int32).max)
    positions = padded(key_positions(part), 1, blocks.key, -1)
    order, number = _meetings(queries, keys, blocks, positions, rows, starts)
    folded = padded(_fold(q * q.shape[-1] ** -0.5, part.k.shape[1]), 3, blocks.query)
    k, v = padded(part.k, 3, blocks.key), padded(part.v, 2, blocks.key)
    return _Work(folded, k, v, queries, keys, positions, rows, starts, order, number), blocks


def _meetings(
    queries: Int[Array, "B N"],
    keys: Int[Array, "B U"],
    blocks: _Blocks,
    positions: Int[Array, "#B U"],
    rows: Int[Array, "N"] | None,
    starts: Int[Array, "B N"] | None,
) -> tuple[Int[Array, "n m"], Int[Array, "n"]]:
    """Selects the key blocks that are computed for each query block. Returns for each query block the indices of all
    key blocks, with the selected blocks first, and the number of selected blocks.

    A query sees only keys with its own segment number. A key block is selected if its range of segment numbers overlaps
    the range of the query block in some batch entry. With a `Causal` mask, key blocks entirely after the query block
    are skipped. With windows, key blocks entirely before the first visible position of the query block are skipped.
    """

    def ranges(ids: Array, size: int) -> tuple[Array, Array]:
        ids = ids.reshape(ids.shape[0], -1, size)
        return jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids).min(-1), ids.max(-1)

    first, last = ranges(queries, blocks.query)
    key_first, key_last = ranges(keys, blocks.key)
    meet = (first[:, :, None] <= key_last[:, None]) & (key_first[:, None] <= last[:, :, None])
    if starts is not None:
        last_keys = positions.reshape(positions.shape[0], -1, blocks.key).max(-1)
        meet &= starts.reshape(starts.shape[0], -1, blocks.query).min(-1)[:, :, None] <= last_keys[:, None]
    meet = meet.any(0)
    if rows is not None:
        meet &= jnp.arange(meet.shape[1])[None] * blocks.key <= rows.reshape(-1, blocks.query).max(-1)[:, None]
    return jnp.argsort(~meet, axis=1, stable=True), meet.sum(1)


def padded(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    missing = -x.shape[axis] % size
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=fill)


def _fold(x: Float[Array, "B N H x"], key_heads: int) -> Float[Array, "B K R N x"]:
    batch, count, heads, _ = x.shape
    return x.reshape(batch, count, key_heads, heads // key_heads, -1).transpose(0, 2, 3, 1, 4)


def _from_blocks(x: Float[Array, "n B K R b x"], count: int) -> Float[Array, "B N H x"]:
    number, batch, key_heads, repeats, size, _ = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, number * size, key_heads * repeats, -1)
    return x[:, :count]


def _product(x: Float[Array, "B K R b c"], y: Float[Array, "B K c d"]) -> Float[Array, "B K R b d"]:
    """Multiplies the matrix `x` of each query head by the matrix `y` of its key head. Accumulates in float32."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return jnp.matmul(flat, y, preferred_element_type=jnp.float32).reshape(*x.shape[:-1], y.shape[-1])


def _over_queries(x: Float[Array, "B K R b c"], y: Float[Array, "B K R b d"]) -> Float[Array, "B K c d"]:
    """Computes `x^T y` in float32 for each key head. The rows of `x` and `y` are the queries of all its query heads."""
    x, y = (array.reshape(*array.shape[:2], -1, array.shape[-1]) for array in (x, y))
    return jnp.matmul(x.swapaxes(2, 3), y, preferred_element_type=jnp.float32)
