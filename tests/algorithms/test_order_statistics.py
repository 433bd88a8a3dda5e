"""Tests the max@K estimators against their definitions in float64: over all subsets of a group and over all outcomes of
a small bandit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .oracles import (
    ARMS,
    BINARY,
    REAL,
    SCORES,
    assert_close,
    binary_groups,
    by_ranks,
    definition,
    estimate,
    expected_gradient,
    gradient_of_max,
    kinds_of_groups,
    leave_two_out,
    outcomes,
    over_subsets,
)

# --- the oracle for large groups against all subsets ------------------------------------------------------------------


def test_oracle_by_ranks_matches_the_oracle_over_subsets():
    for rewards in (REAL, np.array([0.0, 1, 0, 1, 1, 0.5, -3]), np.array([2.0, 1.0])):
        for k in range(len(rewards) + 1):
            for ranks, every_subset in zip(by_ranks(rewards, k), over_subsets(rewards, k), strict=True):
                np.testing.assert_allclose(ranks, every_subset, rtol=0, atol=1e-12)


# --- closed forms are means over subsets ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 9))
def test_closed_forms_are_means_over_all_subsets(size):
    """Covers every k and every order, on real, tied, 0/1 and shaped rewards. A group of one gets zeros."""
    groups = kinds_of_groups(size)
    for k in range(1, size + 1):
        assert_close(estimate(groups, "pkpo", k=k), definition("pkpo", {"k": k}, groups), message=f"pkpo {k}")
    for k in range(1, size):
        assert_close(estimate(groups, "maxpo", k=k), definition("maxpo", {"k": k}, groups), message=f"maxpo {k}")
        order = {"truncation_order": k}
        assert_close(estimate(groups, "maxrl", **order), definition("maxrl", order, groups), message=f"order {k}")


@pytest.mark.parametrize("size", range(1, 9))
def test_passk_is_the_standardised_mean_over_all_subsets(size):
    """Covers all 0/1 groups and every k. `k = G` has one subset and gives zeros."""
    groups = binary_groups(size)
    for k in range(1, size + 1):
        assert_close(estimate(groups, "passk", k=k), definition("passk", {"k": k}, groups), message=f"passk {k}")
    assert not estimate(groups, "passk", k=size).any()


@pytest.mark.parametrize("size", [2, 5, 8])
def test_lowest_reward_has_advantage_zero_in_pkpo(size):
    """For pkpo with k >= 2 the completion with the lowest reward gets 0, because it improves no subset, and no
    completion gets a negative value."""
    groups = kinds_of_groups(size)
    least = groups == groups.min(axis=1, keepdims=True)
    for k in range(2, size + 1):
        values = estimate(groups, "pkpo", k=k)
        assert (values[least] == 0).all()
        assert (values >= -1e-6 * values.max(axis=1, keepdims=True)).all()
        assert k == size or (values[:16][~least[:16]] > 0).any()


@pytest.mark.parametrize("size", range(2, 9))
def test_algorithm_1_is_the_sum_over_all_orders(size):
    """Covers all 0/1 groups. The result also equals the highest order of the library."""
    groups = binary_groups(size)
    algorithm_1 = estimate(groups, "maxrl")
    assert_close(estimate(groups, "maxrl", truncation_order=size - 1), algorithm_1)
    assert_close(algorithm_1, np.array([sum(leave_two_out(g, k) for k in range(1, size)) for g in groups]))
    assert_close(algorithm_1, sum(estimate(groups, "maxpo", k=k).astype(np.float64) / k for k in range(1, size)))


def test_maxpo_with_k_1_is_rloo():
    groups = kinds_of_groups(7)
    assert_close(estimate(groups, "maxpo", k=1), estimate(groups, "rloo").astype(np.float64))


# --- the gradients that the estimators estimate without bias ----------------------------------------------------------

arms = pytest.mark.parametrize("rewards", [BINARY, REAL], ids=["binary", "real"])


@arms
@pytest.mark.parametrize("size", [2, 3, 5])
def test_rloo_ascends_the_expected_reward(size, rewards):
    found = expected_gradient("rloo", {}, rewards, size)
    np.testing.assert_allclose(found, gradient_of_max(rewards, 1), rtol=0, atol=1e-5)


@arms
@pytest.mark.parametrize("size", [2, 3, 5])
def test_drgrpo_and_opo_with_equal_lengths_ascend_the_scaled_expected_reward(size, rewards):
    """The factor is `(G-1)/G`, because the baseline contains the reward of the completion itself."""
    for name, lengths in (("drgrpo", None), ("opo", np.array([7, 7, 7])), ("opo", np.array([0, 0, 0]))):
        found = expected_gradient(name, {}, rewards, size, lengths)
        np.testing.assert_allclose(found, (size - 1) / size * gradient_of_max(rewards, 1), rtol=0, atol=1e-5)


def test_bias_of_opo_with_unequal_lengths_is_of_order_one_over_group_size():
    """The direction is biased too. `G` times the difference to the true gradient does not depend on `G`."""
    true, lengths = gradient_of_max(REAL, 1), np.array([1, 2, 4])
    off = []
    for size in (3, 5, 6):
        found = expected_gradient("opo", {}, REAL, size, lengths)
        off.append(size * np.linalg.norm(found - true))
        across = found - (found @ true) / (true @ true) * true
        assert np.linalg.norm(across) > 1e-2 * np.linalg.norm(true)
    np.testing.assert_allclose(off, off[0], rtol=0.05)


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_algorithm_1_ascends_the_likelihood_to_order_group_size_minus_1(size):
    """Equations 9 and 10 of the paper ascend one order higher: they keep a term for groups without a success, and
    algorithm 1 does not."""
    p, grad_p = ARMS[0], ARMS[0] * SCORES[0]

    def order(t: int) -> Any:
        return (1 - (1 - p) ** t) / p * grad_p

    drawn, chances = outcomes(size)
    equation_9, equation_10 = np.zeros(3), np.zeros(3)
    for group, chance in zip(drawn, chances, strict=True):
        scores, success = SCORES[group], BINARY[group]
        mean_of_successes = (success[:, None] * scores).sum(axis=0) / success.sum() if success.any() else np.zeros(3)
        equation_9 += chance * mean_of_successes
        equation_10 += chance * (mean_of_successes - scores.mean(axis=0))
    np.testing.assert_allclose(equation_9, order(size), rtol=0, atol=1e-12)
    np.testing.assert_allclose(equation_10, order(size), rtol=0, atol=1e-12)
    found = expected_gradient("maxrl", {}, BINARY, size)
    np.testing.assert_allclose(found, order(size - 1), rtol=0, atol=1e-5)
    assert np.abs(found - order(size)).max() > 1e-2, "and not to order group_size"


@arms
@pytest.mark.parametrize("size", [2, 5])
def test_truncated_maxrl_ascends_the_harmonic_sum_of_maxima(size, rewards):
    """For 0/1 rewards this is the log-likelihood series, truncated after that order."""
    p, grad_p = ARMS[0], ARMS[0] * SCORES[0]
    for order in range(1, size):
        expected = sum(gradient_of_max(rewards, k) / k for k in range(1, order + 1))
        if rewards is BINARY:
            np.testing.assert_allclose(expected, (1 - (1 - p) ** order) / p * grad_p, rtol=0, atol=1e-12)
        found = expected_gradient("maxrl", {"truncation_order": order}, rewards, size)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@arms
@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxpo_and_pkpo_ascend_max_at_k(size, rewards):
    for k in range(1, size + 1):
        expected = gradient_of_max(rewards, k)
        for name in ("maxpo", "pkpo") if k < size else ("pkpo",):
            found = expected_gradient(name, {"k": k}, rewards, size)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=f"{name} {k}")


# --- large groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 512, 1023])
def test_maxpo_on_a_large_group(k):
    """For G = 1024 and 0/1 rewards a success gets `k C(f, k) / C(G-1, k)`, computed with integers."""
    size, successes = 1024, 3
    rewards = (np.arange(size) < successes).astype(float)
    failures = size - successes
    success = k * (math.comb(failures, k) / math.comb(size - 1, k))
    expected = np.where(rewards > 0, success, -successes / failures * success)
    np.testing.assert_allclose(estimate(rewards[None], "maxpo", rows=8, k=k)[0], expected, rtol=0, atol=1e-5 * success)


def large_groups(size: int = 1024) -> np.ndarray:
    """Returns float32 groups: spread, far from zero, 0/1, one success, one large among many small, signed and huge
    rewards."""
    rng = np.random.default_rng(0)
    one = np.eye(size)[5]
    groups = [
        rng.uniform(size=size),
        1000 + rng.uniform(size=size),
        1000 + rng.integers(0, 2, size),
        rng.integers(0, 2, size),
        one,
        np.where(one > 0, 1.0, 1e-3),
        rng.normal(size=size),
        1e14 * rng.normal(size=size),
    ]
    return np.stack(groups).astype(np.float32).astype(np.float64)


LARGE: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"ddof": 0}),
    ("drgrpo", {}),
    ("rloo", {}),
    ("opo", {}),
    ("maxrl", {}),
    ("maxrl", {"truncation_order": 8}),
    ("maxk_mix", {"coefficients": (1.0, 0.0, 4.0, -0.5)}),
    *[("maxpo", {"k": k}) for k in (1, 4, 512, 1023)],
    *[("pkpo", {"k": k}) for k in (1, 2, 64, 1024)],
]


@pytest.mark.parametrize(("name", "params"), LARGE, ids=[f"{n}-{next(iter(p.values()), '')}" for n, p in LARGE])
def test_float32_matches_float64(name, params):
    """For G = 1024, float32 and float64 agree within 1e-5 of the largest advantage, on the same float32 rewards."""
    groups = np.abs(large_groups()) if (name, params) == ("maxrl", {}) else large_groups()
    lengths = np.random.default_rng(1).integers(0, 2000, groups.shape)
    expected = definition(name, params, groups, lengths, by_ranks)
    assert_close(estimate(groups, name, lengths, rows=8, **params), expected)


@pytest.mark.parametrize("k", [1, 4, 512, 1022, 1023])
def test_passk_in_float32_with_extreme_success_rates_of_subsets(k):
    """For G = 1024 and `V` near 0 or 1, a computation of `1 - V` by subtraction would have an error of 1e-3. The
    expected value of `1 - V` is `C(f, k) / C(G, k)`."""
    size = 1024
    failures = sorted({*range(k, min(k + 3, size)), min(k + 30, 1023), 512, 900, 1022, 1023})
    groups = np.array([[0.0] * f + [1.0] * (size - f) for f in failures])
    assert_close(estimate(groups, "passk", rows=8, k=k), definition("passk", {"k": k}, groups, maxima=by_ranks))


def test_reinforce_pp_in_float32():
    """One batch has large groups with long and empty completions. Another batch has huge rewards."""
    lengths = np.random.default_rng(1).integers(0, 50, (8, 1024))
    everyday, huge = large_groups()[:-1], large_groups()[-1:]
    for batch, rows in ((everyday, 8), (huge, 8)):
        found = estimate(batch, "reinforce_pp", lengths[: len(batch)], rows=rows)
        assert_close(found, definition("reinforce_pp", {}, batch, lengths[: len(batch)]))
