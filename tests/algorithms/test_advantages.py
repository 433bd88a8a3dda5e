"""Tests every advantage estimator against its definition in float64, its population weight, and its invariants.

`test_order_statistics.py` tests the max@K estimators against all subsets of a group and against the gradients that they
estimate without bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tunix_like.algorithms.advantages import compute_advantages, gdpo, sum_of_normalised
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS, find_estimator

from .oracles import (
    EVERY,
    NAN,
    SPEAKS_OF_CONSTANT,
    assert_close,
    definition,
    estimate,
    every,
    every_some_slow,
    kinds_of_groups,
    least_scored,
    taken,
)

# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "name", "params", "expected", "atol"),
    [
        ([1, 0, 0, 0], "maxrl", {}, [3, -1, -1, -1], 0),
        ([1, 0, 0, 0], "maxpo", {"k": 2}, [2, -2 / 3, -2 / 3, -2 / 3], 1e-6),
        ([1, 2, 3, 4, 5], "maxpo", {"k": 2}, 2 * np.array([-0.8333, -0.8333, -0.4167, 0.4167, 1.6667]), 2e-4),
        ([1, 2, 3, 4, 5], "maxpo", {"k": 3}, 3 * np.array([-0.4167, -0.4167, -0.4167, 0, 1.25]), 3e-4),
        ([1, 0, 1, 0, 0, 1, 0, 0], "maxpo", {"k": 4}, np.where([1, 0, 1, 0, 0, 1, 0, 0], 4 / 7, -4 * 0.6 / 7), 1e-6),
        ([1, 0], "grpo", {}, [0.70710678, -0.70710678], 2e-6),
        ([1, 0], "grpo", {"ddof": 0}, [1, -1], 4e-6),
        ([4, 1, 1], "rloo", {}, [3, -1.5, -1.5], 0),
        ([4, 1, 1], "drgrpo", {}, [2, -1, -1], 0),
        ([1, 1, 0, 0], "maxrl", {"truncation_order": 1}, [2 / 3, 2 / 3, -2 / 3, -2 / 3], 1e-6),
        ([3, -1, 0.5], "pkpo", {"k": 1}, [3, -1, 0.5], 0),  # the advantage equals the reward
        ([3, 1, 0], "pkpo", {"k": 2}, 2 * np.array([2.5, 0.5, 0]), 1e-6),  # 3 adds 2 to 1 and 3 to 0
        ([3, 1, 0], "pkpo", {"k": 3}, [6, 0, 0], 1e-6),
        ([1, 0, 0, 0], "passk", {"k": 2}, [1, -1 / 3, -1 / 3, -1 / 3], 3e-6),  # V 1/2, q 1 and 1/3, deviation 1/2
    ],
)
def test_values_computed_by_hand(rewards, name, params, expected, atol):
    np.testing.assert_allclose(compute_advantages(rewards, name, **params), expected, rtol=0, atol=atol)


def test_values_computed_by_hand_of_estimators_with_lengths():
    found = compute_advantages([4, 1, 1], "opo", lengths=[1, 2, 3])
    np.testing.assert_allclose(found, np.array([4, 1, 1]) - 9 / 6, rtol=0, atol=1e-6)
    # Tokens: 0.5 once, -0.5 three times, 0 twice. Mean -1/6, sum of squares 1, variance (1 - 6/36) / 5 = 1/6.
    found = compute_advantages([[1, 0], [1, 1]], "reinforce_pp", lengths=[[1, 3], [2, 0]])
    centred = np.array([[0.5, -0.5], [0, 0]])
    np.testing.assert_allclose(found, (centred + 1 / 6) * math.sqrt(6), rtol=0, atol=1e-6)


def unlike_lengths(groups: np.ndarray) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 9, groups.shape)


@every
def test_advantages_match_the_definition(name, params):
    groups = taken(name, params, kinds_of_groups(6))
    lengths = unlike_lengths(groups)
    lengths[::5] = 0
    assert_close(estimate(groups, name, lengths, **params), definition(name, params, groups, lengths))


@pytest.mark.parametrize("lengths", [np.zeros((1, 3), int), np.array([[0, 1, 0]])])
def test_reinforce_pp_of_fewer_than_two_tokens_is_zero(lengths):
    assert not estimate(np.array([[1.0, 2.0, 4.0]]), "reinforce_pp", lengths).any()


def test_reinforce_pp_has_mean_zero_and_variance_one_over_the_tokens_of_the_batch():
    groups = kinds_of_groups(6)
    lengths = unlike_lengths(groups)
    tokens = np.repeat(estimate(groups, "reinforce_pp", lengths).astype(np.float64), lengths.ravel())
    assert abs(tokens.mean()) < 1e-5
    assert np.std(tokens, ddof=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        ([[1e15] + [-1e15] * 7], [[5] + [0] * 7], [[0] + [NAN] * 7]),  # every token has the same huge reward
        ([[1e15, -1e15], [1, 1]], [[0, 0], [5, 5]], [[NAN, NAN], [0, 0]]),  # the huge rewards have no token
        ([[1e15, -1e15], [1e-45, 0]], [[2**29, 2**29], [1, 1]], [[1, -1], [0, 0]]),  # sums of squares beyond float32
    ],
)
def test_reinforce_pp_of_huge_rewards(rewards, lengths, expected):
    """Advantages are finite, and match the expected values where there are tokens (NaN: no tokens)."""
    found = compute_advantages(rewards, "reinforce_pp", lengths=lengths)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.where(np.isnan(expected), NAN, found), expected, rtol=0, atol=1e-5)


@every
def test_compiled_advantages_of_one_group_and_of_many_groups_match_the_definition(name, params):
    """`[G]` and `[groups, G]` rewards, compiled, give the values that the other tests compare with the definitions."""
    groups = taken(name, params, kinds_of_groups(6, 4))
    groups[4:7, 2:4] = NAN
    lengths = unlike_lengths(groups)
    many = compute_advantages(groups, name, lengths=lengths, **params)
    np.testing.assert_allclose(many, estimate(groups, name, lengths, **params), rtol=1e-5, atol=2e-6)
    one = compute_advantages(groups[3].tolist(), name, lengths=lengths[3], **params)
    assert many.shape == groups.shape and one.shape == (6,)
    assert many.dtype == one.dtype == np.float32
    if name not in ("reinforce_pp", "gdpo"):  # they normalise over the batch
        np.testing.assert_allclose(one, many[3], rtol=0, atol=1e-6)


def test_missing_lengths_are_one_token():
    for name in ("opo", "reinforce_pp"):
        found = compute_advantages([[2.0, 0.5, 0.0], [1.0, 1.0, 4.0]], name)
        np.testing.assert_array_equal(
            found, compute_advantages([[2.0, 0.5, 0.0], [1.0, 1.0, 4.0]], name, lengths=np.ones((2, 3), int))
        )


def test_rewards_of_none_are_unscored():
    np.testing.assert_array_equal(compute_advantages([None, 1.0, 0.0], "drgrpo"), [0.0, 0.5, -0.5])


# --- population weights -----------------------------------------------------------------------------------------------

PASS_RATES = (0.05, 0.3, 0.5, 0.9)


def population_weight(advantages: np.ndarray, p: float) -> float:
    """Returns `w(p)` of `E[gradient] = w(p) grad p`, given the advantages of the groups whose first `j = 0..G`
    completions succeed.

    `w(p) = E_j[j A_succ(j) / (G p) - (G-j) A_fail(j) / (G (1-p))]`.
    """
    size = advantages.shape[1]
    total = 0.0
    for j, row in enumerate(advantages.astype(np.float64)):
        chance = math.comb(size, j) * p**j * (1 - p) ** (size - j)
        total += chance * (row[:j].sum() / (size * p) - row[j:].sum() / (size * (1 - p)))
    return total


def staircase(size: int) -> np.ndarray:
    return np.tri(size + 1, size, -1)


def grpo_weight(size: int, p: float, ddof: int) -> float:
    chances = [math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(size + 1)]
    root = sum(chance * math.sqrt(c * (size - c)) for c, chance in enumerate(chances))
    return root / (size * p * (1 - p)) * (math.sqrt((size - 1) / size) if ddof else 1.0)


Weight = Callable[[int, float], float]


def weights_stated(size: int) -> list[tuple[str, dict[str, Any], Weight]]:
    plain: list[tuple[str, dict[str, Any], Weight]] = [
        ("grpo", {"ddof": 0}, lambda size, p: grpo_weight(size, p, 0)),
        ("grpo", {}, lambda size, p: grpo_weight(size, p, 1)),
        ("drgrpo", {}, lambda size, p: (size - 1) / size),
        ("opo", {}, lambda size, p: (size - 1) / size),  # completions of equal length
        ("rloo", {}, lambda size, p: 1.0),
        ("maxrl", {}, lambda size, p: (1 - (1 - p) ** (size - 1)) / p),
    ]
    for k in range(1, size + 1):
        plain.append(("pkpo", {"k": k}, lambda size, p, k=k: k * (1 - p) ** (k - 1)))
    for k in range(1, size):
        plain.append(("maxpo", {"k": k}, lambda size, p, k=k: k * (1 - p) ** (k - 1)))
        plain.append(("maxrl", {"truncation_order": k}, lambda size, p, k=k: (1 - (1 - p) ** k) / p))
    return plain


@pytest.mark.parametrize("size", [2, 6])
def test_population_weight(size):
    for name, params, weight in weights_stated(size):
        advantages = estimate(staircase(size), name, **params)
        found = [population_weight(advantages, p) for p in PASS_RATES]
        expected = [weight(size, p) for p in PASS_RATES]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6, err_msg=f"{name} {params}")


@pytest.mark.parametrize("size", [2, 6])
def test_equations_9_and_10_have_order_group_size_and_algorithm_1_has_one_less(size):
    """The equations give the advantages `G r_i / c` under the mean over the group. Algorithm 1 subtracts 1, also where
    `c = 0`."""
    successes = staircase(size).sum(axis=1, keepdims=True)
    equation_9 = size * staircase(size) / np.maximum(successes, 1)
    algorithm_1 = estimate(staircase(size), "maxrl")
    np.testing.assert_allclose(algorithm_1[1:], equation_9[1:] - 1, rtol=0, atol=1e-5)
    for p in PASS_RATES:
        for advantages, order in ((equation_9, size), (equation_9 - 1, size), (algorithm_1, size - 1)):
            assert population_weight(advantages, p) == pytest.approx((1 - (1 - p) ** order) / p, rel=2e-5)


# --- invariants for any rewards ---------------------------------------------------------------------------------------

LARGEST = float(np.float32(1e15))
SIZES = st.sampled_from([1, 6])  # a smaller group is a group of 6 with unscored completions


def groups_of(size: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    """Draws groups of distinct values, of few values, and constant groups. Any completion may be unscored."""
    few = st.lists(values, min_size=1, max_size=2).flatmap(
        lambda found: st.lists(st.sampled_from([*found, NAN]), min_size=size, max_size=size)
    )
    constant = st.tuples(values, st.lists(st.booleans(), min_size=size, max_size=size)).map(
        lambda found: [found[0] if scored else NAN for scored in found[1]]
    )
    return st.one_of(st.lists(values, min_size=size, max_size=size), few, constant, values.map(lambda v: [v] * size))


def batches(values: st.SearchStrategy[float], shortest: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Draws rewards `[P, G]` and lengths."""

    def of_size(size: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
        length = st.one_of(st.integers(shortest, 5), st.just(100_000))
        lengths = st.lists(length, min_size=size, max_size=size)
        groups = st.lists(st.tuples(groups_of(size, values), lengths), min_size=1, max_size=8)
        return groups.map(lambda found: (np.array([g for g, _ in found]), np.array([n for _, n in found])))

    return SIZES.flatmap(of_size)


wild = batches(
    st.one_of(
        st.floats(-LARGEST, LARGEST, width=32),
        st.sampled_from([0.0, 1.0, -1.0, 0.7, LARGEST, -LARGEST, 1e-45, 1e-38, -1e-30, 999.9])
        .map(np.float32)
        .map(float),
    ),
    shortest=0,
)
"""Rewards of any magnitude from subnormal to 1e15, and lengths that may be 0."""

mild = batches(st.integers(-8, 8).map(float), shortest=1)
"""Rewards whose sums, shifts and products are exact in float32, so that only the estimator rounds."""


@every_some_slow
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(batch=wild)
def test_invariants_hold_for_any_rewards(name, params, batch):
    """Advantages are finite, 0 for unscored completions and dropped groups, exactly 0 for equal rewards, and sum to
    zero."""
    rewards, lengths = batch
    rewards = taken(name, params, rewards)
    values = estimate(rewards, name, lengths, **params).astype(np.float64)
    assert np.isfinite(values).all()
    assert (values[np.isnan(rewards)] == 0).all()
    for group, row, length in zip(rewards, values, lengths, strict=True):
        scored = ~np.isnan(group)
        if scored.sum() < least_scored(name, params):
            assert not row.any()
        elif (name, params) not in SPEAKS_OF_CONSTANT and np.ptp(group[scored]) == 0:
            assert not row.any(), "a constant group"
        size = np.abs(row).max()
        for reward in set(group[scored]):
            assert np.ptp(row[group == reward]) <= 1e-5 * size, "equal rewards"
        if name not in ("pkpo", "opo", "reinforce_pp"):
            assert abs(row.sum()) <= 1e-5 * size + 1e-30, "the sum"
        if name == "opo" and length[scored].any():
            assert abs(row @ length) <= 1e-5 * size * length.sum() + 1e-30, "the sum over tokens"


@every_some_slow
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(batch=mild, seed=st.integers(0, 99), shift=st.integers(1, 64), scale=st.sampled_from([0.5, 3.0, 1000.0]))
def test_permutation_shift_and_scale_of_rewards(name, params, batch, seed, shift, scale):
    """A permutation of the rewards permutes the advantages. A shift changes nothing and a factor scales them, with
    exceptions by definition: Algorithm 1, grpo, gdpo and reinforce_pp cancel a factor (up to the small number in a
    divisor), and Algorithm 1, pkpo at k = 1 and passk do not depend on differences only."""
    rewards, lengths = batch
    rewards = taken(name, params, rewards)
    values = estimate(rewards, name, lengths, **params).astype(np.float64)

    order = np.random.default_rng(seed).permutation(rewards.shape[1])
    permuted = estimate(rewards[::-1, order], name, lengths[::-1, order], **params)
    assert_close(permuted, values[::-1, order], 2e-5)
    if name == "passk":
        return
    algorithm_1 = (name, params) == ("maxrl", {})
    if not algorithm_1 and (name, params) != ("pkpo", {"k": 1}):
        assert_close(estimate(rewards + shift, name, lengths, **params), values, 2e-5)
    cancels = algorithm_1 or name in ("grpo", "reinforce_pp", "gdpo")
    if name == "reinforce_pp":  # a factor cancels up to the 1e-8 that is added to the variance over tokens
        tokens = np.repeat((rewards - np.nanmean(rewards, axis=1, keepdims=True)).reshape(-1), lengths.reshape(-1))
        assume(np.nanvar(tokens) * min(scale, 1) ** 2 > 1e-4 or not np.nanvar(tokens))
    scaled = estimate(scale * rewards, name, lengths, **params)
    assert_close(scaled, values if cancels else scale * values, 1e-3 if name == "reinforce_pp" else 2e-5)


def trl_normalise_then_sum(rewards, weights):
    """Implements `multi_objective_aggregation="normalize_then_sum"` of `grpo_trainer.py` in TRL in NumPy, with 1e-6 in
    place of 1e-4, and for rewards `[R, P, G]`. NaN is the reward of a function that does not apply."""
    mean, deviation = (f(rewards, axis=2, keepdims=True, **k) for f, k in ((np.nanmean, {}), (np.nanstd, {"ddof": 1})))
    total = np.nansum(np.reshape(weights, (-1, 1, 1)) * (rewards - mean) / (deviation + 1e-6), axis=0)
    total[np.isnan(rewards).all(axis=0)] = np.nan
    return (total - np.nanmean(total)) / (np.nanstd(total, ddof=1) + 1e-6)


def test_gdpo_of_several_reward_functions_equals_that_of_trl():
    """Small and huge rewards count by their weights alone, constant groups get 0, a function that does not apply to a
    completion adds nothing to it, and a completion to which none applies is unscored."""
    rng = np.random.default_rng(0)
    rewards = np.stack([rng.normal(size=(5, 4)), 1e6 * rng.integers(0, 2, (5, 4)), 0.1 * rng.integers(0, 3, (5, 4))])
    rewards[:, 2], rewards[:, 1, 3] = np.array([0.1, 1e6, 0.3])[:, None], np.nan
    rewards[0, 0, 1] = rewards[1, 3, :2] = rewards[2, 4, 0] = np.nan
    weights, scored = [1.0, 0.5, -2.0], ~np.isnan(rewards).all(axis=0)
    expected = np.nan_to_num(trl_normalise_then_sum(rewards, weights))
    sums = sum_of_normalised(rewards, weights, scored)
    assert np.argwhere(np.isnan(sums)).tolist() == [[1, 3]] and (sums[2] == 0).all()
    found = gdpo(
        jnp.asarray(np.nan_to_num(sums), jnp.float32), scored=jnp.asarray(scored), lengths=jnp.ones((5, 4), int)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (np.asarray(found)[2] == 0).all() and np.abs(expected).max() > 1
    failed = scored & (np.arange(4) != 2)  # a completion for which a function failed counts in no statistic
    np.testing.assert_array_equal(
        sum_of_normalised(rewards, weights, failed),
        sum_of_normalised(np.where(failed, rewards, np.nan), weights, failed),
    )


@pytest.mark.parametrize("name", ["maxrl", "pkpo", "passk"])
def test_estimators_that_a_shift_of_rewards_changes(name):
    """Shows that the exceptions of the test above are needed: `m`, the reward itself and `V` are not differences."""
    params = {"maxrl": {}, "pkpo": {"k": 1}, "passk": {"k": 1}}[name]
    rewards = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]])
    assert np.abs(estimate(rewards + 2, name, **params) - estimate(rewards, name, **params)).max() > 0.1


@every
def test_offsets_cost_no_digits(name, params):
    """Rewards near 1e6 and 1e12, and differences of 2e-6, give the advantages of the same rewards without the offset.
    For the other estimators the rewards are rounded to float32 before."""
    free = find_estimator(name).offset_free(params)
    rng = np.random.default_rng(0)
    for offset, rewards in ((1e6, rng.normal(size=(5, 6))), (0.5, rng.integers(0, 2, (5, 6)) * 2e-6), (1e12, EYES)):
        rewards = np.round(rewards, 3 if offset == 1e12 else 8)
        rewards[0, 2] = np.nan
        shifted = rewards + offset
        exact = shifted - np.nanmax(shifted, axis=1, keepdims=True)
        if free:
            found = compute_advantages(shifted, name, **params)
            expected = definition(name, params, exact, np.ones(exact.shape, int))
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-7)
            assert np.abs(found).max() > 0
    assert free == (name not in ("passk", "gdpo") and (name, params) not in READS_OFFSET)


EYES = 4.0 * (np.arange(6) > np.arange(1, 6)[:, None])
READS_OFFSET = (("maxrl", {}), ("pkpo", {"k": 1}))


def test_sums_of_equal_weights_are_equal():
    """Sums that float64 rounds differently are no signal."""
    rewards = np.array([[0.1 + 0.2, 0.3, 0.7 - 0.4, 0.3], [1e6 + 0.1 + 0.2, 1e6 + 0.3, 1e6 + 0.3, np.nan]])
    for name in ("grpo", "rloo", "maxrl"):
        assert not compute_advantages(rewards, name).any()


@every
def test_constant_group_has_advantages_of_exactly_zero(name, params):
    """The float32 mean of twelve times 0.7 is not 0.7, so the zero must not depend on rounding. Estimators that are
    registered with zero advantages for constant groups give exactly 0."""
    numbers = (0.0, 1.0) if name == "passk" else (0.7, 0.0, 1.0, 1e-3, 1234.567, 1e15)
    groups = np.array([[value] * 12 for value in numbers])
    holed = np.where(np.arange(12) == 1, NAN, groups)
    zeros = not estimate(groups, name, **params).any() and not estimate(holed, name, **params).any()
    mixed = np.concatenate([np.eye(12)[:1], groups])  # the mean of its tokens differs from those of a constant group
    mixed_lengths = np.ones(mixed.shape, int) + 4 * mixed.astype(int).clip(0, 1)
    zeros = zeros and not estimate(mixed, name, mixed_lengths, **params)[1:].any()
    assert zeros == find_estimator(name).zero_when_constant(params)
    assert zeros == ((name, params) not in SPEAKS_OF_CONSTANT)


def test_every_built_in_estimator_is_tested():
    assert {name for name, _ in EVERY} == {
        name
        for name, each in ADVANTAGE_ESTIMATORS.items()
        if each.function.__module__ == "tunix_like.algorithms.advantages"
    }


# --- unscored completions ---------------------------------------------------------------------------------------------


@every
def test_unscored_completions_do_not_change_the_other_advantages(name, params):
    """The scored completions of a group get the advantages that they would get alone, whatever values the unscored
    places contain. The group is dropped when too few are left, and an order is capped."""
    patterns = np.array(list(itertools.product([False, True], repeat=6)))
    groups = taken(name, params, np.abs(kinds_of_groups(6)))
    groups, lengths = np.where(patterns, groups, NAN), unlike_lengths(patterns)
    values = estimate(groups, name, lengths, **params)
    assert_close(values, definition(name, params, groups, lengths))
    assert (values[~patterns] == 0).all()
    least = find_estimator(name).least_scored(params)
    assert least == least_scored(name, params)
    found = patterns.sum(axis=1)
    assert not values[found < least].any()
    assert values[found == least + (name == "passk" and params["k"] > 1)].any()  # n = k: kept, one subset
    if name == "gdpo":  # the input of its function
        groups = sum_of_normalised(groups[None], [1.0], patterns)
    for other in (7e14, -1e15, math.inf, NAN):
        filled = np.where(patterns, groups, other)
        again = find_estimator(name).function(
            jnp.asarray(filled, jnp.float32), scored=jnp.asarray(patterns), lengths=jnp.asarray(lengths), **params
        )
        np.testing.assert_allclose(again, values, rtol=1e-6, atol=1e-7)
