"""Products of sorted rows with one matrix per group, for mixtures of experts.

XLA:TPU has kernels for `jax.lax.ragged_dot` and for the gradient of its rows. The gradient of the matrices it computes
from all rows for every group: 16 times the operations for 16 groups. In bfloat16, this product therefore runs in the
kernel of Megablox (arXiv 2211.15841) that jax ships, which visits only the rows of each group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

INTERPRET = False
"""Whether the kernel runs in its interpreter, on any platform. Tests set this, because they have no TPU."""

SIDE = 1024
"""Largest side of a tile of a matrix. With 512 rows, the tiles of the kernel take 12 of 16 MB of on-chip memory."""


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "N I"], matrices: Float[Array, "E I O"], sizes: Int[Array, "E"]
) -> Float[Array, "N O"]:
    """Multiplies the first `sizes[0]` rows of `x` by the first matrix, the next `sizes[1]` by the second, and so on.
    Rows beyond give zeros, and have no gradient."""
    return _known(jax.lax.ragged_dot(x, matrices, sizes), sizes)


def _forward(x: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_product(x, matrices, sizes), (x, matrices, sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, matrices, sizes = saved
    of_x = jax.lax.ragged_dot(cotangent, matrices.swapaxes(1, 2), sizes)
    given = x, cotangent, sizes
    if x.dtype != jnp.bfloat16:
        of_matrices = _sums(*given)
    elif INTERPRET:
        of_matrices = _sums_in_kernel(*given)
    else:
        of_matrices = jax.lax.platform_dependent(*given, tpu=_sums_in_kernel, default=_sums)
    return _known(of_x, sizes), of_matrices.astype(matrices.dtype), None


grouped_product.defvjp(_forward, _backward)


def _known(x: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "N O"]:
    """Replaces the rows beyond all groups, which kernels do not write, by zeros."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, 0)


def _sums(x: Float[Array, "N I"], y: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    """Returns the sum of the products `x_i y_i^T` of the rows of each group."""
    rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, y, sizes, rows)


def _sums_in_kernel(x: Float[Array, "N I"], y: Float[Array, "N O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    """Computes `_sums`. Each group computes whole tiles, so a tile has at most as many rows as the mean group, and at
    least 128."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = next((size for size in (512, 256) if len(x) >= size * len(sizes)), 128)
    x, y = (jnp.pad(z, ((0, -len(z) % rows), (0, 0))) for z in (x, y))
    tile = rows, min(x.shape[1], SIDE), min(y.shape[1], SIDE)
    return tgmm(x.T, y, sizes, x.dtype, tile, interpret=INTERPRET)
