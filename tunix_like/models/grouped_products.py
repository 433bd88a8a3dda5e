"""Products of sorted rows with one matrix per group, for mixtures of experts.

XLA computes `jax.lax.ragged_dot` on CPUs and GPUs from all rows for every group: 128 times the operations for 128
groups. If there are many rows, batched products of tiles, each with rows of one group and a copy of its matrix, replace
it.

XLA:TPU has kernels for the product and for the gradient of its rows, but not for that of the matrices. In bfloat16,
the latter runs in the kernel of Megablox (arXiv 2211.15841) that jax ships.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

INTERPRET = False
"""Whether the kernel runs in its interpreter, on any platform. Tests set this, because they have no TPU."""

SIDE = 1024
"""Largest side of a tile of a matrix in the kernel. With 512 rows, its tiles take 12 of 16 MB of on-chip memory."""

MOST_ROWS = 2**21
"""Largest number of rows in the kernel. It finds its tiles by a histogram in float32: right for 4,096 tiles, wrong
for 4,200."""

PRODUCT_BY_TILES = {"cpu": 64, "gpu": 640}
"""The product is by tiles if there are at least this many pairs of a row and a matrix for each tile. With fewer, the
copies of the matrices take longer than the products of all rows with all matrices. By compiled programs for an H200,
arithmetic of the one and bytes of the other at peak rates are equal at 510 to 600, for 8 to 128 matrices of 1.6 to 59
million numbers. On two CPU cores, both take equally long at 45 to 65."""

SUMS_BY_TILES = {"cpu": 96, "gpu": 1024}
"""The same for the gradient of the matrices; equal at 900 to 1,000 on an H200 and at 60 to 200 on the CPU."""


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "N I"], matrices: Float[Array, "E I O"], sizes: Int[Array, "E"]
) -> Float[Array, "N O"]:
    """Multiplies the first `sizes[0]` rows of `x` by the first matrix, the next `sizes[1]` by the second, and so on.
    Rows beyond give zeros, and have no gradient."""
    cpu, gpu = (
        _product_of_tiles if _pays(len(x), len(sizes), PRODUCT_BY_TILES[platform]) else jax.lax.ragged_dot
        for platform in ("cpu", "gpu")
    )
    out = jax.lax.platform_dependent(x, matrices, sizes, tpu=jax.lax.ragged_dot, cpu=cpu, default=gpu)
    # On TPUs, rows beyond all groups can hold anything.
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], out, 0)


def _forward(x: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_product(x, matrices, sizes), (x, matrices, sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, matrices, sizes = saved
    kernel = _sums_in_kernel if x.dtype == jnp.bfloat16 and len(x) <= MOST_ROWS else _sums
    cpu, gpu = (
        _sums_of_tiles if _pays(len(x), len(sizes), SUMS_BY_TILES[platform]) else _sums for platform in ("cpu", "gpu")
    )
    of_matrices = (
        kernel(x, cotangent, sizes)
        if INTERPRET
        else jax.lax.platform_dependent(x, cotangent, sizes, tpu=kernel, cpu=cpu, default=gpu)
    )
    return grouped_product(cotangent, matrices.swapaxes(1, 2), sizes), of_matrices.astype(matrices.dtype), None


grouped_product.defvjp(_forward, _backward)


def _sums(x: Float[Array, "N I"], y: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    """Returns the sum of the products `x_i y_i^T` of the rows of each group."""
    rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, y, sizes, rows)


def _sums_in_kernel(x: Float[Array, "N I"], y: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = min(max(rows_of_tile(len(x), len(sizes)), 128), 512)
    x, y = (jnp.pad(z, ((0, -len(z) % rows), (0, 0))) for z in (x, y))
    tile = rows, min(x.shape[1], SIDE), min(y.shape[1], SIDE)
    return tgmm(x.T, y, sizes, x.dtype, tile, interpret=INTERPRET)


def rows_of_tile(count: int, groups: int) -> int:
    """Returns the number of rows of a tile: at most those of a mean group, because every group fills its last tile."""
    return next((size for size in (2048, 1024, 512, 256, 128, 64) if count >= size * groups), 32)


def count_tiles(count: int, groups: int) -> int:
    """Returns a number of tiles that suffices for any sizes of the groups."""
    return count // rows_of_tile(count, groups) + groups


def _pays(count: int, groups: int, least: int) -> bool:
    """Returns whether there are at least `least` pairs of a row and a matrix for each tile."""
    return count * groups >= least * count_tiles(count, groups)


class Tiles(NamedTuple):
    """M tiles of T rows, each with rows of one group.

    Attributes:
      group: the group of each tile.
      row: the row of each place in a tile; N for places without a row.
      place: the place of each row, in the order of the tiles; M T for rows beyond all groups.
    """

    group: Int[Array, "M"]
    row: Int[Array, "M T"]
    place: Int[Array, "N"]


def tiles_of(count: int, sizes: Int[Array, "E"]) -> Tiles:
    """Cuts groups of `sizes` rows, of `count` rows together with those beyond, into tiles."""
    rows = rows_of_tile(count, len(sizes))
    number = count_tiles(count, len(sizes))
    tiles = -(-sizes // rows)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(tiles)
    starts, first = ends - sizes, last - tiles
    tile, row = jnp.arange(number), jnp.arange(count)
    group = jnp.minimum(_number_up_to(last, tile), len(sizes) - 1)
    of_tile = (starts[group] + (tile - first[group]) * rows)[:, None] + jnp.arange(rows)[None]
    own = jnp.minimum(_number_up_to(ends, row), len(sizes) - 1)
    place = first[own] * rows + row - starts[own]
    return Tiles(
        group,
        jnp.where(of_tile < ends[group][:, None], of_tile, count),
        jnp.where(row < ends[-1], place, number * rows),
    )


def _number_up_to(ascending: Int[Array, "E"], x: Int[Array, "N"]) -> Int[Array, "N"]:
    return jnp.searchsorted(ascending, x, side="right", method="compare_all")


def _product_of_tiles(
    x: Float[Array, "N I"], matrices: Float[Array, "E I O"], sizes: Int[Array, "E"]
) -> Float[Array, "N O"]:
    tiles = tiles_of(len(x), sizes)
    out = jnp.einsum("mti,mio->mto", _rows(x, tiles.row), matrices[tiles.group])
    return _rows(out.reshape(-1, out.shape[-1]), tiles.place)


def _sums_of_tiles(x: Float[Array, "N I"], y: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    tiles = tiles_of(len(x), sizes)
    products = jnp.einsum("mti,mto->mio", _rows(x, tiles.row), _rows(y, tiles.row), preferred_element_type=jnp.float32)
    # A product, because the scatter of a sum over segments has no fixed order on a GPU.
    of_group = jax.nn.one_hot(tiles.group, len(sizes), dtype=jnp.float32)
    sums = jnp.einsum("me,mio->eio", of_group, products, precision=jax.lax.Precision.HIGHEST)
    return sums.astype(x.dtype)


def _rows(x: Float[Array, "N I"], index: Int[Array, "*M"]) -> Float[Array, "*M I"]:
    """Returns rows of `x`, and zeros for the index N."""
    return x.at[index].get(mode="fill", fill_value=0)
