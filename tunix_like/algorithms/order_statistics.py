"""Computes advantages of max@K, the expected maximum reward of K completions, and of other order statistics of K.

Let `x_(1) <= ... <= x_(n)` be the scored rewards of a group. Each reward is `x_(1)` plus the gaps `x_(f+1) - x_(f)`
below it. The j-th largest reward of a subset is `x_(1)` plus the gaps above which at least j members of the subset lie.
So every mean of such statistics is a sum over the gaps, each times the same mean for 0/1 rewards that are 1 above the
gap, and so are the advantages:

    A_(i) = sum_{f < i} up_f (x_(f+1) - x_(f)) - sum_{f >= i} down_f (x_(f+1) - x_(f))

`up_f` is the advantage of a success and `-down_f` that of a failure in a group of `n`, `f` of which failed. A table has
these vectors for every number `n` of scored rewards. It is computed on the host in float64. Equal rewards get equal
advantages without special treatment, because the gap between them is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Table = Float[np.ndarray, "N R F"]
"""For every `n = 0..G` scored rewards and `f = 1..G-1` failures: `up` and `down`, then, for `above_average`, two more
rows."""
GivenTable = Table | Float[Array, "N R F"]
"""A table, or the input of a compiled step that has one."""


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


def weighted(rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], table: GivenTable) -> Float[Array, "P G"]:
    """Computes the advantages that `table` defines. Unscored completions and groups of equal rewards get 0."""
    gaps, order, group = _gaps(rewards, scored)
    rows = jnp.asarray(table, rewards.dtype)[group.scored[:, 0]]
    below = jnp.cumsum(rows[:, 0] * gaps, axis=-1)
    above = jnp.cumsum((rows[:, 1] * gaps)[:, ::-1], axis=-1)[:, ::-1]
    none = jnp.zeros_like(group.top)
    advantages = jnp.concatenate([none, below], axis=-1) - jnp.concatenate([above, none], axis=-1)
    back = jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(scored & group.signal, back, 0.0)


def above_average(
    rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], table: GivenTable
) -> tuple[Float[Array, "P G"], Float[Array, "P 1"], Float[Array, "P 1"]]:
    """Returns `q_i - V_k` of each completion, and `V_k` and `max(rewards) - V_k` of each group, with the table of
    `subset_table`.

    `V_k` is the mean of the maximum reward over all subsets of `k` completions, and `q_i` is this mean over the subsets
    that contain completion `i`. `max(rewards) - V_k` is computed as a sum over gaps, so it is accurate even if `V_k` is
    almost as large as the largest reward.
    """
    gaps, _, group = _gaps(rewards, scored)
    rows = jnp.asarray(table, rewards.dtype)[group.scored[:, 0]]
    shortfall, gain = ((rows[:, i] * gaps).sum(axis=-1, keepdims=True) for i in (2, 3))
    return weighted(rewards, scored, table), group.bottom + gain, shortfall


def _gaps(rewards: Array, scored: Array) -> tuple[Float[Array, "P F"], Int[Array, "P G"], Spread]:
    """Returns the gaps between the scored rewards of each group in ascending order, the sort order, and the statistics
    of the scored rewards. Unscored completions are sorted like the largest reward, so they add gaps of 0."""
    group = spread(rewards, scored)
    filled = jnp.where(scored, rewards, group.top)
    order = jnp.argsort(filled, axis=-1)
    return jnp.diff(jnp.take_along_axis(filled, order, axis=-1), axis=-1), order, group


# --- tables -----------------------------------------------------------------------------------------------------------


def _grid(size: int) -> tuple[Int[np.ndarray, "N 1"], Int[np.ndarray, "1 F"]]:
    """Returns the numbers of scored rewards `n = 0..size` and of failures `f = 1..size-1`."""
    return np.arange(size + 1)[:, None], np.arange(1, size)[None]


def _all_fail(size: int, coefficients: Sequence[float]) -> Float[np.ndarray, "N F"]:
    """Returns `sum_K c_K H_K` with `c_1, c_2, ... = coefficients`. `H_K = C(f, K) / C(n-1, K)` is the chance that K of
    `n - 1` other completions all failed, if `f` of these failed; 0 where `K > n - 1`. The binomials could overflow."""
    n, f = _grid(size)
    chance = (f < n).astype(np.float64)
    total = np.zeros_like(chance)
    for drawn, coefficient in enumerate(coefficients):
        possible = slice(drawn + 2, None), slice(drawn, None)  # n - 1 and f above `drawn`; H_K is 0 elsewhere
        chance[possible] *= (f[:, drawn:] - drawn) / (n[drawn + 2 :] - 1 - drawn)
        if coefficient:
            total[possible] += coefficient * chance[possible]
    return total


def _centred(up: Float[np.ndarray, "N F"]) -> Table:
    """Returns the table whose advantages sum to zero: `(n - f) up_f = f down_f`."""
    n, f = _grid(up.shape[0] - 1)
    return np.stack([up, up * np.maximum(n - f, 0) / f], axis=1)


@functools.lru_cache(maxsize=8)
def leave_two_out_table(size: int, coefficients: tuple[float, ...]) -> Table:
    """Returns the table of `sum_K c_K L_K,i` with `c_1, c_2, ... = coefficients`.

    `L_K,i = q_i - V_K(group without i)` is the Leave-Two-Out advantage (arXiv 2606.06080): `V_K` is the mean of the
    maximum reward over all subsets of K completions, and `q_i` this mean over the subsets that contain `i`. A success
    has `L_K = C(f, K) / C(n-1, K)`, the chance that K others all failed. Terms with `K > n - 1` are 0.
    """
    return _centred(_all_fail(size, coefficients))


@functools.lru_cache(maxsize=8)
def marginal_table(size: int, k: int) -> Table:
    """Returns the table of `k` times the mean increase of the maximum reward of `k - 1` other completions by a
    completion; `k >= 2`. A success raises it if the others all failed, a failure never: the smallest reward of a group
    gets exactly 0. The entries for `n < k` are 0."""
    up = _all_fail(size, (*[0.0] * (k - 2), float(k)))
    return np.stack([up, np.zeros_like(up)], axis=1)


@functools.lru_cache(maxsize=8)
def subset_table(size: int, k: int) -> Table:
    """Returns the table of `q_i - V_k = (1 - k/n) L_k,i` for `above_average`. Its other rows are the chances that `k`
    of all `n` completions fail, `C(f, k) / C(n, k)`, and that at least one succeeds. The entries for `n < k` are 0."""
    n, f = _grid(size)
    fail = _all_fail(size, (*[0.0] * (k - 1), 1.0)) * np.maximum(n - k, 0) / np.maximum(n, 1)
    return np.concatenate([_centred(fail), np.stack([fail, ((n >= k) & (f < n)) - fail], axis=1)], axis=1)


@functools.lru_cache(maxsize=8)
def order_statistic_table(size: int, weights: tuple[float, ...]) -> Table:
    """Returns the table of `K (inc_i - loo_i)` for the statistic `sum_j weights_j X_(j:K)` of K completions.

    `X_(1:K)` is the largest of K rewards. `inc_i` and `loo_i` are the means of the statistic over the K-subsets that
    contain `i` and that do not. A success has `up_f = sum_{s=0..K-1} (K - s) weights_{s+1} H_s`: `H_s` is the chance
    that `s` of K others succeeded, `C(n-1-f, s) C(f, K-s) / C(n-1, K)`. The entries for `n <= K` are 0.

    Derivation: for 0/1 rewards, exchanging `i` for a random member of a K-subset of the others changes the statistic
    only if that member failed (a chance of `(K - s) / K`), and then by the weight of rank `s + 1`.
    """
    n, f = _grid(size)
    k = len(weights)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(size, k) + 1)))])  # binomials can overflow

    def log_choose(total: Int[np.ndarray, "*shape"], drawn: int) -> Float[np.ndarray, "*shape"]:
        rest = np.maximum(total, drawn) - drawn
        return np.where(
            total < drawn, -np.inf, log_factorial[rest + drawn] - log_factorial[drawn] - log_factorial[rest]
        )

    subsets = np.where(n > k, log_choose(n - 1, k), np.inf)
    up = np.zeros((size + 1, size - 1))
    for successes, weight in enumerate(weights):
        if weight:
            ways = log_choose(n - 1 - f, successes) + log_choose(f, k - successes)
            up += (k - successes) * weight * np.exp(ways - subsets)
    return _centred(up)
