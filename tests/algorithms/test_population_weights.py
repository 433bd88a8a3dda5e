"""Tests the population weights against closed forms, and against the expected score-function gradient by
enumeration."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from tests.parameters import others_slow
from tunix_like.algorithms import population_weights as module
from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import (
    binomial_pmf,
    likelihood_weight,
    population_weights,
    reinforcement_weight,
    weights_of,
)
from tunix_like.errors import UserError

RATES = np.array([1e-4, 0.01, 0.2, 0.5, 0.77, 0.99, 0.9999])


def grpo_weight(p, size, ddof):
    """Returns `E_c[sqrt(c (G-c))] / (G p (1-p))`, `c ~ Bin(G, p)`, with the 1e-6 of the divisor."""
    total = np.zeros_like(p)
    for c in range(1, size):
        deviation = np.sqrt(c * (size - c) / size / (size - ddof))
        total += comb(size, c) * p**c * (1 - p) ** (size - c) * c * (size - c) / size / (deviation + 1e-6)
    return total / (size * p * (1 - p))


def closed_forms(size):
    """Yields (name, parameters, weight) of every row of the table that states a weight."""
    orders = sorted({1, 2, size // 2, size - 1} & set(range(1, size)))
    yield "rloo", {}, lambda p: 1 + 0 * p
    yield "drgrpo", {}, lambda p: (size - 1) / size + 0 * p
    yield "maxrl", {}, lambda p: (1 - (1 - p) ** (size - 1)) / p
    for ddof in (0, 1):
        yield "grpo", {"ddof": ddof}, lambda p, ddof=ddof: grpo_weight(p, size, ddof)
    for k in orders:
        yield "maxrl", {"truncation_order": k}, lambda p, k=k: (1 - (1 - p) ** k) / p
        yield "maxpo", {"k": k}, lambda p, k=k: k * (1 - p) ** (k - 1)
    for k in {*orders, size}:
        yield "pkpo", {"k": k}, lambda p, k=k: k * (1 - p) ** (k - 1)


@pytest.mark.parametrize("size", others_slow([2, 8, 64], 2, 8))
def test_closed_forms(size):
    rows = list(closed_forms(size))
    found = weights_of([GroupEstimator(name, params) for name, params, _ in rows], size, RATES)
    assert found.dtype == np.float64
    for (name, params, form), weights in zip(rows, found, strict=True):
        np.testing.assert_allclose(weights, form(RATES), rtol=1e-6, atol=1e-6, err_msg=f"{name} {params}")


def test_weights_are_the_expected_gradients_of_every_estimator():
    """Computes `E[(1/G) sum_i A_i d log pi_i / dp]` over all 2^G outcomes of a policy that succeeds with probability
    p."""
    size = 4
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=size)))
    for name, params in (("grpo", {}), ("maxrl", {}), ("passk", {"k": 2}), ("opo", {}), ("pkpo", {"k": 1})):
        advantages = compute_advantages(outcomes, name, **params).astype(np.float64)
        weights = population_weights(name, size, RATES, **params)
        for p, weight in zip(RATES, weights, strict=True):
            probability = np.prod(np.where(outcomes == 1, p, 1 - p), axis=1)
            score = np.where(outcomes == 1, 1 / p, -1 / (1 - p))
            expected = (probability * (advantages * score).mean(axis=1)).sum()
            assert weight == pytest.approx(expected, rel=1e-6), (name, p)


def test_the_largest_group():
    size, rates = 1024, np.array([1e-5, 1e-3, 0.3, 0.999])
    found = weights_of([GroupEstimator("maxrl", {}), GroupEstimator("drgrpo", {})], size, rates)
    np.testing.assert_allclose(found[0], -np.expm1((size - 1) * np.log1p(-rates)) / rates, rtol=1e-6)
    np.testing.assert_allclose(found[1], (size - 1) / size, rtol=1e-6)


def test_pass_rates_0_and_1_have_finite_weights():
    found = weights_of([GroupEstimator("maxrl", {}), GroupEstimator("maxpo", {"k": 3})], 5, np.array([0.0, 1.0]))
    np.testing.assert_allclose(found, [[4, 1], [3, 0]], atol=1e-6)


def test_a_group_of_one_has_no_weight():
    assert population_weights("maxrl", 1, RATES).tolist() == [0.0] * len(RATES)


def test_binomial_probabilities_are_exact():
    n, p = 1023, Fraction(1, 3)
    exact = [float(comb(n, j) * p**j * (1 - p) ** (n - j)) for j in range(n + 1)]
    found = binomial_pmf(n, np.array([1 / 3]))[0]
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-300)


def test_references():
    assert reinforcement_weight(RATES).tolist() == [1.0] * len(RATES)
    np.testing.assert_array_equal(likelihood_weight(RATES), 1 / RATES)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: population_weights("reinforce_pp", 4, RATES), ["reinforce_pp", "other groups"]),
        (lambda: population_weights("rloo", 4, np.array([0.5, 1.5])), ["pass_rates", "1.5"]),
        (lambda: population_weights("rloo", 4, np.array([np.nan])), ["pass_rates"]),
        (lambda: population_weights("rloo", 0, RATES), ["group_size", "0"]),
        (lambda: population_weights("maxpo", 4, RATES), ["maxpo", "k"]),
        (lambda: population_weights("maxpo", 4, RATES, k=4), ["maxpo", "1 <= k <= 3"]),
        (lambda: population_weights("maxrll", 4, RATES), ["maxrll", "maxrl"]),
    ],
)
def test_invalid_arguments_raise_an_error(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_advantages_of_several_estimators_equal_those_of_each_estimator():
    rewards = np.array([[1.0, 0.0, np.nan, 2.0], [0.0, 3.0, 3.0, 1.0]])
    lengths = np.array([[3, 1, 2, 5], [1, 2, 3, 4]], np.int32)
    each = [("grpo", {"ddof": 0}), ("maxrl", {"truncation_order": 2}), ("opo", {}), ("reinforce_pp", {})]
    found = module.advantages_of([GroupEstimator(name, params) for name, params in each], rewards, lengths)
    for (name, params), advantages in zip(each, found, strict=True):
        np.testing.assert_allclose(
            advantages, compute_advantages(rewards, name, lengths=lengths, **params), rtol=1e-6, atol=1e-6
        )
