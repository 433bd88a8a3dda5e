"""Compares grouped products, by XLA, in tiles and in the kernel's interpreter, with a loop over groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.models import grouped_products
from tunix_like.models.grouped_products import grouped_product

SIZES = {
    "every group": [40, 90, 130],
    "rows beyond, an empty group": [60, 0, 77],
    "one group": [0, 260, 0],
    "none": [0, 0, 0],
}


def looped(x, matrices, sizes):
    """Returns the product in float64, and its gradients for the cotangent `sin` of the row and column numbers."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    known, g = x[: len(groups)], cotangent(len(x), matrices.shape[2])[: len(groups)]
    out, of_x, of_matrices = np.zeros((len(x), matrices.shape[2])), np.zeros(x.shape), np.zeros(matrices.shape)
    for i, group in enumerate(groups):
        out[i], of_x[i] = known[i] @ matrices[group], matrices[group] @ g[i]
        of_matrices[group] += np.outer(known[i], g[i])
    return out, of_x, of_matrices


def cotangent(rows, columns):
    return np.sin(np.arange(rows)[:, None] + 2.0 * np.arange(columns))


@pytest.mark.parametrize("how", ["ragged_dot", "tiles", "kernel"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("count, inputs, outputs", [(260, 24, 40), (260, 1200, 8)], ids=["small", "a part of a tile"])
def test_values_and_gradients_equal_a_loop(count, inputs, outputs, sizes, how, monkeypatch):
    """XLA may leave rows beyond all groups as they were in memory. Their results and gradients are zeros."""
    monkeypatch.setattr(grouped_products, "INTERPRET", how == "kernel")
    for name in ("PRODUCT_BY_TILES", "SUMS_BY_TILES"):
        monkeypatch.setitem(getattr(grouped_products, name), "cpu", 0 if how == "tiles" else 10**9)
    ragged_dot = jax.lax.ragged_dot

    def leaving(x, matrices, sizes):
        return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], ragged_dot(x, matrices, sizes), jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", leaving)
    rng = np.random.default_rng(0)
    x, matrices = (
        np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), float)
        for shape in ((count, inputs), (len(sizes), inputs, outputs))
    )
    given = (jnp.asarray(array, jnp.bfloat16) for array in (x, matrices))
    found, pull_back = jax.vjp(lambda x, y: grouped_product(x, y, jnp.asarray(sizes, jnp.int32)), *given)
    g = cotangent(count, outputs)
    g = np.where(np.arange(count)[:, None] < sum(sizes), g, np.nan)
    for one, other in zip((found, *pull_back(jnp.asarray(g, jnp.bfloat16))), looped(x, matrices, sizes), strict=True):
        scale = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(one, float), other, atol=0.02 * scale)
