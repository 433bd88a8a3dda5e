"""Oracles of the advantage estimators: their definitions in float64, over all subsets of a group and by enumeration.

The oracles compute max@K as a mean over subsets, and the gradient of an objective as a sum over all outcomes.
`by_ranks` sorts the rewards instead. It serves groups that are too large to enumerate their subsets, and is itself
tested against the enumeration.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from math import comb
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms.advantages import sum_of_normalised
from tunix_like.algorithms.registry import find_estimator

NAN = float("nan")

EVERY: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"ddof": 0}),
    ("drgrpo", {}),
    ("rloo", {}),
    ("maxrl", {}),
    ("maxrl", {"truncation_order": 3}),
    ("maxpo", {"k": 1}),
    ("maxpo", {"k": 3}),
    ("pkpo", {"k": 1}),
    ("pkpo", {"k": 3}),
    ("passk", {"k": 1}),
    ("passk", {"k": 3}),
    ("maxk_mix", {"alpha": 0.5}),
    ("maxk_mix", {"coefficients": (1.0, 0.0, -0.5, 2.0)}),
    ("order_statistic", {"k": 3, "statistic": "median"}),
    ("order_statistic", {"k": 3, "weights": (0.5, -2.0, 1.0)}),
    ("opo", {}),
    ("reinforce_pp", {}),
    ("gdpo", {}),
]
IDS = ["-".join([n, *(f"{k}{v}" for k, v in p.items())]) for n, p in EVERY]
every = pytest.mark.parametrize(("name", "params"), EVERY, ids=IDS)

QUICK = ("grpo", "maxrl", "maxpo-k3", "pkpo-k3", "opo")
every_some_slow = pytest.mark.parametrize(
    ("name", "params"),
    [pytest.param(*each, marks=() if i in QUICK else pytest.mark.slow) for i, each in zip(IDS, EVERY, strict=True)],
    ids=IDS,
)
"""Like `every`, but plain `pytest` runs the test for the estimators in `QUICK` only."""

SPEAKS_OF_CONSTANT = (("pkpo", {"k": 1}), ("reinforce_pp", {}))
"""The estimators that give constant groups nonzero advantages."""


# --- the function under test ------------------------------------------------------------------------------------------


def estimate(
    rewards: np.ndarray, name: str, lengths: np.ndarray | None = None, rows: int = 64, **params: Any
) -> np.ndarray:
    """Runs the estimator on `[P, G]` rewards (NaN: unscored) without compilation of the whole function.

    The rewards are given in blocks of `rows` groups, filled with unscored groups, so that neither another parameter nor
    another `P` compiles anything. `test_advantages.py` tests the compiled `compute_advantages` against the same values.
    """
    count, size = rewards.shape
    if find_estimator(name).by_function:
        rewards = sum_of_normalised(rewards[None], [1.0], ~np.isnan(rewards))
    assert count <= rows or name not in ("reinforce_pp", "gdpo"), "it looks at the whole batch"
    padded, sizes = np.full((-(-count // rows) * rows, size), NAN), np.zeros((-(-count // rows) * rows, size), np.int32)
    padded[:count], sizes[:count] = rewards, 1 if lengths is None else lengths
    scored = ~np.isnan(padded)
    filled = np.where(scored, padded, 0.0).astype(np.float32)
    found = []
    for start in range(0, len(padded), rows):
        part = slice(start, start + rows)
        out = find_estimator(name).function(
            jnp.asarray(filled[part]), scored=jnp.asarray(scored[part]), lengths=jnp.asarray(sizes[part]), **params
        )
        assert out.shape == (rows, size) and out.dtype == jnp.float32, (out.shape, out.dtype)
        found.append(np.asarray(out))
    return np.concatenate(found)[:count]


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5, message: str = "") -> None:
    """Asserts that the difference is within `tolerance` times the largest advantage of each group."""
    bound = tolerance * np.abs(expected).max(axis=-1, keepdims=True) + 1e-12
    assert (np.abs(actual - expected) <= bound).all(), f"{message} off by {np.abs(actual - expected).max()}"


# --- rewards ----------------------------------------------------------------------------------------------------------


def kinds_of_groups(size: int, count: int = 16) -> np.ndarray:
    """Returns random groups `[4 * count, size]` in float32: real, with many ties, 0/1, and non-negative shaped
    rewards."""
    rng = np.random.default_rng(size)
    groups = [
        rng.normal(size=(count, size)),
        rng.integers(-1, 2, (count, size)),
        rng.integers(0, 2, (count, size)),
        rng.choice([0.0, 0.1, 1.1], (count, size)),
    ]
    return np.concatenate(groups).astype(np.float32).astype(np.float64)


def binary_groups(size: int) -> np.ndarray:
    """Returns all `2^size` groups of 0/1 rewards."""
    return np.array(list(itertools.product([0.0, 1.0], repeat=size)))


def taken(name: str, params: dict[str, Any], rewards: np.ndarray) -> np.ndarray:
    """Maps rewards to rewards of the same pattern that the estimator accepts."""
    if name == "passk":
        return np.where(np.isnan(rewards), NAN, (np.abs(rewards) > 0.5).astype(np.float64))
    return np.abs(rewards) if (name, params) == ("maxrl", {}) else rewards


# --- max@K of one group -----------------------------------------------------------------------------------------------


class Maxima(NamedTuple):
    """Mean maximum over the k-subsets that contain `i`, over all k-subsets, and over those without `i` (NaN: no such
    subset)."""

    with_i: np.ndarray
    of_all: float
    without_i: np.ndarray


@functools.cache
def subsets(size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the members `[S, k]` of all subsets, and `[S, size]` whether each completion is a member."""
    members = np.array(list(itertools.combinations(range(size), k)))
    return members, (members[:, :, None] == np.arange(size)).any(axis=1)


def over_subsets(rewards: np.ndarray, k: int) -> Maxima:
    if k == 0:
        return Maxima(np.full(len(rewards), NAN), 0.0, np.zeros(len(rewards)))
    members, holds = subsets(len(rewards), k)
    top = rewards[members].max(axis=1)
    without = np.full(len(rewards), NAN) if k == len(rewards) else (top @ ~holds) / (~holds).sum(axis=0)
    return Maxima((top @ holds) / holds.sum(axis=0), top.mean(), without)


@functools.cache
def shares(size: int, picked: int, total: int, drawn: int) -> np.ndarray:
    """Returns `C(m, picked) / C(total, drawn)` for `m = 0..size-1`, computed with integers."""
    found = [0] * min(picked, size)
    for m in range(picked, size):
        found.append(1 if m == picked else found[-1] * m // (m - picked))
    return np.array([each / comb(total, drawn) for each in found])


def by_ranks(rewards: np.ndarray, k: int) -> Maxima:
    """Computes the same values from how often each rank is the largest, for groups of any size."""
    if k == 0:
        return over_subsets(rewards, 0)
    n = len(rewards)
    order = np.argsort(rewards, kind="stable")
    x, back = rewards[order], np.argsort(order)

    def after(values: np.ndarray) -> np.ndarray:
        """Returns for each rank the sum over the ranks above it."""
        return np.append(np.cumsum(values[::-1])[::-1][1:], 0.0)

    with_i = x * shares(n, k - 1, n - 1, k - 1)
    if k > 1:
        with_i += after(x * np.append(0.0, shares(n - 1, k - 2, n - 1, k - 1)))
    without = np.full(n, NAN)
    if k < n:
        of_others = shares(n, k - 1, n - 1, k)
        without = np.append(0.0, np.cumsum(x * of_others)[:-1]) + after(x * np.append(0.0, of_others[:-1]))
    return Maxima(with_i[back], float((x * shares(n, k - 1, n, k)).sum()), without[back])


Statistic = Callable[[np.ndarray], np.ndarray]
"""Maps `[S, k]` rewards to a number per row."""


def by_weights(weights: Sequence[float]) -> Statistic:
    return lambda rows: -np.sort(-rows, axis=1) @ np.asarray(weights)


def increase(rewards: np.ndarray, k: int, statistic: Statistic) -> np.ndarray:
    """Returns the mean of the statistic over the k-subsets that contain `i`, minus that over the k-subsets without
    `i`."""
    members, holds = subsets(len(rewards), k)
    values = statistic(rewards[members])
    return (values @ holds) / holds.sum(axis=0) - (values @ ~holds) / (~holds).sum(axis=0)


def series(alpha: float, count: int) -> list[float]:
    """Returns the coefficients of `x^0 .. x^(count-1)` in `(1 - x)^-alpha`, the binomial series in integer steps."""
    return [math.prod(alpha + j for j in range(k)) / math.factorial(k) for k in range(count)]


# --- the definitions --------------------------------------------------------------------------------------------------

OfMaxima = Callable[[np.ndarray, int], Maxima]


def leave_two_out(rewards: np.ndarray, k: int, maxima: OfMaxima = over_subsets) -> np.ndarray:
    """Returns `L_k,i = q_i - V_k(-i)`."""
    found = maxima(rewards, k)
    return found.with_i - found.without_i


def least_scored(name: str, params: dict[str, Any]) -> int:
    """Returns the number of scored completions below which a group is dropped.

    A difference needs two completions, a subset k, and a subset without `i` k + 1.
    """
    if "coefficients" in params:  # the largest subset
        return max(2, 1 + max((k for k, c in enumerate(params["coefficients"], start=1) if c), default=1))
    beyond = {"maxpo": 1, "order_statistic": 1, "pkpo": 0, "passk": 0}
    return max(2, params["k"] + beyond[name]) if name in beyond else 2


def of_one_group(
    name: str, params: dict[str, Any], rewards: np.ndarray, lengths: np.ndarray, maxima: OfMaxima
) -> np.ndarray:
    """Returns the advantages of one group with enough scored completions, for every estimator except `reinforce_pp`."""
    size, mean, k = len(rewards), rewards.mean(), params.get("k", 0)
    low = rewards - rewards.max() if maxima is by_ranks else rewards  # float64 also loses differences far below 1
    if rewards.max() == rewards.min() and (name, params) != ("pkpo", {"k": 1}):
        return np.zeros(size)
    if name == "grpo":
        return (rewards - mean) / (np.std(rewards, ddof=params.get("ddof", 1)) + 1e-6)
    if name == "drgrpo":
        return rewards - mean
    if name == "rloo":
        return np.array([r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)])
    if name == "maxrl" and not params:
        return (rewards - mean) / mean if mean > 0 else np.zeros(size)
    if name == "maxrl":
        orders = range(1, min(params["truncation_order"], size - 1) + 1)
        return np.sum([leave_two_out(low, order, maxima) for order in orders], axis=0)
    if name == "maxpo":
        return k * leave_two_out(low, k, maxima)
    if name == "pkpo" and k > 1:
        return k * (maxima(low, k).with_i - maxima(low, k - 1).without_i)
    if name == "pkpo":
        return rewards
    if name == "passk":
        found, value = maxima(rewards - 1, k), maxima(rewards, k).of_all  # V - 1 and V are computed separately
        return (found.with_i - found.of_all) / (np.sqrt(value * -found.of_all) + 1e-6)
    if name == "maxk_mix":
        given = params.get("coefficients") or series(params["alpha"], size - 1)
        return sum(c * leave_two_out(low, order, maxima) for order, c in enumerate(given[: size - 1], start=1))
    if name == "order_statistic":
        median = params.get("statistic") == "median"
        return k * increase(
            rewards, k, (lambda rows: np.median(rows, axis=1)) if median else by_weights(params["weights"])
        )
    assert name == "opo", f"no definition of '{name}'"
    total = sum(int(length) for length in lengths)
    baseline = sum(w * r for w, r in zip(lengths, rewards, strict=True)) / total if total else mean
    return rewards - baseline


def whitened(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Defines `reinforce_pp`: the mean of the list of all tokens of the batch, and its variance with ddof 1."""
    centred, tokens = np.zeros(rewards.shape), []
    kept = ~np.isnan(rewards) & ((~np.isnan(rewards)).sum(axis=1, keepdims=True) >= 2)
    for group, row in enumerate(rewards):
        mean = np.mean(row[kept[group]]) if kept[group].any() else 0.0
        for i, reward in enumerate(row):
            if kept[group, i]:
                constant = np.ptp(row[kept[group]]) == 0
                centred[group, i] = 0.0 if constant else reward - mean
                tokens += [centred[group, i]] * int(lengths[group, i])
    if len(tokens) < 2:
        return np.zeros(rewards.shape)
    return np.where(kept, (centred - np.mean(tokens)) / np.sqrt(np.var(tokens, ddof=1) + 1e-8), 0.0)


def over_the_batch(sums: np.ndarray) -> np.ndarray:
    """Defines the last step of `gdpo`. The input is `[P, G]`, NaN where a completion does not count."""
    counted = sums[~np.isnan(sums)]
    if len(counted) < 2:
        return np.zeros(sums.shape)
    return np.nan_to_num((sums - counted.mean()) / (counted.std(ddof=1) + 1e-6))


def definition(
    name: str,
    params: dict[str, Any],
    rewards: np.ndarray,
    lengths: np.ndarray | None = None,
    maxima: OfMaxima = over_subsets,
) -> np.ndarray:
    """Returns the advantages `[P, G]` in float64, group by group, after removal of the unscored completions (NaN)."""
    sizes = np.ones(rewards.shape, int) if lengths is None else lengths
    if name == "reinforce_pp":
        return whitened(rewards, sizes)
    if name == "gdpo":
        kept = (~np.isnan(rewards)).sum(axis=1, keepdims=True) >= 2
        return over_the_batch(np.where(kept & ~np.isnan(rewards), definition("grpo", {}, rewards), NAN))
    out = np.zeros(rewards.shape)
    for row, group, length in zip(out, rewards, sizes, strict=True):
        scored = ~np.isnan(group)
        if scored.sum() >= least_scored(name, params):
            row[scored] = of_one_group(name, params, group[scored], length[scored], maxima)
    return out


# --- a bandit with three arms -----------------------------------------------------------------------------------------

ARMS = np.array([0.2, 0.5, 0.3])
SCORES = np.eye(3) - ARMS  # gradient of the log softmax for each arm
BINARY, REAL = np.array([1.0, 0.0, 0.0]), np.array([0.7, -1.2, 2.0])


def outcomes(draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all `3^draws` tuples of arms and their probabilities."""
    arms = np.array(list(itertools.product(range(3), repeat=draws)))
    return arms, ARMS[arms].prod(axis=1)


def expected_gradient(
    name: str, params: dict[str, Any], rewards: np.ndarray, size: int, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Returns `E[(1/G) sum_i A_i grad log pi(y_i)]` over all groups of a softmax bandit with three arms.

    Args:
      rewards: the reward of each arm.
      lengths: the length of each arm; ones if not given.
    """
    arms, chances = outcomes(size)
    values = estimate(rewards[arms], name, None if lengths is None else lengths[arms], **params)
    return np.einsum("n,ni,nid->d", chances, values.astype(np.float64), SCORES[arms]) / size


def gradient_of_max(rewards: np.ndarray, k: int) -> np.ndarray:
    """Returns the gradient of the expected maximum of k draws, by enumeration."""
    arms, chances = outcomes(k)
    return np.einsum("n,n,nid->d", chances, rewards[arms].max(axis=1), SCORES[arms])
