"""Attention of decoding, one new token per completion, with a Pallas kernel on TPUs and on NVIDIA GPUs.

The kernel computes one part of the keys (`attention_parts.Part`) with an online softmax over blocks of keys. It reads
the keys of a prompt once for all completions of the prompt, writes no scores to main memory, and neither reads nor
computes blocks of keys that no query sees. It returns the log-sum-exp of each query, by which the parts are joined. It
has no gradient.

The kernels of jax cannot replace it. `jax.experimental.pallas.ops.tpu.paged_attention` reads a prompt once for each
completion, needs one length per sequence instead of positions, and returns no log-sum-exp.
`jax.experimental.pallas.ops.gpu.decode_attention` returns one, but it needs one range of keys per sequence instead of
positions, keys in the layout `[U h]`, and a number of keys that its blocks divide, and has no cap.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.models import attention_kernels
from tunix_like.models.attention_blocked import NOTHING, capped
from tunix_like.models.attention_parts import Part, key_positions, segment_ids

BLOCK_BYTES = 2**20
"""Maximum size of a block of keys or of values in the kernel, and twice the maximum size of its float32 outputs.

A kernel can use 16 MiB of on-chip memory on a TPU v5e by default. The pipeline holds two blocks of keys, of values and
of outputs (5 MiB). Scores and weights of a block, the state of the softmax, and queries and log-sum-exps, whose rows
are padded to 128 elements, take up to 1 MiB each. A copy of 2**20 bytes takes 2,000 cycles, several times the fixed
time of a step of the pipeline."""

_LANES = 128
_SUBLANES = 8

GPU_PROGRAMS = 256
"""Number of programs of the GPU kernel below which the keys of an entry are split among several programs. An H200 has
132 multiprocessors."""

_GPU_QUERIES = 64  # maximum number of queries of a program; a power of 2
_GPU_COLUMNS = 64  # keys of a block; a power of 2


def decoding_kernel(kind: str, head_dim: int) -> str | None:
    """Returns the device of the kernel ("tpu" or "gpu") that decoding uses if `resolve_attention` returns `kind`; None
    for the plain implementation. Values of a width that is not a multiple of 128 are padded in the memory of a TPU, so
    the kernel would need a larger cache. Arrays in a Triton kernel have sizes that are powers of 2."""
    if kind == "splash" and head_dim % _LANES == 0:
        return "tpu"
    return "gpu" if kind == "cudnn" and head_dim >= 16 and head_dim.bit_count() == 1 else None


def decoding_attention(
    q: Float[Array, "P G 1 H h"],
    prompt: Part,
    own: Part,
    device: str,
    cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "P G 1 H h"]:
    """Computes `attention.group_attention` of one query per completion with the kernel for `device`, as
    `decoding_kernel` returns it.

    The masks of both parts must be `Lengths` or `Positions`. The output of a completion that sees no keys is 0.
    """
    call = {"tpu": _tpu_call, "gpu": _gpu_call}[device]
    keys = tuple((part.k, part.v) for part in (prompt, own))
    masks = _keys_seen(prompt), _keys_seen(own)

    def run(q: Array, keys: Any, masks: Any) -> tuple[Array, Array]:
        scaled = q * q.shape[-1] ** -0.5
        # Own keys are filled one by one, so half of their room is read on average over a completion of full length.
        read = 1.0, 0.5
        parts = [
            _part(call, scaled, k, v, positions, starts, cap, share)
            for (k, v), (positions, starts), share in zip(keys, masks, read, strict=True)
        ]
        whole = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
        return functools.reduce(jnp.add, [jnp.exp(lse - whole) * out for out, lse in parts]), whole

    out, lse = attention_kernels.over_mesh(run, q[:, :, 0], keys, masks, results=("queries", "queries"))
    if sinks is not None:
        out, _ = attention_kernels.with_sinks(out, lse[..., 0], sinks)
    return out.astype(q.dtype)[:, :, None]


def _keys_seen(part: Part) -> tuple[Int[Array, "B U"], Int[Array, "B N"]]:
    """Returns the position of each key, -1 for a key that no query sees, and the first position that each query sees.
    If the mask has no windows, there is one such position for all queries of a batch entry."""
    positions = jnp.where(segment_ids(part, 1)[1] < 0, -1, key_positions(part))
    starts = part.mask.starts  # type: ignore[union-attr]
    return positions, jnp.zeros((len(positions), 1), jnp.int32) if starts is None else jnp.maximum(starts, 0)


def _part(
    call: Any,
    q: Float[Array, "P G H h"],
    k: Float[Array, "B K h U"],
    v: Float[Array, "B K U h"],
    positions: Int[Array, "B U"],
    starts: Int[Array, "B #N"],
    cap: float | None,
    read: float,
) -> tuple[Float[Array, "P G H h"], Float[Array, "P G H 1"]]:
    """Computes attention of scaled queries over one part. Returns the output and the log-sum-exp in float32."""
    batch, heads, width, _ = k.shape
    split = q.reshape(batch, -1, heads, q.shape[2] // heads, width)
    number, repeats = split.shape[1], split.shape[3]
    first = jnp.broadcast_to(starts[:, None, :, None], (batch, heads, number, repeats))
    out, lse = call(
        split.swapaxes(1, 2).reshape(batch * heads, -1, width),
        k.reshape(-1, *k.shape[2:]),
        v.reshape(-1, *v.shape[2:]),
        jnp.repeat(positions, heads, axis=0),
        first.reshape(batch * heads, -1),
        cap,
        read,
    )

    def unfold(x: Array) -> Array:
        return x.reshape(batch, heads, number, repeats, -1).swapaxes(1, 2).reshape(*q.shape[:3], -1)

    return unfold(out), unfold(lse)


def _tpu_call(
    q: Float[Array, "E N h"],
    k: Float[Array, "E h U"],
    v: Float[Array, "E U h"],
    positions: Int[Array, "E U"],
    starts: Int[Array, "E N"],
    cap: float | None,
    read: float,
) -> tuple[Float[Array, "E N h"], Float[Array, "E N 1"]]:
    """Calls the kernel for the queries of E pairs of batch entry and key head. The program `(i, j)` of the kernel
    computes the `j`-th block of keys that a query of the `i`-th block of entries sees.

    Args:
      read: the fraction of the keys that is read, for the estimated cost.
    """
    # Imported here, because only TPUs need these modules and the import takes 0.1 s.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    entries, count, width = q.shape
    room = k.shape[-1]
    columns = min(_LANES, room)
    keys = BLOCK_BYTES // (width * columns * k.dtype.itemsize)
    queries = BLOCK_BYTES // 2 // (-(-count // _SUBLANES) * _SUBLANES * max(width, _LANES) * 4)
    rows = max(1, min(entries, keys, queries))
    rows = -(-entries // -(-entries // rows))
    grid = -(-entries // rows), -(-room // columns)
    order, number = _blocks_seen(positions >= starts.min(1, keepdims=True), rows, columns)

    def kernel(order: Any, number: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
        positions, starts, out, lse, top, total = rest
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _() -> None:
            top[...] = jnp.full(top.shape, NOTHING, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            out[...] = jnp.zeros(out.shape, jnp.float32)

        @pl.when(j < number[i])
        def _() -> None:
            scores = capped(_product(q[...], k[...]), cap)
            seen = positions[...] >= starts[...]
            values = v[...]
            if room % columns:  # beyond the room, the last block has any values, also NaN
                left = room - order[i * grid[1] + j] * columns
                seen &= jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2) < left
                values = jnp.where(jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < left, values, 0)
            new = jnp.maximum(top[...], jnp.where(seen, scores, NOTHING).max(-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
            shrink = jnp.exp(top[...] - new)
            top[...] = new
            total[...] = total[...] * shrink + weights.sum(-1, keepdims=True)
            out[...] = out[...] * shrink + _product(weights.astype(values.dtype), values)

        @pl.when(j == grid[1] - 1)
        def _() -> None:
            some = jnp.maximum(total[...], 1e-30)
            out[...] = out[...] / some
            lse[...] = jnp.where(total[...] > 0, top[...] + jnp.log(some), NOTHING)

    def state(i: Any, j: Any, order: Any, number: Any) -> tuple[Any, ...]:
        return i, 0, 0

    def last_axis(i: Any, j: Any, order: Any, number: Any) -> tuple[Any, ...]:
        return i, 0, order[i * grid[1] + j]

    def middle_axis(i: Any, j: Any, order: Any, number: Any) -> tuple[Any, ...]:
        return i, order[i * grid[1] + j], 0

    if not attention_kernels.INTERPRET:
        # Otherwise XLA may copy whole caches to on-chip memory before the kernel, which reads parts of them.
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.MemorySpace.HBM) for x in (k, v))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                pl.BlockSpec((rows, count, width), state),
                pl.BlockSpec((rows, width, columns), last_axis),
                pl.BlockSpec((rows, columns, width), middle_axis),
                pl.BlockSpec((rows, 1, columns), last_axis),
                pl.BlockSpec((rows, count, 1), state),
            ],
            out_specs=[pl.BlockSpec((rows, count, width), state), pl.BlockSpec((rows, count, 1), state)],
            scratch_shapes=[pltpu.VMEM((rows, count, 1), jnp.float32)] * 2,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((entries, count, width), jnp.float32),
            jax.ShapeDtypeStruct((entries, count, 1), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=int(read * 4 * q.size * room),
            transcendentals=int(read * q.size // width * room),
            bytes_accessed=_bytes_read(k, read),
        ),
        interpret=attention_kernels.INTERPRET,
    )(order, number, q, k, v, positions[:, None], starts[:, :, None])


def _gpu_call(
    q: Float[Array, "E N h"],
    k: Float[Array, "E h U"],
    v: Float[Array, "E U h"],
    positions: Int[Array, "E U"],
    starts: Int[Array, "E N"],
    cap: float | None,
    read: float,
) -> tuple[Float[Array, "E N h"], Float[Array, "E N 1"]]:
    """Calls the kernel as `_tpu_call` does. The program `(i, j, n)` of the kernel computes every `splits`-th block of
    keys that a query of entry `i` sees, from the `j`-th on, for the `n`-th block of queries."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu
    from jax.experimental.xla_metadata import set_xla_metadata

    entries, count, width = q.shape
    room = k.shape[-1]
    columns = _GPU_COLUMNS
    rows = min(_GPU_QUERIES, max(16, pl.next_power_of_2(count)))  # matrix products in Triton have at least 16 rows
    blocks, tiles = -(-room // columns), -(-count // rows)
    splits = min(blocks, -(-GPU_PROGRAMS // (entries * tiles)))
    order, number = _blocks_seen(positions >= starts.min(1, keepdims=True), 1, columns)

    def kernel(order: Any, number: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
        positions, starts, out, lse = rest
        split, tile = pl.program_id(1), pl.program_id(2)
        here = pl.ds(tile * rows, rows)
        real = tile * rows + jnp.arange(rows) < count
        queries = plgpu.load(q.at[here, :], mask=real[:, None], other=0)
        first = plgpu.load(starts.at[here], mask=real, other=0)

        def step(index: Any, state: Any) -> Any:
            top, total, sums = state
            start = order[split + index * splits] * columns
            block = pl.ds(start, columns)
            inside = start + jnp.arange(columns) < room
            keys = plgpu.load(k.at[:, block], mask=inside[None], other=0)
            values = plgpu.load(v.at[block, :], mask=inside[:, None], other=0)
            seen = plgpu.load(positions.at[block], mask=inside, other=-1)[None] >= first[:, None]
            scores = capped(plgpu.dot(queries, keys), cap)
            new = jnp.maximum(top, jnp.where(seen, scores, NOTHING).max(-1))
            weights = jnp.where(seen, jnp.exp(scores - new[:, None]), 0.0)
            shrink = jnp.exp(top - new)
            sums = sums * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
            return new, total * shrink + weights.sum(-1), sums

        empty = [jnp.full(size, value, jnp.float32) for size, value in ((rows, NOTHING), (rows, 0), ((rows, width), 0))]
        steps = (number[...] - split + splits - 1) // splits
        top, total, sums = jax.lax.fori_loop(0, steps, step, tuple(empty))
        some = jnp.maximum(total, 1e-30)
        plgpu.store(out.at[here, :], sums / some[:, None], mask=real[:, None])
        plgpu.store(lse.at[here], jnp.where(total > 0, top + jnp.log(some), NOTHING), mask=real)

    def of_entry(*sizes: int) -> Any:
        return pl.BlockSpec((None, *sizes), lambda i, j, n: (i, *[0] * len(sizes)))

    def of_split(*sizes: int) -> Any:
        return pl.BlockSpec((None, None, *sizes), lambda i, j, n: (j, i, *[0] * len(sizes)))

    call = pl.pallas_call(
        kernel,
        grid=(entries, splits, tiles),
        in_specs=[
            of_entry(blocks),
            of_entry(),
            of_entry(count, width),
            of_entry(width, room),
            of_entry(room, width),
            of_entry(room),
            of_entry(count),
        ],
        out_specs=[of_split(count, width), of_split(count)],
        out_shape=[
            jax.ShapeDtypeStruct((splits, entries, count, width), jnp.float32),
            jax.ShapeDtypeStruct((splits, entries, count), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=attention_kernels.INTERPRET,
    )
    # The lowering to Triton drops a `pl.CostEstimate`; `compile/costs.py` reads this attribute instead.
    with set_xla_metadata(bytes_accessed=str(_bytes_read(k, read))):
        out, lse = call(order.reshape(entries, blocks), number, q, k, v, positions, starts)
    whole = jax.nn.logsumexp(lse, 0, keepdims=True)
    return (jnp.exp(lse - whole)[..., None] * out).sum(0), whole[0, ..., None]


def _bytes_read(k: Float[Array, "E h U"], read: float) -> int:
    return int(read * 2 * k.size * k.dtype.itemsize)


def _product(a: Float[Array, "E N x"], b: Float[Array, "E x y"]) -> Float[Array, "E N y"]:
    return jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _blocks_seen(seen: Bool[Array, "E U"], rows: int, columns: int) -> tuple[Int[Array, "b"], Int[Array, "n"]]:
    """Returns, for each of n blocks of `rows` entries, the blocks of `columns` keys with a key that is seen, and their
    number.

    The first result has one element per program of the kernel. For programs after the last block of keys it repeats
    this block, so the pipeline copies nothing.
    """
    height, width = (-size % block for size, block in zip(seen.shape, (rows, columns), strict=True))
    blocks = jnp.pad(seen, ((0, height), (0, width)))
    blocks = blocks.reshape(-1, rows, blocks.shape[1] // columns, columns).any((1, 3))
    number = blocks.sum(1, dtype=jnp.int32)
    place = jnp.minimum(jnp.arange(blocks.shape[1])[None], number[:, None] - 1)
    is_next = blocks[:, None] & (jnp.cumsum(blocks, 1)[:, None] - 1 == place[:, :, None])
    return jnp.argmax(is_next, -1).astype(jnp.int32).reshape(-1), number
