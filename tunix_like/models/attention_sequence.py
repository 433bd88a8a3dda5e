"""Splits the tokens of sequences over the mesh axis `cp` in attention.

Between attention, each device has consecutive tokens. A device computes attention for its own queries, with keys and
values that are gathered from all devices: with grouped heads they are a small part of a layer's arrays, and any mask is
possible (as in Llama 3, arXiv 2407.21783). In a causal mask late queries see more keys, so queries are exchanged: of 2n
chunks of a sequence, device i of n computes chunks i and 2n - 1 - i, and every device has the same number of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from tunix_like.models.attention_parts import Causal, Lengths, Part
from tunix_like.models.sharding import row_axes, token_axis

AXIS = "cp"


def over_sequence(
    function: Callable[..., Array],
    q: Float[Array, "*B N H h"],
    parts: tuple[Part, ...],
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "*B N H h"]:
    """Returns `function(q, parts, sinks)`, attention over parts of keys and values with masks, computed by each device
    of the axis `cp` for its own queries. On a mesh without this axis, and for masks of decoding, it is called as it
    is."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = None if mesh.empty or mesh.manual_axes else token_axis(mesh, q.shape[-3])
    if axis is None or not all(isinstance(part.mask, Lengths | Causal) for part in parts):
        return function(q, parts, sinks)
    rows = row_axes(mesh, q.shape[0]) or None
    heads = "tp" if "tp" in mesh.shape and parts[0].k.shape[1] % mesh.shape["tp"] == 0 else None
    by_token = PartitionSpec(rows, *[None] * (q.ndim - 4), axis, heads)
    specs = []
    given = []
    for part in parts:
        keys = token_axis(mesh, part.k.shape[-1])
        mask = part.mask
        if isinstance(mask, Lengths) and mask.starts is not None:
            mask = mask._replace(starts=mask.starts.reshape(q.shape[:-2]))
        of_mask = jax.tree.map(lambda x: PartitionSpec(rows) if jnp.ndim(x) else PartitionSpec(), mask)
        if isinstance(mask, Lengths) and mask.starts is not None:
            of_mask = of_mask._replace(starts=PartitionSpec(*by_token[: q.ndim - 2]))
        given.append(Part(part.k, part.v, mask))
        of_k: Any = PartitionSpec(rows, heads, None, keys)
        of_v: Any = PartitionSpec(rows, heads, keys)
        specs.append(Part(of_k, of_v, of_mask))

    def run(q: Array, parts: list[Part], sinks: Array | None) -> Array:
        whole = tuple(_whole(part, spec, q.shape[-3]) for part, spec in zip(parts, specs, strict=True))
        return _returned(function(_exchanged(q, q.ndim - 3), whole, sinks), q.ndim - 3)

    wrapped = jax.shard_map(
        run, mesh=mesh, in_specs=(by_token, specs, PartitionSpec(heads)), out_specs=by_token, check_vma=False
    )
    return wrapped(q, given, sinks)


def _whole(part: Part, spec: Part, count: int) -> Part:
    """Returns a part with all its keys and values, and with the mask of this device's `count` exchanged queries."""
    k, v, mask = part
    if spec.k[-1] is not None:
        k, v = (jax.lax.all_gather(x, AXIS, axis=axis, tiled=True) for x, axis in ((k, 3), (v, 2)))
    if isinstance(mask, Causal):
        mask = mask._replace(queries=_queries(count))
    elif isinstance(mask, Lengths) and mask.starts is not None:
        starts = _exchanged(mask.starts, mask.starts.ndim - 1)
        mask = mask._replace(starts=starts.reshape(len(k), -1))
    return Part(k, v, mask)


def _queries(count: int) -> Int[Array, "N"]:
    """Returns the positions in the sequence of the `count` queries of this device."""
    size = count // 2
    low, high = _chunks()
    return jnp.concatenate([low * size + jnp.arange(size), high * size + jnp.arange(size)])


def query_order(count: int, parts: int) -> Int[np.ndarray, "parts N"]:
    """Returns the positions in the sequence of the `count` queries of each of `parts` devices."""
    chunks = np.arange(2 * parts * (count // 2)).reshape(2 * parts, -1)
    return np.concatenate([chunks[:parts], chunks[: parts - 1 : -1]], axis=1)


def _chunks() -> tuple[Any, Any]:
    device = jax.lax.axis_index(AXIS)
    parts = jax.lax.axis_size(AXIS)
    return device, 2 * parts - 1 - device


def _exchanged(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Exchanges the axis `axis` of queries between devices, from consecutive chunks to those of `_chunks`."""
    first, second = jnp.split(x, 2, axis)
    to_first, to_second = _permutations()
    even = jax.lax.axis_index(AXIS) % 2 == 0
    first = jax.lax.ppermute(first, AXIS, to_first)
    second = jax.lax.ppermute(second, AXIS, to_second)
    return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], axis)


def _returned(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Reverses `_exchanged`."""
    low, high = jnp.split(x, 2, axis)
    even = jax.lax.axis_index(AXIS) % 2 == 0
    halves = jnp.where(even, low, high), jnp.where(even, high, low)
    back = ([(to, source) for source, to in pairs] for pairs in _permutations())
    return jnp.concatenate([jax.lax.ppermute(x, AXIS, pairs) for x, pairs in zip(halves, back, strict=True)], axis)


def _permutations() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns where the first and the second of each device's two consecutive chunks go. An even chunk is the low chunk
    of an even device or the high chunk of an odd one."""
    parts = jax.lax.axis_size(AXIS)

    def device(chunk: int) -> int:
        return chunk if chunk < parts else 2 * parts - 1 - chunk

    first, second = ([(i, device(2 * i + half)) for i in range(parts)] for half in (0, 1))
    return first, second
