"""Attention with library kernels: cuDNN on NVIDIA GPUs, splash attention on TPUs.

The kernels themselves compute causal attention over one part (`attention_parts.Part`: keys and values with a mask) and
its gradient. A token of a completion sees its prompt and its own segment of a bin (a row that holds one or several
completions), which is not a plain causal mask. For this mask, `cudnn_attention` passes an array to the kernel, and
`splash_attention` calls the kernel for each part and combines the results. Neither kernel supports caps of the scores,
splash attention does not support windows, and cuDNN does not support sinks. In these cases, the caller must use another
implementation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Shaped

from tunix_like.models.attention_blocked import joined_attention, padded, sink_gradient
from tunix_like.models.attention_parts import Causal, Lengths, Part, Positions, dense_mask, segment_ids
from tunix_like.models.attention_sequence import AXIS as SEQUENCE_AXIS
from tunix_like.models.attention_sequence import query_order
from tunix_like.models.sharding import row_axes

MASK_ELEMENTS = 2**28
"""Maximum number of elements of a mask `[B, N, U]` that is materialised for cuDNN. Such a mask takes 0.5 GB in
bfloat16, and its unused gradient takes as much."""

INTERPRET = False
"""Whether splash attention runs in its interpreter. Tests set this, because they have no TPU."""

_TILE = 8  # jax.nn does not support training with cuDNN on odd lengths
_LANES = 128


def cudnn_attention(q: Float[Array, "*B H h"], parts: tuple[Part, ...]) -> Float[Array, "*B H h"]:
    """Computes attention over several parts (keys and values with a mask) with cuDNN. The mask of every part must be a
    `Lengths`, `Positions` or `Causal`, not an array.

    Only float16 and bfloat16 are supported. A single part with a causal mask, without segments or a window, needs no
    mask array. Otherwise, the parts are concatenated and their masks are materialised as one array. This array takes
    `2 H` times less memory than the scores of the H query heads would. If it would have more than `MASK_ELEMENTS`
    elements, the blocked implementation is used instead.

    The parts are not computed one by one, for two reasons. The public interface of cuDNN
    (`jax.nn.dot_product_attention`) has no argument for segments. This interface also rounds the log-sum-exp to the
    dtype of `q`, and combining parts through a rounded log-sum-exp would give errors of some percent in the attention
    weights.
    """
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if len(parts) == 1 and parts[0].only_causal and parts[0].mask.queries is None:  # type: ignore[union-attr]
        whole = (padded(x, 1, _TILE) for x in (q, *_positions_first(parts[0])))  # no query sees trailing padding
        return call(*whole, is_causal=True)[:, : q.shape[1]]
    batch = max(part.k.shape[0] for part in parts)
    rows = q.reshape(batch, -1, *q.shape[-2:])
    count = rows.shape[1]
    total = sum(part.k.shape[-1] for part in parts)
    if batch * count * total > MASK_ELEMENTS:
        return joined_attention(q, parts)
    pairs = [_positions_first(part) for part in parts]
    k, v = (jnp.concatenate([_repeat(x, batch) for x in side], axis=1) for side in zip(*pairs, strict=True))
    masks = [jnp.broadcast_to(mask, (batch, count, mask.shape[-1])) for mask in (_mask(p, batch, count) for p in parts)]
    rows, k, v = (padded(x, 1, _TILE) for x in (rows, k, v))
    mask = padded(padded(jnp.concatenate(masks, axis=-1), 1, _TILE), 2, _TILE)
    return call(rows, k, v, mask=mask[:, None])[:, :count].reshape(q.shape)


def splash_attention(
    q: Float[Array, "*B H h"], parts: tuple[Part, ...], sinks: Float[Array, "H"] | None = None
) -> Float[Array, "*B H h"]:
    """Computes attention over several parts (keys and values with a mask) with the splash attention kernel. The mask of
    every part must be a `Lengths`, `Positions` or `Causal` without windows.

    The kernel returns the log-sum-exp in float32, so the outputs and gradients of the parts are computed one by one and
    then combined. The keys and values of a prompt are repeated for each row of queries that uses them. The results of
    all parts then have the same shape. Sinks (`joined_attention`) are applied by the log-sum-exp too.
    """
    rows = q.reshape(max(part.k.shape[0] for part in parts), -1, *q.shape[-2:])
    causal = tuple(_causal_mask(part.mask) for part in parts)
    keys = tuple((_repeated(part.k, len(rows)), _repeated(part.v, len(rows))) for part in parts)
    ids = tuple(_splash_ids(part, *rows.shape[:2]) for part in parts)
    assert not any(part.windowed for part in parts), "the kernel does not support windows"
    return _splash(causal, rows, keys, ids, sinks).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(
    causal: tuple[str | None, ...], q: Float[Array, "B N H h"], keys: Any, ids: Any, sinks: Float[Array, "H"] | None
) -> Float[Array, "B N H h"]:
    return _splash_forward(causal, q, keys, ids, sinks)[0]


def _splash_forward(
    causal: tuple[str | None, ...], q: Float[Array, "B N H h"], keys: Any, ids: Any, sinks: Float[Array, "H"] | None
) -> tuple[Array, Any]:
    def forward(q: Array, keys: Any, ids: Any) -> tuple[Array, Array, Array]:
        count = q.shape[1]
        q = _heads_first(q * q.shape[-1] ** -0.5)
        outs = []
        lses = []
        for order, (k, v), part_ids in zip(causal, keys, ids, strict=True):
            kernel = _splash_kernel(order, q, count, k.shape[-1], residuals=True)
            out, (lse,) = jax.vmap(kernel)(q, *_tiled(k, v), part_ids)
            outs.append(out.astype(jnp.float32))
            lses.append(lse)
        whole = functools.reduce(jnp.logaddexp, lses)
        out = sum(jnp.exp(lse - whole)[..., None] * out for out, lse in zip(outs, lses, strict=True)).astype(q.dtype)
        return out.swapaxes(1, 2)[:, :count], out, whole

    result, out, lse = over_mesh(forward, q, keys, ids, results=("queries", "heads", "heads"))
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks[:, None])
        result = out.swapaxes(1, 2)[:, : q.shape[1]]
    return result, (q, keys, ids, out, lse, sinks)


def _splash_backward(causal: tuple[str | None, ...], saved: Any, cotangent: Float[Array, "B N H h"]) -> Any:
    # The public function computes the gradient for a single part, with the log-sum-exp of this part. The private
    # backward function accepts any output and log-sum-exp, and is therefore called directly.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    q, keys, ids, out, lse, sinks = saved

    def backward(q: Array, keys: Any, ids: Any, out: Array, lse: Array, cotangent: Array) -> tuple[Array, Any]:
        count = q.shape[1]
        scale = q.shape[-1] ** -0.5
        q = _heads_first(q * scale)
        cotangent = _heads_first(cotangent)
        total = jnp.zeros(q.shape, jnp.float32)
        gradients = []
        for order, (k, v), part_ids in zip(causal, keys, ids, strict=True):
            kernel = _splash_kernel(order, q, count, k.shape[-1], residuals=False)

            def one(q: Array, k: Array, v: Array, ids: Any, out: Array, lse: Array, cotangent: Array) -> Any:
                saved = q, k, v, ids, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info  # noqa: B023
                options = {**kernel.kwargs, "save_residuals": False}  # noqa: B023
                return splash_attention_kernel._splash_attention_bwd(**options, res=saved, do=cotangent)[3:6]

            of_q, of_k, of_v = jax.vmap(one)(q, *_tiled(k, v), part_ids, out, lse, cotangent)
            total += of_q.astype(jnp.float32)
            width = k.shape[-1]
            gradients.append((of_k.swapaxes(2, 3)[..., :width].astype(k.dtype), of_v[:, :, :width].astype(v.dtype)))
        return (total.swapaxes(1, 2)[:, :count] * scale).astype(q.dtype), tuple(gradients)

    of_q, of_keys = over_mesh(backward, q, keys, ids, out, lse, cotangent, results=("queries", "heads"))
    of_sinks = None
    if sinks is not None:
        count = q.shape[1]
        of_sinks = sink_gradient(sinks, lse[:, :, :count].swapaxes(1, 2), out[:, :, :count].swapaxes(1, 2), cotangent)
    return of_q, of_keys, jax.tree.map(lambda _: None, ids), of_sinks


def with_sinks(
    out: Float[Array, "*B h"], lse: Float[Array, "*B"], sinks: Float[Array, "..."]
) -> tuple[Float[Array, "*B h"], Float[Array, "*B"]]:
    """Adds sinks, which broadcast to `lse`, to a softmax whose output and log-sum-exp are known."""
    sinks = jnp.broadcast_to(sinks, lse.shape)
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype), jnp.logaddexp(lse, sinks)


_splash.defvjp(_splash_forward, _splash_backward)


def _heads_first(q: Float[Array, "B N H h"]) -> Float[Array, "B H M h"]:
    return padded(q.swapaxes(1, 2), 2, _LANES)


def _tiled(k: Float[Array, "B K h U"], v: Float[Array, "B K U h"]) -> tuple[Array, Array]:
    """Returns keys and values in the layout `[B K W h]` of the splash kernel: batch, heads, positions (padded to a
    multiple of 128, `_LANES`) and head width."""
    return padded(k.swapaxes(2, 3), 2, _LANES), padded(v, 2, _LANES)


def _repeated(x: Shaped[Array, "B ..."], rows: int) -> Shaped[Array, "R ..."]:
    """Repeats each entry of the first axis, so that the axis has length `rows`; copies of an entry are consecutive.
    `jnp.repeat` would give the same result, but its gradient is a scatter."""
    wide = jnp.broadcast_to(x[:, None], (x.shape[0], rows // x.shape[0], *x.shape[1:]))
    return wide.reshape(rows, *x.shape[1:])


def _splash_ids(part: Part, rows: int, count: int) -> Any:
    """Returns the segment numbers of the queries and keys of each row, padded to a multiple of 128 (`_LANES`). A query
    sees only keys with its own number. Returns None for a causal mask without segments."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if part.only_causal:  # a causal mask already hides the trailing padding of the keys
        return None
    of_queries, of_keys = (_repeated(ids, rows) for ids in segment_ids(part, count))
    return splash.SegmentIds(padded(of_queries, 1, _LANES, -2), padded(of_keys, 1, _LANES, -1))


def _causal_mask(mask: Any) -> str | None:
    """Returns None for a mask that is not causal, else whether its queries are `all` or those of `attention_sequence`
    that a device of the axis `cp` has."""
    return None if not isinstance(mask, Causal) else "all" if mask.queries is None else "exchanged"


def _splash_kernel(causal: str | None, q: Float[Array, "B H M h"], count: int, width: int, residuals: bool) -> Any:
    """Returns the kernel for `count` queries, padded to M, and `width` keys."""
    # Imported here, because only TPUs need this module and the import takes 0.1 s.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = q.shape[2], -(-width // _LANES) * _LANES
    parts = jax.lax.axis_size(SEQUENCE_AXIS) if causal == "exchanged" else 1
    whole = parts * shape[0], shape[1]
    mask: Any = splash.FullMask(whole) if causal is None else splash.CausalMask(whole)
    if parts > 1:
        order = query_order(count, parts)
        mask.q_sequence = np.pad(order, ((0, 0), (0, shape[0] - count))).reshape(-1).astype(np.int32)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=splash.BlockSizes(**_tiles(*shape)),
        save_residuals=residuals,
        interpret=INTERPRET,
        head_shards=1,
        q_seq_shards=parts,
    )
    return kernel if parts == 1 else jax.tree.map(functools.partial(_own_queries, parts=parts), kernel)


def _own_queries(x: Any, parts: int) -> Any:
    """Returns this device's part of an array of a splash mask: `[heads, blocks of queries, blocks of keys]`, or
    the positions of the queries."""
    axis = 1 if jnp.ndim(x) == 3 else 0
    size = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SEQUENCE_AXIS) * size, size, axis)


def over_mesh(function: Any, q: Float[Array, "B N H h"], keys: Any, ids: Any, *more: Any, results: Any) -> Any:
    """Calls `function(q, keys, ids, *more)`, which runs an attention kernel, on each device with the rows and heads of
    that device.

    The compiler itself cannot partition a kernel over a mesh. If the mesh axes do not divide the number of rows, every
    device computes all rows. The same holds for heads.

    Args:
      ids: segment numbers of queries and keys.
      more: empty, or arrays `[B H ...]` (rows, heads) followed by the gradient of the output in the layout of `q`.
      results: the layout of each result: "queries" for the layout `[B N H h]` of `q`, "heads" for `[B H ...]`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return function(q, keys, ids, *more)
    rows = row_axes(mesh, q.shape[0])
    heads = "tp" if "tp" in mesh.shape and keys[0][0].shape[1] % mesh.shape["tp"] == 0 else None
    specs = {"queries": P(rows, None, heads), "heads": P(rows, heads)}
    inputs = specs["queries"], specs["heads"], P(rows), *[specs["heads"]] * (len(more) - 1), specs["queries"]
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=inputs[: 3 + len(more)],
        out_specs=tuple(specs[name] for name in results),
        check_vma=False,
    )
    return run(q, keys, ids, *more)


def _tiles(queries: int, keys: int) -> dict[str, Any]:
    """Returns the largest tile sizes up to 512 that divide the numbers of queries and keys, for the forward and
    backward kernels."""
    q, kv = (max(size for size in range(_LANES, 513, _LANES) if length % size == 0) for length in (queries, keys))
    return {f"block_{side}{of}": size for side, size in (("q", q), ("kv", kv)) for of in ("", "_dkv", "_dq")}


def _positions_first(part: Part) -> tuple[Float[Array, "B U K h"], Float[Array, "B U K h"]]:
    return jnp.moveaxis(part.k, -1, -3), part.v.swapaxes(-3, -2)


def _mask(part: Part, batch: int, count: int) -> Bool[Array, "R #N U"]:
    """Returns the mask of `part` as an array for `batch` rows of `count` queries. If the part has fewer batch entries
    (prompts) than `batch`, consecutive rows (completions of a prompt) use the same entry."""
    mask = dense_mask(part, batch * count // part.k.shape[0])
    if isinstance(part.mask, Lengths | Positions) and part.mask.starts is not None:
        return mask.reshape(batch, count, -1)
    return _repeat(mask, batch)


def _repeat(x: Shaped[Array, "B ..."], batch: int) -> Shaped[Array, "R ..."]:
    """Repeats each entry of the first axis, so that the axis has length `batch`; copies of an entry are consecutive."""
    return jnp.repeat(x, batch // x.shape[0], axis=0)
