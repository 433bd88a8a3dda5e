"""Attention with library kernels: cuDNN on NVIDIA GPUs, splash attention on TPUs.

The kernels compute causal attention over one part and its gradient. They cannot describe the mask of completions (their
prompt, and their own segment of a bin), so each function handles it in its own way with blocks as the fallback. Neither
kernel supports caps, and splash attention supports no windows; the caller must not pass such calls.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from tunix_like.models.attention_blocked import joined_attention, padded
from tunix_like.models.attention_parts import Causal, Lengths, Part, dense_mask, segment_ids

MASK_ELEMENTS = 2**28
"""Largest mask `[B, N, U]` that is materialised for cuDNN: 0.5 GB in bfloat16, and as much for its unused gradient."""

_TILE = 8  # jax.nn does not support training with cuDNN on odd lengths
_LANES = 128


def cudnn_attention(q: Float[Array, "*B H h"], parts: tuple[Part, ...]) -> Float[Array, "*B H h"]:
    """Computes attention over parts with described masks with cuDNN; float16 and bfloat16 only.

    Parts are concatenated and their masks materialised, which takes `2 H` times less memory than the scores. The public
    interface of cuDNN has no segments, and it rounds the log-sum-exp to the dtype of `q`; combining parts through it
    would give errors of some percent in the weights. Masks larger than `MASK_ELEMENTS` use blocks instead.
    """
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if len(parts) == 1 and parts[0].only_causal:
        whole = (padded(x, 1, _TILE) for x in (q, *_positions_first(parts[0])))  # no query sees trailing padding
        return call(*whole, is_causal=True)[:, : q.shape[1]]
    batch = max(part.k.shape[0] for part in parts)
    rows = q.reshape(batch, -1, *q.shape[-2:])
    count, total = rows.shape[1], sum(part.k.shape[-1] for part in parts)
    if batch * count * total > MASK_ELEMENTS:
        return joined_attention(q, parts)
    pairs = [_positions_first(part) for part in parts]
    k, v = (jnp.concatenate([_repeat(x, batch) for x in side], axis=1) for side in zip(*pairs, strict=True))
    masks = [jnp.broadcast_to(mask, (batch, count, mask.shape[-1])) for mask in (_mask(p, batch, count) for p in parts)]
    rows, k, v = (padded(x, 1, _TILE) for x in (rows, k, v))
    mask = padded(padded(jnp.concatenate(masks, axis=-1), 1, _TILE), 2, _TILE)
    return call(rows, k, v, mask=mask[:, None])[:, :count].reshape(q.shape)


def splash_attention(q: Float[Array, "*B H h"], parts: tuple[Part, ...]) -> Float[Array, "*B H h"]:
    """Computes attention over parts with described masks with splash attention.

    Its log-sum-exp is float32, so parts are computed one by one and combined. The gradient is computed in blocks, since
    that of the kernel supports one part only.
    """
    if len(parts) == 1 and parts[0].only_causal:
        return _splash(q, parts[0], residuals=False)
    return joined_attention(q, parts, _splash_forward)


def _splash_forward(
    q: Float[Array, "B N H h"], part: Part, cap: float | None
) -> tuple[Float[Array, "B N H h"], Float[Array, "B N H"]]:
    """Computes output and log-sum-exp of one part, float32. For a query without keys, the log-sum-exp is near the
    lowest float32."""
    assert cap is None and not part.windowed, "the kernel supports neither caps nor windows"
    out, lse = _splash(q, part, residuals=True)
    return out.astype(jnp.float32), lse


def _splash(q: Float[Array, "B N H h"], part: Part, residuals: bool) -> Any:
    """Calls the kernel once per batch entry, on lengths padded to whole tiles."""
    # Imported here, since only TPUs need it and the import takes 0.1 s.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    count = q.shape[1]
    heads_first = padded((q * q.shape[-1] ** -0.5).swapaxes(1, 2), 2, _LANES)
    k, v = padded(part.k.swapaxes(2, 3), 2, _LANES), padded(part.v, 2, _LANES)
    shape, ids = (heads_first.shape[2], k.shape[2]), None
    if not part.only_causal:  # a plain causal mask already hides the trailing padding of the keys
        of_queries, of_keys = segment_ids(part, count)
        ids = splash.SegmentIds(padded(of_queries, 1, _LANES, -2), padded(of_keys, 1, _LANES, -1))
    mask = splash.CausalMask(shape) if isinstance(part.mask, Causal) else splash.FullMask(shape)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=splash.BlockSizes(**_tiles(*shape)),
        save_residuals=residuals,
        interpret=jax.default_backend() == "cpu",
    )
    result = jax.vmap(kernel)(heads_first, k, v, ids)
    out, lse = (result[0], result[1][0]) if residuals else (result, None)
    out = out[:, :, :count].swapaxes(1, 2)
    return out if lse is None else (out, lse[:, :, :count].swapaxes(1, 2))


def _tiles(queries: int, keys: int) -> dict[str, Any]:
    """Returns the largest tile sizes up to 512 that divide the lengths, forward and backward."""
    q, kv = (max(size for size in (512, 256, 128) if length % size == 0) for length in (queries, keys))
    return {f"block_{side}{of}": size for side, size in (("q", q), ("kv", kv)) for of in ("", "_dkv", "_dq")}


def _positions_first(part: Part) -> tuple[Float[Array, "B U K h"], Float[Array, "B U K h"]]:
    return jnp.moveaxis(part.k, -1, -3), part.v.swapaxes(-3, -2)


def _mask(part: Part, batch: int, count: int) -> Bool[Array, "R #N U"]:
    """Returns the mask of a part for `batch` rows of `count` queries; several rows may use one entry of the part."""
    mask = dense_mask(part, batch * count // part.k.shape[0])
    if isinstance(part.mask, Lengths) and part.mask.starts is not None:
        return mask.reshape(batch, count, -1)
    return _repeat(mask, batch)


def _repeat(x: Shaped[Array, "B ..."], batch: int) -> Shaped[Array, "R ..."]:
    """Repeats each entry of a part for the consecutive rows of its group."""
    return jnp.repeat(x, batch // x.shape[0], axis=0)
