"""The objective behind an estimator: its population weight on 0/1 rewards, exact for a group of G.

With pass rate `p`, a gradient estimate `(1/G) sum_i A_i grad log pi(y_i | x)` over G independent completions has the
expectation `w(p) grad p` (arXiv 2602.02710): `w` says how strongly prompts of each difficulty are pulled on. This
module knows the estimators by what they return, and no model.
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
    """`w(p)` of any estimator on 0/1 rewards at one group size.

    A success adds `grad p / p` to the expected score function and a failure `-grad p / (1 - p)`, so that with
    `j ~ Bin(G, p)` successes, advantage `A_succ(j)` for each of them and `A_fail(j)` for the others,

        w(p) = E_j[ j A_succ(j) / (G p) - (G - j) A_fail(j) / (G (1 - p)) ].

    Moving one completion out of the group turns it into what is computed here, which divides by nothing:

        w(p) = E_j[ A_succ(j + 1) - A_fail(j) ],   j ~ Bin(G - 1, p):

    what one completion gains by success while the others do as they do. `A` comes from the estimator's own function,
    all `G + 1` groups in one call, every completion one token long; the sum is in float64.

    Args:
      advantage_estimator: a registered name, or `FILE.py:function`.
      group_size: G, from 1 to 1024 or so: the groups are a `[G + 1, G]` array.
      pass_rates: any numbers in `[0, 1]`.
      **params: the estimator's own, e.g. `k=4`.

    Returns:
      float64 weights, one per pass rate, as exact as the estimator's float32.

    Raises:
      UserError: an unknown estimator; a parameter it does not read, or needs, or out of range; a size below 1; a pass
        rate outside `[0, 1]`; an estimator whose advantages depend on the other groups of the batch, and so has no
        weight of its own.
    """
    return weights_of([GroupEstimator(advantage_estimator, params)], group_size, pass_rates)[0]


def weights_of(
    estimators: Sequence[GroupEstimator], group_size: int, pass_rates: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "E N"]:
    """`population_weights` of several estimators, compiled together."""
    rates = np.asarray(pass_rates, np.float64)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise UserError(f"pass_rates: expected numbers from 0 to 1, got {rates.min():g} to {rates.max():g}.")
    if group_size < 1:
        raise UserError(f"group_size: got {group_size}; a group has at least one completion.")
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
    """Advantages by several estimators as the training step computes them, traced into one program.

    Args:
      rewards: NaN where a completion could not be scored.
      lengths: completion lengths in tokens; ones when not given.

    Returns:
      float64 arrays that hold the float32 results, in the order of `estimators`.

    Raises:
      UserError: parameters or rewards that one of them does not take, or a function of the user's own that fails,
        returns another shape, or returns a number that is not finite.
    """
    scored = ~np.isnan(rewards)
    for each in estimators:
        check_rewards(each.name, check_parameters(each.name, each.params, rewards.shape[1]), rewards, scored)
    counts = np.ones(rewards.shape, np.int32) if lengths is None else lengths.astype(np.int32)
    traced = jax.jit(lambda *arrays: [_call(each, *arrays) for each in estimators])
    found = traced(jnp.asarray(np.where(scored, rewards, 0.0), jnp.float32), jnp.asarray(scored), jnp.asarray(counts))
    results = [np.asarray(each, np.float64) for each in found]
    for each, result in zip(estimators, results, strict=True):
        if not np.isfinite(result).all():
            group, sample = (int(i) + 1 for i in np.argwhere(~np.isfinite(result))[0])
            raise UserError(
                f"advantage estimator '{each.name}': returned {result[group - 1, sample - 1]} for completion {sample} "
                f"of group {group}; it must return finite numbers."
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
    """`w(p) = 1`: the expected reward, which plain RL ascends."""
    return np.ones_like(pass_rates)


def likelihood_weight(pass_rates: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """`w(p) = 1/p`, `p > 0`: the log-likelihood of success, the limit of MaxRL for large groups."""
    return 1.0 / pass_rates


def binomial_pmf(trials: int, rates: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N J"]:
    """`C(n, j) p^j (1-p)^(n-j)` for `j = 0..n`, by logarithms: the coefficients alone leave float64 at n = 1030."""
    j = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        success = np.where(j == 0, 0.0, j * np.log(rates)[:, None])  # 0 log 0 = 0
        failure = np.where(j == trials, 0.0, (trials - j) * np.log1p(-rates)[:, None])
    return np.exp(log_choose + success + failure)
