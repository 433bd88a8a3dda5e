"""Attention by kernels that others wrote: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

Causal attention over one part is a kernel's own, gradient included. What completions see (their prompt, and their own
segment of a bin) no kernel describes; each road has its way for that, and both fall back on blocks. Caps neither knows,
nor splash attention windows: such calls do not come here.
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
"""Largest mask `[B, N, U]` that is written out for cuDNN: 0.5 GB in bfloat16, and as much for its unused gradient."""

_TILE = 8  # jax.nn refuses to train by cuDNN on odd lengths
_LANES = 128


def cudnn_attention(q: Float[Array, "*B H h"], parts: tuple[Part, ...]) -> Float[Array, "*B H h"]:
    """Attention over parts with described masks by cuDNN; float16 and bfloat16 only.

    Parts are laid side by side and their masks written out, `2 H` times smaller than the scores would be: cuDNN's
    public interface knows no segments, and its log-sum-exp, by which parts could be joined, comes rounded to the dtype
    of `q`, an error of some percent in the weights. Beyond `MASK_ELEMENTS` attention goes in blocks.
    """
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if len(parts) == 1 and parts[0].only_causal:
        whole = (padded(x, 1, _TILE) for x in (q, *_positions_first(parts[0])))  # behind everything: nobody sees it
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
    """Attention over parts with described masks by splash attention.

    Its log-sum-exp is float32, so parts are computed one by one and joined; their gradient is computed in blocks, since
    the kernel's own knows one part only.
    """
    if len(parts) == 1 and parts[0].only_causal:
        return _splash(q, parts[0], residuals=False)
    return joined_attention(q, parts, _splash_forward)


def _splash_forward(
    q: Float[Array, "B N H h"], part: Part, cap: float | None
) -> tuple[Float[Array, "B N H h"], Float[Array, "B N H"]]:
    """Output and log-sum-exp of one part, float32. A query without a key gets a log-sum-exp near float32's lowest."""
    assert cap is None and not part.windowed, "calls that the kernel does not know are not sent here"
    out, lse = _splash(q, part, residuals=True)
    return out.astype(jnp.float32), lse


def _splash(q: Float[Array, "B N H h"], part: Part, residuals: bool) -> Any:
    """One call of the kernel per batch entry, on lengths padded to whole tiles."""
    # Only TPUs need it, and importing it takes a tenth of a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    count = q.shape[1]
    heads_first = padded((q * q.shape[-1] ** -0.5).swapaxes(1, 2), 2, _LANES)
    k, v = padded(part.k.swapaxes(2, 3), 2, _LANES), padded(part.v, 2, _LANES)
    shape, ids = (heads_first.shape[2], k.shape[2]), None
    if not part.only_causal:  # there, what pads the keys stands behind every query
        of_queries, of_keys = segment_ids(part, count)
        ids = splash.SegmentIds(padded(of_queries, 1, _LANES, -2), padded(of_keys, 1, _LANES, -1))
    mask = splash.CausalMask(shape) if isinstance(part.mask, Causal) else splash.FullMask(shape)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=splash.BlockSizes(**_tiles(*shape)),
        save_residuals=residuals,
        interpret=jax.default_backend() == "cpu",
    )
    found = jax.vmap(kernel)(heads_first, k, v, ids)
    out, lse = (found[0], found[1][0]) if residuals else (found, None)
    out = out[:, :, :count].swapaxes(1, 2)
    return out if lse is None else (out, lse[:, :, :count].swapaxes(1, 2))


def _tiles(queries: int, keys: int) -> dict[str, Any]:
    """The largest tiles up to 512 that divide both lengths, forward and backward."""
    q, kv = (max(size for size in (512, 256, 128) if length % size == 0) for length in (queries, keys))
    return {f"block_{side}{of}": size for side, size in (("q", q), ("kv", kv)) for of in ("", "_dkv", "_dq")}


def _positions_first(part: Part) -> tuple[Float[Array, "B U K h"], Float[Array, "B U K h"]]:
    return jnp.moveaxis(part.k, -1, -3), part.v.swapaxes(-3, -2)


def _mask(part: Part, batch: int, count: int) -> Bool[Array, "R #N U"]:
    """The mask of a part for `batch` rows of `count` queries, several of which may belong to one entry of the part."""
    mask = dense_mask(part, batch * count // part.k.shape[0])
    if isinstance(part.mask, Lengths) and part.mask.starts is not None:
        return mask.reshape(batch, count, -1)
    return _repeat(mask, batch)


def _repeat(x: Shaped[Array, "B ..."], batch: int) -> Shaped[Array, "R ..."]:
    """Rows of a group behind each other, each with its prompt's entry."""
    return jnp.repeat(x, batch // x.shape[0], axis=0)
