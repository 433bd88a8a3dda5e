"""Computes the population weight of an estimator on 0/1 rewards, exactly for a finite group size G.

With pass rate `p`, a gradient estimate `(1/G) sum_i A_i grad log pi(y_i | x)` over G independent completions `y_i` with
advantages `A_i` has the expectation `w(p) grad p` (arXiv 2602.02710). `w(p)` is called the population weight of prompts
with pass rate `p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.registry import check_parameters, check_rewards
from tunix_like.errors import UserError


def population_weights(
    advantage_estimator: str, group_size: int, pass_rates: Float[np.ndarray, "N"], **params: Any
) -> Float[np.ndarray, "N"]:
    """Computes the factor `w(p)` in the expected gradient `w(p) grad p` of an estimator on 0/1 rewards.

    `p` is the pass rate, and the gradient is estimated from one group of `G` completions. The expected score function
    is `grad p / p` for a success and `-grad p / (1 - p)` for a failure. Let `j ~ Bin(G, p)` be the number of successes,
    `A_succ(j)` the advantage of a success, and `A_fail(j)` the advantage of a failure. Then

        w(p) = E_j[ j A_succ(j) / (G p) - (G - j) A_fail(j) / (G (1 - p)) ].

    Conditioning on one completion gives a form without division, which this function computes:

        w(p) = E_j[ A_succ(j + 1) - A_fail(j) ],   j ~ Bin(G - 1, p).

    The right side is the expected increase of a completion's advantage if the completion succeeds instead of failing
    and the other completions stay the same. One call of the estimator computes the advantages of all `G + 1`
    possible groups, with completions of one token. The expectation is computed in float64.

    Args:
      advantage_estimator: a registered name, or `FILE.py:function`.
      group_size: G, from 1 to about 1024; the groups form a `[G + 1, G]` array.
      pass_rates: numbers in `[0, 1]`.
      **params: the estimator's parameters, e.g. `k=4`.

    Returns:
      float64 weights, one per pass rate. Their accuracy is limited by the float32 advantages.

    Raises:
      UserError: the estimator is unknown; a parameter is unknown, missing or out of range; the group size is below 1; a
        pass rate is outside `[0, 1]`; or the estimator has no population weight because the advantages of a group
        depend on the other groups of the batch.
    """
    return weights_of([GroupEstimator(advantage_estimator, params)], group_size, pass_rates)[0]


def weights_of(
    estimators: Sequence[GroupEstimator], group_size: int, pass_rates: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "E N"]:
    """Computes the population weights of several estimators (the factors `w(p)` in their expected gradients
    `w(p) grad p`) at the pass rates `p`, in one compiled program."""
    rates = np.asarray(pass_rates, np.float64)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise UserError(f"pass_rates: expected numbers from 0 to 1, got {rates.min():g} to {rates.max():g}.")
    if group_size < 1:
        raise UserError(f"group_size: got {group_size}; it must be at least 1.")
    groups = (np.arange(group_size)[None] < np.arange(group_size + 1)[:, None]).astype(np.float64)
    together = advantages_of(estimators, groups)
    one = min(1, group_size - 1)
    by_itself = advantages_of(estimators, groups[one : one + 1])
    for estimator, batch, alone in zip(estimators, together, by_itself, strict=True):
        if not np.allclose(alone[0], batch[one], rtol=1e-4, atol=1e-4):
            raise UserError(
                f"advantage estimator '{estimator.name}': the advantages of a group depend on the other groups of the "
                "batch, so it has no population weight of its own."
            )
    gains = np.stack([advantages[1:, 0] - advantages[:-1, -1] for advantages in together])
    return gains @ binomial_pmf(group_size - 1, rates).T


def advantages_of(
    estimators: Sequence[GroupEstimator],
    rewards: Float[np.ndarray, "P G"],
    lengths: Int[np.ndarray, "P G"] | None = None,
) -> list[Float[np.ndarray, "P G"]]:
    """Computes the advantages of the same rewards with several estimators, in one compiled program.

    Args:
      rewards: NaN where a completion could not be scored.
      lengths: completion lengths in tokens; defaults to ones.

    Returns:
      the float32 results as float64 arrays, in the order of `estimators`.

    Raises:
      UserError: an estimator does not accept the parameters or rewards, or a function of the user raises, returns a
        wrong shape, or returns a non-finite number.
    """
    scored = ~np.isnan(rewards)
    for estimator in estimators:
        params = check_parameters(estimator.name, estimator.params, rewards.shape[1])
        check_rewards(estimator.name, params, rewards, scored)
    counts = np.ones(rewards.shape, np.int32) if lengths is None else lengths.astype(np.int32)
    traced = jax.jit(lambda *arrays: [_call(estimator, *arrays) for estimator in estimators])
    outputs = traced(jnp.asarray(np.where(scored, rewards, 0.0), jnp.float32), jnp.asarray(scored), jnp.asarray(counts))
    results = [np.asarray(output, np.float64) for output in outputs]
    for estimator, result in zip(estimators, results, strict=True):
        if not np.isfinite(result).all():
            group, sample = (int(i) + 1 for i in np.argwhere(~np.isfinite(result))[0])
            raise UserError(
                f"advantage estimator '{estimator.name}': returned {result[group - 1, sample - 1]} for completion "
                f"{sample} of group {group}; it must return finite numbers."
            )
    return results


def _call(estimator: GroupEstimator, rewards: jax.Array, scored: jax.Array, lengths: jax.Array) -> jax.Array:
    try:
        return estimator(rewards, scored, lengths)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"advantage estimator '{estimator.name}' raised {type(error).__name__}: {error}") from error


def reinforcement_weight(pass_rates: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Returns the population weight of standard RL, which is 1 for each pass rate `p`. Standard RL maximises the
    expected 0/1 reward `p`, whose gradient is `1 * grad p`."""
    return np.ones_like(pass_rates)


def likelihood_weight(pass_rates: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Returns the population weight of maximum likelihood, which is `1/p` for each pass rate `p > 0`. The gradient of
    the log-likelihood of success is `grad log p = (1/p) grad p`. The expected gradient of MaxRL tends to it for large
    groups."""
    return 1.0 / pass_rates


def binomial_pmf(trials: int, rates: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N J"]:
    """Computes `C(n, j) p^j (1-p)^(n-j)` with `n = trials`, for each `p` of `rates` and `j = 0..n`. The products are
    computed as sums of logarithms, because `C(n, j)` overflows float64 from n = 1030."""
    j = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        success = np.where(j == 0, 0.0, j * np.log(rates)[:, None])  # 0 log 0 = 0
        failure = np.where(j == trials, 0.0, (trials - j) * np.log1p(-rates)[:, None])
    return np.exp(log_choose + success + failure)
