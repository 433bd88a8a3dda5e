"""Advantages of turns: each turn of a trajectory is credited with the rewards from it on, not with all of them.

A trajectory `i` of a group has the turns `t = 1..T_i` with rewards `r_i,t`. Its reward-to-go is
`R_i,t = sum_{s >= t} gamma^(s-t) r_i,s`, and 0 after its end. The tokens of a turn get `A_i,t = R_i,t - b_i,t`. As
`b_i,t` is a function of the other trajectories alone, `E[sum_t A_i,t grad log pi(turn t)]` is the gradient of the
expected sum of the rewards if `gamma` is 1. With `gamma < 1` it is `E[sum_t R_i,t grad log pi(turn t)]`, in which a
reward counts less for earlier turns; that is the gradient of no objective. (Times `gamma^(t-1)` it would be that of the
discounted sum, in which late turns hardly learn.)

A baseline over the trajectories that reach turn t, with `i` among them, is biased: the number of its terms depends on
whether `i` stops. `tests/algorithms/test_turns.py` enumerates all of this.

Potentials (Ng, Harada and Russell, 1999) add `gamma Phi(s_t+1) - Phi(s_t)` to `r_i,t`, with `Phi = 0` after the end, so
`R_i,t` becomes `R_i,t - Phi(s_t)`. As `s_t` is known before turn t, this changes the variance, not the expectation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.registry import check_parameters
from tunix_like.errors import UserError, nearest

BASELINES = ("fixed_index", "reached", "state")
BY_RETURN = ("rloo", "grpo", "drgrpo")
"""Estimators whose advantage of a turn is that of its reward-to-go."""
NOT_BY_TURN = ("otb", "opo", "reinforce_pp", "gdpo", "distillation")
"""Estimators that have advantages of tokens themselves, that read more than the rewards of a group's completions, or
that have no rewards."""
BY_CRITIC = "ppo"
"""The critic of this estimator gets the reward of each turn at its last token; it has no function of a group."""

TurnRewards = Sequence[Sequence[float | None]]


class GroupTurns(NamedTuple):
    """The turns of the trajectories of one group: a list per trajectory, with one entry per turn.

    Attributes:
      rewards: after the turn; None: it could not be scored.
      potentials: of the states in which the turns begin; None: all 0.
      states: keys of these states; None: not known. An entry None is the common start in the first turn, and later a
        state that is not known.
    """

    rewards: TurnRewards
    potentials: Sequence[Sequence[float]] | None = None
    states: Sequence[Sequence[Hashable]] | None = None


def turn_advantages(
    turn_rewards: TurnRewards,
    advantage_estimator: str = "rloo",
    gamma: float = 1.0,
    baseline: str = "fixed_index",
    *,
    turn_coef: float = 1.0,
    potentials: Sequence[Sequence[float]] | None = None,
    states: Sequence[Sequence[Hashable]] | None = None,
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
        `reached`: the mean over the others that reach t, and 0 if none does. `state`: the mean over the turns of the
        others that begin in an equal state, and that of `fixed_index` if there is none.
      potentials: Phi of the state in which each turn begins.
      states: keys of these states, for the baseline `state`. None is the common start in the first turn, and later
        equal to no other state.
      parameters: those of the estimator, such as `k` of `maxpo`.

    Raises:
      UserError: an argument is wrong, or the estimator has no advantages of turns.
    """
    turns = GroupTurns(turn_rewards, potentials, states)
    _check(turns, advantage_estimator, gamma, baseline)
    parameters = check_parameters(advantage_estimator, parameters, len(turn_rewards))
    if advantage_estimator in BY_RETURN:
        return turn_terms(turns, advantage_estimator, gamma, baseline, parameters=parameters)
    outcomes = np.array([np.nan if row[-1] is None else row[-1] for row in turn_rewards])
    of_outcome = compute_advantages(outcomes, advantage_estimator, **parameters).astype(np.float64)
    terms = turn_terms(turns, advantage_estimator, gamma, baseline, turn_coef)
    return [advantage + term for advantage, term in zip(of_outcome, terms, strict=True)]


def turn_terms(
    turns: GroupTurns,
    estimator: str,
    gamma: float,
    baseline: str,
    turn_coef: float = 1.0,
    parameters: Mapping[str, Any] | None = None,
) -> list[Float[np.ndarray, " T"]]:
    """Returns the part of `turn_advantages` that differs between the turns of a trajectory: all of it for an estimator
    of `BY_RETURN`, and the term of the rewards before the last, and of the potentials, for others."""
    rewards = _padded([[np.nan if reward is None else reward for reward in row] for row in turns.rewards])
    lengths = np.array([len(row) for row in turns.rewards])
    reached = np.arange(rewards.shape[1]) < lengths[:, None]
    if estimator not in BY_RETURN:
        last = np.arange(rewards.shape[1]) == lengths[:, None] - 1
        rewards = np.where(last & np.isfinite(rewards), 0.0, rewards)
    returns = rewards_to_go(rewards, gamma)
    if turns.potentials is not None:
        returns = returns - _padded(turns.potentials)
    means = _means_of_others(returns, reached, baseline, turns.states)
    terms = np.where(np.isfinite(returns) & reached, returns - means, 0.0)
    if estimator in ("grpo", "drgrpo"):
        known = np.isfinite(returns).sum(axis=0)
        terms = terms * (known - 1) / np.maximum(known, 1)
    if estimator == "grpo":
        terms = _standardised(terms, returns[:, 0], **(parameters or {}))
    if estimator not in BY_RETURN:
        terms = turn_coef * terms
    return [row[:length] for row, length in zip(terms, lengths, strict=True)]


def _padded(rows: Sequence[Sequence[float]]) -> Float[np.ndarray, "G T"]:
    out = np.zeros((len(rows), max(map(len, rows))))
    for row, given in zip(out, rows, strict=True):
        row[: len(given)] = given
    return out


def rewards_to_go(rewards: Float[np.ndarray, "G T"], gamma: float) -> Float[np.ndarray, "G T"]:
    """Returns `R_i,t`; NaN up to a reward of NaN."""
    returns = np.zeros_like(rewards)
    following = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * following
        returns[:, t] = following
    return returns


def _means_of_others(
    returns: Float[np.ndarray, "G T"],
    reached: Bool[np.ndarray, "G T"],
    baseline: str,
    states: Sequence[Sequence[Hashable]] | None,
) -> Float[np.ndarray, "G T"]:
    """Returns the baselines. If no other return is known, that of `fixed_index` is the own return (the advantage is
    then 0), and that of `reached` is 0."""
    known = np.isfinite(returns)
    index = np.broadcast_to(np.arange(returns.shape[1]), returns.shape)
    if baseline == "reached":
        return np.nan_to_num(_means_by_key(returns, known & reached, index))
    means = _means_by_key(returns, known, index)
    if baseline == "state":
        assert states is not None
        numbers = dict[Hashable, int]()
        keys = np.zeros(returns.shape, int)
        for i, given in enumerate(states):
            for t, state in enumerate(given):
                own = (i, t) if state is None and t else state
                keys[i, t] = numbers.setdefault((own, state is None), len(numbers))
        of_states = _means_by_key(returns, known & reached, keys)
        means = np.where(np.isnan(of_states), means, of_states)
    return np.where(np.isnan(means), returns, means)


def _means_by_key(
    returns: Float[np.ndarray, "G T"], counted: Bool[np.ndarray, "G T"], keys: Int[np.ndarray, "G T"]
) -> Float[np.ndarray, "G T"]:
    """Returns for each entry the mean over the `counted` entries of other rows with the same key; NaN without one."""
    rows = np.broadcast_to(np.arange(len(keys))[:, None], keys.shape)
    # Relative to the largest return of a key, so that equal returns give exactly their value.
    top = np.full(keys.max() + 1, -np.inf)
    np.maximum.at(top, keys[counted], returns[counted])
    top = np.where(np.isfinite(top), top, 0.0)
    sums = np.zeros((len(keys), len(top)))
    counts = np.zeros((len(keys), len(top)))
    np.add.at(sums, (rows[counted], keys[counted]), (returns - top[keys])[counted])
    np.add.at(counts, (rows[counted], keys[counted]), 1)
    others = (counts.sum(axis=0) - counts)[rows, keys]
    means = top[keys] + (sums.sum(axis=0) - sums)[rows, keys] / np.maximum(others, 1)
    return np.where(others > 0, means, np.nan)


def _standardised(
    advantages: Float[np.ndarray, "G T"], returns: Float[np.ndarray, "G"], ddof: int = 1
) -> Float[np.ndarray, "G T"]:
    """Divides by the standard deviation of the returns of whole trajectories; 0 if they are equal."""
    known = returns[np.isfinite(returns)]
    if len(known) < 2 or np.ptp(known) == 0:
        return np.zeros_like(advantages)
    return advantages / (known.std(ddof=ddof) + 1e-6)


def _check(turns: GroupTurns, estimator: str, gamma: float, baseline: str) -> None:
    if estimator in (*NOT_BY_TURN, BY_CRITIC):
        raise UserError(
            f"advantage_estimator: '{estimator}' has no advantages of turns here; use another, such as rloo or maxrl."
        )
    if baseline not in BASELINES:
        raise UserError(f"baseline: got {baseline!r}. {nearest(str(baseline), BASELINES)}")
    if baseline == "state" and turns.states is None:
        raise UserError("baseline: 'state' compares turns that begin in equal states; give their keys as states=...")
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma: got {gamma}; it must be from 0 to 1.")
    if len(turns.rewards) < 2:
        raise UserError("turn_rewards: give the rewards of at least two trajectories; one has no baseline.")
    for number, row in enumerate(turns.rewards):
        if not len(row):
            raise UserError(f"turn_rewards[{number}]: the trajectory has no turns.")
        for turn, reward in enumerate(row):
            if reward is not None and not np.isfinite(reward):
                raise UserError(f"turn_rewards[{number}][{turn}]: got {reward}; give a finite number, or None.")
    lengths = [len(row) for row in turns.rewards]
    for name in ("potentials", "states"):
        rows = getattr(turns, name)
        if rows is not None and [len(row) for row in rows] != lengths:
            raise UserError(f"{name}: give a list per trajectory with one entry per turn, as in turn_rewards.")
    if turns.potentials is not None and not all(np.isfinite(row).all() for row in turns.potentials):
        raise UserError("potentials: they must be finite numbers.")
