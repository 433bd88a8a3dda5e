"""Computes advantages of max@K, the expected maximum reward of K completions.

The advantages are linear functions of a group's sorted rewards, with weights that do not depend on the data. Let `x` be
the rewards in ascending order, minus the largest reward. Every advantage in this module is

    A_(i) = t_i x_(i) + sum_{m > i} u_m x_(m) - sum_m w_m x_(m)

The static vectors `t, u, w` define an advantage. They are computed on the host in float64, for every number `n` of
scored rewards. Equal rewards get equal advantages without special treatment. For one K, let `V_K` be the mean of the
maximum reward over all subsets of K completions, and `q_i` this mean over the subsets that contain completion `i`. Then
`q_i - V_K` is the advantage with

    t_i = C(i-1, K-1) / C(n-1, K-1)     u_m = C(m-2, K-2) / C(n-1, K-1)     w_m = C(m-1, K-1) / C(n, K)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Mixture = tuple[tuple[int, float], ...]
"""Pairs `(K, factor)` that define a sum of max@K advantages, each multiplied by its factor."""


class Spread(NamedTuple):
    """Statistics of the scored rewards of each group.

    Attributes:
      scored: number of scored rewards.
      top: largest scored reward; 0 if no reward is scored.
      bottom: smallest scored reward; 0 if no reward is scored.
      signal: whether at least two scored rewards differ.
    """

    scored: Int[Array, "P 1"]
    top: Float[Array, "P 1"]
    bottom: Float[Array, "P 1"]
    signal: Bool[Array, "P 1"]


def spread(rewards: Float[Array, "P G"], scored: Bool[Array, "P G"]) -> Spread:
    count = scored.sum(axis=-1, keepdims=True)
    top = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=-1, keepdims=True)
    bottom = jnp.min(jnp.where(scored, rewards, jnp.inf), axis=-1, keepdims=True)
    some = count > 0
    return Spread(count, jnp.where(some, top, 0.0), jnp.where(some, bottom, 0.0), some & (top > bottom))


def leave_two_out(rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], mixture: Mixture) -> Float[Array, "P G"]:
    """Computes, for each completion `i`, the sum of `c L_K,i` over the pairs `(K, c)` of `mixture`.

    `L_K,i = q_i - V_K(group without i) = n/(n-K) (q_i - V_K)` is the Leave-Two-Out advantage (arXiv 2606.06080). `n` is
    the number of scored completions. `V_K` is the mean of the maximum reward over all subsets of K completions, and
    `q_i` is this mean over the subsets that contain `i`. Terms with `K > n - 1` are 0. A group of equal rewards gets
    zeros.
    """
    table = _leave_two_out_weights(rewards.shape[-1], mixture)
    return _weighted(rewards, scored, table)


def above_average(
    rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], k: int
) -> tuple[Float[Array, "P G"], Float[Array, "P 1"], Float[Array, "P 1"]]:
    """Returns `q_i - V_k` of each completion, and `V_k` and `max(rewards) - V_k` of each group.

    `V_k` is the mean of the maximum reward over all subsets of `k` completions, and `q_i` is this mean over the subsets
    that contain completion `i`. `max(rewards) - V_k` is computed as a sum of differences to the largest reward, so it
    is accurate even if `V_k` is almost as large as that reward.
    """
    size = rewards.shape[-1]
    table = _subset_weights(size, k)
    ordered, _, group = _sorted(rewards, scored)
    common = jnp.asarray(table, rewards.dtype)[group.scored[:, 0], 2]
    shortfall = -(common * ordered).sum(axis=-1, keepdims=True)
    plain = jnp.where(jnp.arange(size)[None] < group.scored, ordered + group.top, 0.0)
    value = (common * plain).sum(axis=-1, keepdims=True)
    return _weighted(rewards, scored, table), value, shortfall


def marginal_contribution(rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], k: int) -> Float[Array, "P G"]:
    """Computes, for each completion, how much it raises the maximum reward of `k - 1` other completions on average.

    The average is over all sets of `k - 1` other completions of the group; `k >= 2`. The result is never negative, and
    it is exactly 0 for the smallest reward of a group.
    """
    least = spread(rewards, scored).bottom
    out = _weighted(rewards, scored, _marginal_weights(rewards.shape[-1], k))
    return jnp.where(rewards > least, out, 0.0)


def _sorted(rewards: Array, scored: Array) -> tuple[Array, Array, Spread]:
    """Sorts the scored rewards of each group in ascending order and subtracts the largest reward. Returns the
    differences (padded with zeros), the sort order, and the statistics of the scored rewards."""
    group = spread(rewards, scored)
    order = jnp.argsort(jnp.where(scored, rewards, jnp.inf), axis=-1)
    shifted = jnp.take_along_axis(rewards, order, axis=-1) - group.top
    return jnp.where(jnp.arange(rewards.shape[-1])[None] < group.scored, shifted, 0.0), order, group


def _weighted(rewards: Array, scored: Array, table: Float[np.ndarray, "N 3 G"]) -> Array:
    """Computes the advantages `t_i x_(i) + sum_{m > i} u_m x_(m) - sum_m w_m x_(m)` of each group.

    `x` are the scored rewards of a group in ascending order, minus the largest reward. With `n` scored rewards, the
    vectors `t, u, w` are `table[n]`. Unscored completions and groups of equal rewards get 0.
    """
    ordered, order, group = _sorted(rewards, scored)
    own, above, common = (jnp.asarray(table, rewards.dtype)[group.scored[:, 0], i] for i in range(3))
    lifted = above * ordered
    later = jnp.cumsum(lifted[:, ::-1], axis=-1)[:, ::-1] - lifted
    advantages = own * ordered + later - (common * ordered).sum(axis=-1, keepdims=True)
    back = jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(scored & group.signal, back, 0.0)


def _own_weights(n: int, orders: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K n"]:
    """Computes the quotients of binomials `C(m-1, K-1) / C(n-1, K-1)` for each `K` of `orders` and `m = 1..n`.

    The quotients are computed as a running product from `m = n` downwards. The binomials themselves could overflow.
    """
    m = np.arange(n, 1, -1, dtype=np.float64)
    ratios = np.maximum(m - orders[:, None], 0.0) / (m - 1)
    return np.concatenate([np.ones((len(orders), 1)), np.cumprod(ratios, axis=1)], axis=1)[:, ::-1]


@functools.lru_cache(maxsize=8)
def _leave_two_out_weights(size: int, mixture: Mixture) -> Float[np.ndarray, "N 3 G"]:
    every, factors = np.array([k for k, _ in mixture]), np.array([factor for _, factor in mixture])
    table = np.zeros((size + 1, 3, size))
    for n in range(2, size + 1):
        orders = every[every < n]
        own = _own_weights(n, orders)
        scale = factors[every < n] * n / (n - orders)
        total, times_order = scale @ own, (scale * orders) @ own
        table[n, 0, :n] = total
        table[n, 1, 1:n] = (times_order - total)[1:] / np.arange(1, n)
        table[n, 2, :n] = times_order / n
    return table


@functools.lru_cache(maxsize=8)
def _subset_weights(size: int, k: int) -> Float[np.ndarray, "N 3 G"]:
    """Returns the table with which `_weighted` computes `q_i - V_k`. Entry `n` is for groups of `n` scored rewards.

    `V_k` is the mean of the maximum reward over all subsets of `k` completions, and `q_i` is this mean over the subsets
    that contain completion `i`. The entries for `n < k` are 0.
    """
    table = np.zeros((size + 1, 3, size))
    for n in range(max(k, 2), size + 1):
        own = _own_weights(n, np.array([k]))[0]
        table[n, 0, :n] = own
        table[n, 1, 1:n] = own[1:] * (k - 1) / np.arange(1, n)
        table[n, 2, :n] = own * k / n
    return table


@functools.lru_cache(maxsize=8)
def _marginal_weights(size: int, k: int) -> Float[np.ndarray, "N 3 G"]:
    """Returns the table with which `_weighted` computes `marginal_contribution`. Entry `n` is for groups of `n` scored
    rewards.

    For rewards `x` in ascending order, the contribution of completion `i` is `sum_{m < i} a_m (x_(i) - x_(m))` with
    `a_m = C(m-1, k-2) / C(n-1, k-1)`. The three vectors of an entry are `t + a, a, a` with
    `t_i = C(i-1, k-1) / C(n-1, k-1)`. The entries for `n < k` are 0.
    """
    table = np.zeros((size + 1, 3, size))
    for n in range(max(k, 2), size + 1):
        before, own = _own_weights(n, np.array([k - 1, k]))
        gap = before * (k - 1) / (n - k + 1)
        table[n, 0, :n] = own + gap
        table[n, 1, :n] = gap
        table[n, 2, :n] = gap
    return table
