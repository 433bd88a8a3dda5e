"""Advantages of turns: each turn of a trajectory is credited with the rewards from it on, not with all of them.

A trajectory `i` of a group has the turns `t = 1..T_i` with rewards `r_i,t`. Its reward-to-go is
`R_i,t = sum_{s >= t} gamma^(s-t) r_i,s`, and 0 after its end. The tokens of a turn get `A_i,t = R_i,t - b_i,t`. As
`b_i,t` is a function of the other trajectories alone, `E[sum_t A_i,t grad log pi(turn t)]` is the gradient of the
expected sum of the rewards if `gamma` is 1. With `gamma < 1` it is `E[sum_t R_i,t grad log pi(turn t)]`, in which a
reward counts less for earlier turns; that is the gradient of no objective. (Times `gamma^(t-1)` it would be that of the
discounted sum, in which late turns hardly learn.)

A baseline over the trajectories that reach turn t, with `i` among them, is biased: the number of its terms depends on
whether `i` stops. `tests/algorithms/test_turns.py` enumerates all of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.registry import check_parameters
from tunix_like.errors import UserError, nearest

BASELINES = ("fixed_index", "reached")
BY_RETURN = ("rloo", "grpo", "drgrpo")
"""Estimators whose advantage of a turn is that of its reward-to-go."""
NOT_BY_TURN = ("ppo", "otb", "opo", "reinforce_pp", "gdpo", "distillation")
"""Estimators that have advantages of tokens themselves, that read more than the rewards of a group's completions, or
that have no rewards."""

TurnRewards = Sequence[Sequence[float | None]]


def turn_advantages(
    turn_rewards: TurnRewards,
    advantage_estimator: str = "rloo",
    gamma: float = 1.0,
    baseline: str = "fixed_index",
    *,
    turn_coef: float = 1.0,
    **parameters: Any,
) -> list[Float[np.ndarray, " T"]]:
    """Returns the advantages of the turns of one group, an array per trajectory, in float64.

    `rloo` gives `R_i,t - b_i,t`. `drgrpo` is `(n-1)/n` of it, for n trajectories whose `R_.,t` is known, and `grpo`
    divides that by the standard deviation of the `R_.,1` of the group plus 1e-6 (biased, as for whole completions).
    Other estimators, such as `maxrl` and `maxpo`, give every turn the advantage of the trajectory's outcome, which is
    the reward of its last turn, plus `turn_coef` times the `rloo` advantage of the rewards before it. This is unbiased
    for the objective of the outcome plus `turn_coef` times the expected sum of the other rewards.

    Args:
      turn_rewards: a list of rewards per trajectory, one per turn. None: the turn could not be scored. The `R_i,t` up
        to this turn are then unknown: these turns get the advantage 0 and are in no baseline.
      gamma: discount per turn.
      baseline: `fixed_index`: the mean of `R_j,t` over all other trajectories, 0 for those that ended before t.
        `reached`: the mean over the others that reach t, and 0 if none does.
      parameters: those of the estimator, such as `k` of `maxpo`.

    Raises:
      UserError: an argument is wrong, or the estimator has no advantages of turns.
    """
    _check(turn_rewards, advantage_estimator, gamma, baseline)
    parameters = check_parameters(advantage_estimator, parameters, len(turn_rewards))
    if advantage_estimator in BY_RETURN:
        return turn_terms(turn_rewards, advantage_estimator, gamma, baseline, parameters=parameters)
    outcomes = np.array([np.nan if row[-1] is None else row[-1] for row in turn_rewards])
    of_outcome = compute_advantages(outcomes, advantage_estimator, **parameters).astype(np.float64)
    terms = turn_terms(turn_rewards, advantage_estimator, gamma, baseline, turn_coef)
    return [advantage + term for advantage, term in zip(of_outcome, terms, strict=True)]


def turn_terms(
    turn_rewards: TurnRewards,
    estimator: str,
    gamma: float,
    baseline: str,
    turn_coef: float = 1.0,
    parameters: Mapping[str, Any] | None = None,
) -> list[Float[np.ndarray, " T"]]:
    """Returns the part of `turn_advantages` that differs between the turns of a trajectory: all of it for an estimator
    of `BY_RETURN`, and the term of the rewards before the last for others."""
    longest = max(map(len, turn_rewards))
    rewards = np.zeros((len(turn_rewards), longest))
    for row, given in zip(rewards, turn_rewards, strict=True):
        row[: len(given)] = [np.nan if reward is None else reward for reward in given]
    reached = np.arange(longest) < np.array([[len(row)] for row in turn_rewards])
    if estimator not in BY_RETURN:
        last = np.arange(longest) == reached.sum(axis=1, keepdims=True) - 1
        rewards = np.where(last & np.isfinite(rewards), 0.0, rewards)
    returns = rewards_to_go(rewards, gamma)
    terms = _centred(returns, reached, baseline)
    if estimator in ("grpo", "drgrpo"):
        known = np.isfinite(returns).sum(axis=0)
        terms = terms * (known - 1) / np.maximum(known, 1)
    if estimator == "grpo":
        terms = _standardised(terms, returns[:, 0], **(parameters or {}))
    if estimator not in BY_RETURN:
        terms = turn_coef * terms
    return [row[: len(given)] for row, given in zip(terms, turn_rewards, strict=True)]


def rewards_to_go(rewards: Float[np.ndarray, "G T"], gamma: float) -> Float[np.ndarray, "G T"]:
    """Returns `R_i,t`; NaN up to a reward of NaN."""
    returns = np.zeros_like(rewards)
    following = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * following
        returns[:, t] = following
    return returns


def _centred(
    returns: Float[np.ndarray, "G T"], reached: Bool[np.ndarray, "G T"], baseline: str
) -> Float[np.ndarray, "G T"]:
    """Returns `R_i,t - b_i,t`; 0 where it is not known. With `fixed_index`, also 0 if no other return is known."""
    known = np.isfinite(returns)
    counted = known if baseline == "fixed_index" else known & reached
    values = np.where(counted, returns, 0.0)
    others = counted.sum(axis=0) - counted
    # Relative to the largest return, so that equal returns give exactly 0.
    top = np.where(counted, returns, -np.inf).max(axis=0, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    shifted = np.where(counted, values - top, 0.0)
    means = top + (shifted.sum(axis=0) - shifted) / np.maximum(others, 1)
    alone = 0.0 if baseline == "reached" else returns
    return np.where(known & reached, returns - np.where(others > 0, means, alone), 0.0)


def _standardised(
    advantages: Float[np.ndarray, "G T"], returns: Float[np.ndarray, "G"], ddof: int = 1
) -> Float[np.ndarray, "G T"]:
    """Divides by the standard deviation of the returns of whole trajectories; 0 if they are equal."""
    known = returns[np.isfinite(returns)]
    if len(known) < 2 or np.ptp(known) == 0:
        return np.zeros_like(advantages)
    return advantages / (known.std(ddof=ddof) + 1e-6)


def _check(turn_rewards: TurnRewards, estimator: str, gamma: float, baseline: str) -> None:
    if estimator in NOT_BY_TURN:
        raise UserError(f"advantage_estimator: '{estimator}' has no advantages of turns; use rloo, grpo or drgrpo.")
    if baseline not in BASELINES:
        raise UserError(f"baseline: got {baseline!r}. {nearest(str(baseline), BASELINES)}")
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma: got {gamma}; it must be from 0 to 1.")
    if len(turn_rewards) < 2:
        raise UserError("turn_rewards: give the rewards of at least two trajectories; one has no baseline.")
    for number, row in enumerate(turn_rewards):
        if not len(row):
            raise UserError(f"turn_rewards[{number}]: the trajectory has no turns.")
        for turn, reward in enumerate(row):
            if reward is not None and not np.isfinite(reward):
                raise UserError(f"turn_rewards[{number}][{turn}]: got {reward}; give a finite number, or None.")
