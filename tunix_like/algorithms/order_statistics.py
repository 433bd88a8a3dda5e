"""Computes advantages of max@K, the expected maximum reward of K completions.

The advantages are linear functions of a group's sorted rewards, with weights that do not depend on the data. Let `x` be
the rewards in ascending order, minus the largest reward. Every advantage in this module is

    A_(i) = t_i x_(i) + sum_{m > i} u_m x_(m) - sum_m w_m x_(m)

The static vectors `t, u, w` define an advantage. They are computed on the host in float64, for every number `n` of
scored rewards. Equal rewards get equal advantages without special treatment. For one K, let `q_i` be the mean maximum
over the K-subsets of the group that contain `i`, and `V_K` the mean maximum over all K-subsets. Then `q_i - V_K` is the
advantage with

    t_i = C(i-1, K-1) / C(n-1, K-1)     u_m = C(m-2, K-2) / C(n-1, K-1)     w_m = C(m-1, K-1) / C(n, K)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Mixture = tuple[tuple[int, float], ...]
"""Defines a weighted sum of advantages for several K, as pairs `(K, factor)`."""


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
    """Computes the sum of `c L_K,i` over the pairs `(K, c)` of `mixture`.

    `L_K,i = q_i - V_K(group without i) = n/(n-K) (q_i - V_K)` is the Leave-Two-Out advantage (arXiv 2606.06080). `n`,
    `q_i` and `V_K` are defined in the docstring of this module. Terms with `K > n - 1` are 0. A group of equal rewards
    gets zeros.
    """
    table = _leave_two_out_weights(rewards.shape[-1], mixture)
    return _weighted(rewards, scored, table)


def above_average(
    rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], k: int
) -> tuple[Float[Array, "P G"], Float[Array, "P 1"], Float[Array, "P 1"]]:
    """Returns `q_i - V_k` of each completion, and `V_k` and `max(rewards) - V_k` of each group.

    `q_i` and `V_k` are defined in the docstring of this module. The last value is a sum of differences to the largest
    reward. It is therefore accurate even if `V_k` is almost as large as this reward.
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
    """Computes `q_i - V_{k-1}(group without i)` for `k >= 2`.

    The result is the mean, over all sets of `k - 1` other completions, of the increase of the set's maximum if
    completion `i` is added. `q_i` and `V` are defined in the docstring of this module. The result is never negative,
    and it is exactly 0 for the smallest reward of a group.
    """
    least = spread(rewards, scored).bottom
    out = _weighted(rewards, scored, _marginal_weights(rewards.shape[-1], k))
    return jnp.where(rewards > least, out, 0.0)


def _sorted(rewards: Array, scored: Array) -> tuple[Array, Array, Spread]:
    """Returns the sorted rewards minus the largest reward (0 beyond the scored rewards), the sort order, and the
    `Spread`."""
    group = spread(rewards, scored)
    order = jnp.argsort(jnp.where(scored, rewards, jnp.inf), axis=-1)
    shifted = jnp.take_along_axis(rewards, order, axis=-1) - group.top
    return jnp.where(jnp.arange(rewards.shape[-1])[None] < group.scored, shifted, 0.0), order, group


def _weighted(rewards: Array, scored: Array, table: Float[np.ndarray, "N 3 G"]) -> Array:
    """Evaluates the formula of the module docstring with the vectors `t, u, w = table[n]` for `n` scored rewards. The
    result is 0 for unscored completions and in groups of equal rewards."""
    ordered, order, group = _sorted(rewards, scored)
    own, above, common = (jnp.asarray(table, rewards.dtype)[group.scored[:, 0], i] for i in range(3))
    lifted = above * ordered
    later = jnp.cumsum(lifted[:, ::-1], axis=-1)[:, ::-1] - lifted
    advantages = own * ordered + later - (common * ordered).sum(axis=-1, keepdims=True)
    back = jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(scored & group.signal, back, 0.0)


def _own_weights(n: int, orders: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K n"]:
    """Computes `C(m-1, K-1) / C(n-1, K-1)` for each `K` of `orders` and `m = 1..n`.

    The values are computed as a running product from `m = n` downwards, which cannot overflow.
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
    """Computes the vectors `t, u, w` of `q_i - V_k` (see the module docstring) for every number `n` of scored rewards,
    at index `n`. The vectors for `n < k` are 0."""
    table = np.zeros((size + 1, 3, size))
    for n in range(max(k, 2), size + 1):
        own = _own_weights(n, np.array([k]))[0]
        table[n, 0, :n] = own
        table[n, 1, 1:n] = own[1:] * (k - 1) / np.arange(1, n)
        table[n, 2, :n] = own * k / n
    return table


@functools.lru_cache(maxsize=8)
def _marginal_weights(size: int, k: int) -> Float[np.ndarray, "N 3 G"]:
    """Computes the three vectors of `q_i - V_{k-1}(-i)` for every number `n` of scored rewards, at index `n`.

    `V_{k-1}(-i)` is `V_{k-1}` of the group without `i`. The advantage is `sum_{m < i} a_m (x_(i) - x_(m))` with
    `a_m = C(m-1, k-2) / C(n-1, k-1)`. With `t` from the module docstring for K = k, the three vectors are
    `t + a, a, a`. The vectors for `n < k` are 0.
    """
    table = np.zeros((size + 1, 3, size))
    for n in range(max(k, 2), size + 1):
        before, own = _own_weights(n, np.array([k - 1, k]))
        gap = before * (k - 1) / (n - k + 1)
        table[n, 0, :n] = own + gap
        table[n, 1, :n] = gap
        table[n, 2, :n] = gap
    return table
