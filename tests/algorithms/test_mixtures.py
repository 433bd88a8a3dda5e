"""Tests `maxk_mix` and `order_statistic` in float64: against brute force over all subsets, against the gradients that
they estimate without bias, by enumeration of all groups, and against the estimators that they contain."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunix_like
from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.mixtures import fit_weight, power_coefficients, rank_weights
from tunix_like.algorithms.registry import find_estimator
from tunix_like.errors import UserError

from .oracles import (
    NAN,
    by_weights,
    definition,
    estimate,
    increase,
    kinds_of_groups,
    leave_two_out,
    over_subsets,
    series,
)


def exact(rewards: np.ndarray, name: str, **params) -> np.ndarray:
    """Runs the estimator on `[P, G]` rewards (NaN: unscored) in float64."""
    with jax.enable_x64(True):
        scored = ~np.isnan(rewards)
        out = find_estimator(name).function(
            jnp.asarray(np.where(scored, rewards, 5.0)),
            scored=jnp.asarray(scored),
            lengths=jnp.ones(rewards.shape, int),
            **params,
        )
        assert out.dtype == jnp.float64
        return np.asarray(out)


def with_holes(size: int) -> np.ndarray:
    """Returns groups of `size`, half of them with unscored completions."""
    groups = kinds_of_groups(size, 4)
    holes = np.random.default_rng(size).random(groups.shape) < 0.3
    return np.where(holes & (np.arange(len(groups)) % 2 == 1)[:, None], NAN, groups)


# --- brute force ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 11))
def test_every_coefficient_and_rank_equals_brute_force_over_subsets(size):
    """Covers every k of every group size up to 10, on real, tied and 0/1 rewards, some of them unscored."""
    groups, rng = with_holes(size), np.random.default_rng(1)
    coefficients = rng.normal(size=size - 1).tolist()
    mixes = [{"coefficients": coefficients}, {"coefficients": coefficients[: size // 2]}, {"alpha": 1.7}]
    cases = [("maxk_mix", params) for params in mixes]
    cases += [("order_statistic", {"k": k, "weights": rng.normal(size=k).tolist()}) for k in range(1, size)]
    for name, params in cases:
        found, expected = exact(groups, name, **params), definition(name, params, groups)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * max(1, np.abs(expected).max()), err_msg=params)


def test_oracle_of_the_mean_over_subsets():
    """The increase of the maximum is the Leave-Two-Out advantage, and of the mean the difference to the others."""
    rewards = np.array([0.3, -1.0, 0.3, 4.0, 2.0])
    for k in range(1, 5):
        best = increase(rewards, k, lambda rows: rows.max(axis=1))
        np.testing.assert_allclose(best, leave_two_out(rewards, k), rtol=0, atol=1e-14)
        np.testing.assert_allclose(best, increase(rewards, k, by_weights([1.0] + [0.0] * (k - 1))), atol=1e-14)
        of_others = (rewards.sum() - rewards) / 4
        np.testing.assert_allclose(
            increase(rewards, k, lambda rows: rows.mean(axis=1)), (rewards - of_others) / k, rtol=0, atol=1e-14
        )
    assert over_subsets(rewards, 5).of_all == 4


# --- unbiased for 0/1 rewards -----------------------------------------------------------------------------------------

SIZE = 6
CAPPED, BUMP = (lambda p: min(1 / p, 3.0)), (lambda p: 4 * p * (1 - p))
WEIGHTS = {
    "first": ({"coefficients": [1.0]}, lambda p: 1.0),
    "third": ({"coefficients": [0, 0, 3]}, lambda p: 3 * (1 - p) ** 2),
    "negative": (
        {"coefficients": [0.3, -2.0, 0.7, 1.1]},
        lambda p: 0.3 - 2 * (1 - p) + 0.7 * (1 - p) ** 2 + 1.1 * (1 - p) ** 3,
    ),
    "all": ({"coefficients": [1, 2, 3, 4, 5]}, lambda p: sum((k + 1) * (1 - p) ** k for k in range(5))),
    "alpha 0": ({"alpha": 0}, lambda p: 1.0),
    "alpha 0.5": ({"alpha": 0.5}, lambda p: sum(math.comb(2 * k, k) / 4**k * (1 - p) ** k for k in range(5))),
    "alpha 1": ({"alpha": 1}, lambda p: (1 - (1 - p) ** 5) / p),
    "alpha 1.5": (
        {"alpha": 1.5},
        lambda p: sum(math.gamma(1.5 + k) / math.gamma(1.5) / math.factorial(k) * (1 - p) ** k for k in range(5)),
    ),
    "alpha 2": ({"alpha": 2}, lambda p: (1 - (1 - p) ** 5 * (1 + 5 * p)) / p**2),
    "fitted to a cap": (CAPPED, None),
    "fitted to a bump": (BUMP, BUMP),  # a polynomial, so the fit is exact
}  # fmt: skip
"""Parameters, or a function to fit, and the population weight in groups of six."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_expected_gradient_has_the_population_weight(name):
    """Enumerates all 2^G outcomes of a policy that succeeds with probability p, whose score is `1/p` or `-1/(1-p)`."""
    params, weight = WEIGHTS[name]
    if callable(params):
        params = {"coefficients": fit_weight(params, SIZE).coefficients}
        fitted = params["coefficients"]
        weight = weight or (lambda p: sum(c * (1 - p) ** k for k, c in enumerate(fitted)))
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=SIZE)))
    advantages = exact(outcomes, "maxk_mix", **params)
    for p in (0.03, 0.2, 0.5, 0.97):
        chances = np.where(outcomes == 1, p, 1 - p).prod(axis=1)
        scores = np.where(outcomes == 1, 1 / p, -1 / (1 - p))
        found = (chances * (advantages * scores).mean(axis=1)).sum()
        assert found == pytest.approx(weight(p), rel=1e-11, abs=1e-11), p


def test_power_coefficients_are_those_of_the_series():
    for alpha in (0, 0.25, 1, 2.5):
        np.testing.assert_allclose(power_coefficients(alpha, 7), series(alpha, 7), rtol=1e-14)
    for alpha, p in ((0.5, 0.1), (1.5, 0.2), (-0.0, 0.4)):
        found = np.polynomial.polynomial.polyval(1 - p, power_coefficients(alpha, 2000))
        assert found == pytest.approx(p**-alpha, rel=1e-9)
    assert power_coefficients(0.5, 1) == (1.0,) and power_coefficients(0.5, 0) == ()


# --- unbiased for any rewards -----------------------------------------------------------------------------------------

ARMS = np.array([0.1, 0.4, 0.2, 0.3])
SCORES = np.eye(4) - ARMS
REWARDS = np.array([0.7, -1.2, 0.7, 2.0])  # two of four arms have the same reward


def groups_of_arms(draws: int) -> tuple[np.ndarray, np.ndarray]:
    arms = np.array(list(itertools.product(range(4), repeat=draws)))
    return arms, ARMS[arms].prod(axis=1)


def gradient_of_statistic(statistic, k: int) -> np.ndarray:
    """Returns the gradient of the expected statistic of k draws, with respect to the logits, by enumeration."""
    arms, chances = groups_of_arms(k)
    return np.einsum("n,n,nid->d", chances, statistic(REWARDS[arms]), SCORES[arms])


def ascended(name: str, size: int, **params) -> np.ndarray:
    arms, chances = groups_of_arms(size)
    values = exact(REWARDS[arms], name, **params)
    return np.einsum("n,ni,nid->d", chances, values, SCORES[arms]) / size


def sorted_mean(first: int, last: int):
    """The mean of the sorted rewards from rank `first` (0: the smallest) to before `last`."""
    return lambda rows: np.sort(rows, axis=1)[:, first:last].mean(axis=1)


STATISTICS = {
    "maximum": (3, {"weights": [1, 0, 0]}, lambda rows: rows.max(axis=1)),
    "minimum": (4, {"weights": [0, 0, 0, 1]}, lambda rows: rows.min(axis=1)),
    "mean": (3, {"weights": [1 / 3] * 3}, lambda rows: rows.mean(axis=1)),
    "range": (3, {"weights": [1, 0, -1]}, lambda rows: np.ptp(rows, axis=1)),
    "one": (1, {"weights": [2.5]}, lambda rows: 2.5 * rows[:, 0]),
    "any": (4, {"weights": [0.3, -1, 4, 0.1]}, by_weights([0.3, -1, 4, 0.1])),
    "top two": (4, {"statistic": "top_mean:2"}, sorted_mean(2, 4)),
    "upper tail": (4, {"statistic": "upper_tail_mean:0.3"}, sorted_mean(2, 4)),
    "lower tail": (4, {"statistic": "lower_tail_mean:0.75"}, sorted_mean(0, 3)),
    "median of an even number": (4, {"statistic": "median"}, lambda rows: np.median(rows, axis=1)),
    "median": (3, {"statistic": "median"}, lambda rows: np.median(rows, axis=1)),
    "quantile": (3, {"statistic": "quantile:0.8"}, lambda rows: np.quantile(rows, 0.8, axis=1)),
    "trimmed mean": (4, {"statistic": "trimmed_mean:0.25"}, sorted_mean(1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_expected_gradient_is_that_of_the_expected_statistic(name):
    """Enumerates all 4^G groups of a softmax policy over four actions, two of which have equal rewards."""
    k, params, statistic = STATISTICS[name]
    expected = gradient_of_statistic(statistic, k)
    assert np.abs(expected).max() > 0.01
    for size in range(k + 1, 6):
        np.testing.assert_allclose(ascended("order_statistic", size, k=k, **params), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("params", [{"alpha": 0.5}, {"coefficients": [1.0, -2.0, 0.0, 3.0]}], ids=str)
def test_mix_ascends_the_sum_of_expected_maxima(params):
    coefficients = params.get("coefficients") or series(0.5, 4)
    expected = sum(
        c / k * gradient_of_statistic(lambda rows: rows.max(axis=1), k) for k, c in enumerate(coefficients, start=1)
    )
    np.testing.assert_allclose(ascended("maxk_mix", 5, **params), expected, rtol=0, atol=1e-12)


# --- the estimators that they contain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5, 8])
def test_estimators_that_are_special_cases(size):
    groups = with_holes(size)

    def assert_equal(name, params, other, of_other, rewards=groups, kept=None):
        expected = exact(rewards, other, **of_other)
        if kept is not None:  # the others are dropped
            expected = np.where((~np.isnan(rewards)).sum(axis=1, keepdims=True) >= kept, expected, 0.0)
        found = exact(rewards, name, **params)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1, np.abs(expected).max()))

    assert_equal("maxk_mix", {"alpha": 0.0}, "rloo", {})
    assert_equal("maxk_mix", {"coefficients": [1.0]}, "rloo", {})
    binary = np.where(np.isnan(groups), NAN, groups > 0.3)
    assert_equal("maxk_mix", {"alpha": 1.0}, "maxrl", {}, binary)
    for k in range(1, size):
        assert_equal("maxk_mix", {"coefficients": [0.0] * (k - 1) + [float(k)]}, "maxpo", {"k": k})
        assert_equal("maxk_mix", {"coefficients": [1.0] * k}, "maxrl", {"truncation_order": k}, kept=k + 1)
        assert_equal("order_statistic", {"k": k, "weights": [1.0] + [0.0] * (k - 1)}, "maxpo", {"k": k})
        assert_equal("order_statistic", {"k": k, "weights": [1 / k] * k}, "rloo", {}, kept=k + 1)
        lowest = exact(groups, "order_statistic", k=k, weights=[0.0] * (k - 1) + [1.0])
        np.testing.assert_allclose(lowest, -exact(-groups, "maxpo", k=k), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(
            exact(groups, "order_statistic", k=k, statistic="top_mean:1"),
            exact(groups, "order_statistic", k=k, weights=[1.0] + [0.0] * (k - 1)),
        )


@pytest.mark.slow
def test_large_groups_in_float32():
    """For G = 1024 the binomials overflow float64. The identities hold in float32 within 1e-5 of the largest value."""
    rewards = np.random.default_rng(0).normal(size=(1, 1024)).astype(np.float32).astype(np.float64)
    for k in (4, 512, 1023):
        lowest = estimate(rewards, "order_statistic", rows=1, k=k, weights=[0.0] * (k - 1) + [1.0])
        expected = -estimate(-rewards, "maxpo", rows=1, k=k)
        np.testing.assert_allclose(lowest, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    binary = (rewards > 2.5).astype(float)
    found, expected = estimate(binary, "maxk_mix", rows=1, alpha=1), exact(binary, "maxrl")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- statistics by name and fitted weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 13))
def test_rank_weights_give_the_statistics_of_numpy(k):
    rows = np.random.default_rng(k).normal(size=(5, k))

    def assert_gives(statistic: str, expected: np.ndarray) -> None:
        np.testing.assert_allclose(
            by_weights(rank_weights(statistic, k))(rows), expected, atol=1e-14, err_msg=statistic
        )

    ascending = np.sort(rows, axis=1)
    assert_gives("median", np.median(rows, axis=1))
    for m in range(1, k + 1):
        assert_gives(f"top_mean:{m}", ascending[:, k - m :].mean(axis=1))
    for q in (0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0):
        assert_gives(f"quantile:{q}", np.quantile(rows, q, axis=1))
        if q > 0:
            count = -(-round(100 * q) * k // 100)  # in integers
            assert_gives(f"upper_tail_mean:{q}", ascending[:, k - count :].mean(axis=1))
            assert_gives(f"lower_tail_mean:{q}", ascending[:, :count].mean(axis=1))
        if q < 0.5:
            cut = round(100 * q) * k // 100
            assert_gives(f"trimmed_mean:{q}", ascending[:, cut : k - cut].mean(axis=1))


def test_fit_weight_finds_polynomials_and_is_the_least_squares_fit():
    polynomial = [0.5, -1.0, 0.0, 3.0]
    fit = tunix_like.fit_weight(lambda p: sum(c * (1 - p) ** k for k, c in enumerate(polynomial)), 5)
    np.testing.assert_allclose(fit.coefficients, polynomial, atol=1e-10)
    assert fit.residual < 1e-12
    rates = np.linspace(0.05, 0.95, 40)
    fit = fit_weight(CAPPED, 4, rates)
    wanted = np.array([CAPPED(rate) for rate in rates])
    expected = np.polynomial.polynomial.polyfit(1 - rates, wanted, 2)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=1e-9)
    off = np.polynomial.polynomial.polyval(1 - rates, expected) - wanted
    assert fit.residual == pytest.approx(np.sqrt((off**2).mean()), rel=1e-9)
    assert len(fit_weight(CAPPED, 2).coefficients) == 1
    large = fit_weight(lambda p: min(1 / p, 8), 64)
    assert np.abs(large.coefficients).max() < 1e8 and large.residual < 0.05


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("maxk_mix", {}, "algorithm.alpha, coefficients: 'maxk_mix' needs exactly one"),
        ("maxk_mix", {"alpha": 1, "coefficients": [1]}, "algorithm.alpha, coefficients: 'maxk_mix' needs exactly one"),
        ("maxk_mix", {"alpha": -0.1}, "algorithm.alpha: got -0.1; 'maxk_mix' needs a number of at least 0"),
        ("maxk_mix", {"alpha": NAN}, "algorithm.alpha: got nan"),
        ("maxk_mix", {"alpha": True}, "algorithm.alpha: got True"),
        ("maxk_mix", {"alpha": "one"}, "algorithm.alpha: got 'one'"),
        ("maxk_mix", {"alpha": 1e9}, r"alpha: got 1000000000.0; a coefficient of a group of 4 exceeds 1e\+15"),
        ("maxk_mix", {"alpha": 1e300}, "algorithm.alpha: got 1e.300; a coefficient"),
        ("maxk_mix", {"coefficients": []}, r"algorithm.coefficients: got \[\]; give a list of finite numbers"),
        ("maxk_mix", {"coefficients": 2.0}, "algorithm.coefficients: got 2.0; give a list"),
        ("maxk_mix", {"coefficients": [1, "2"]}, "algorithm.coefficients: got .*; give a list of finite"),
        ("maxk_mix", {"coefficients": [1, math.inf]}, "algorithm.coefficients: got .*; give a list of finite"),
        ("maxk_mix", {"coefficients": [1, -1e16]}, r"algorithm.coefficients: got .*; the largest magnitude is 1e\+15"),
        ("maxk_mix", {"coefficients": [1, 2, 3, 4]}, "coefficients: got 4; 'maxk_mix' takes at most 3, one less"),
        ("maxk_mix", {"alpha": 1, "k": 2}, "algorithm.k: the estimator 'maxk_mix' does not read it .it reads alpha"),
        ("order_statistic", {"statistic": "median"}, "algorithm.k: the estimator 'order_statistic' requires it"),
        ("order_statistic", {"k": 4, "statistic": "median"}, "algorithm.k: got 4; 'order_statistic' needs 1 <= k <= 3"),
        ("order_statistic", {"k": 2}, "algorithm.weights, statistic: 'order_statistic' needs exactly one"),
        ("order_statistic", {"k": 1, "weights": [1], "statistic": "median"}, "weights, statistic: .* exactly one"),
        ("order_statistic", {"k": 2, "weights": [1]}, r"algorithm.weights: got 1; 'order_statistic' needs k \(2\)"),
        ("order_statistic", {"k": 2, "weights": [1, None]}, "algorithm.weights: got .*; give a list"),
        ("order_statistic", {"k": 2, "statistic": 3}, "algorithm.statistic: got 3; give a name such as median"),
        ("order_statistic", {"k": 2, "statistic": "medain"}, "algorithm.statistic: unknown value 'medain'. Did you"),
        ("order_statistic", {"k": 2, "statistic": "median:1"}, "algorithm.statistic: got 'median:1'; write median"),
        ("order_statistic", {"k": 2, "statistic": "top_mean"}, "got 'top_mean'; write top_mean:M with M from 1 to k"),
        ("order_statistic", {"k": 2, "statistic": "top_mean:3"}, r"write top_mean:M with M from 1 to k \(2\)"),
        ("order_statistic", {"k": 2, "statistic": "top_mean:1.5"}, "write top_mean:M with M from 1 to k"),
        ("order_statistic", {"k": 2, "statistic": "quantile:1.1"}, "write quantile:Q with 0 <= Q <= 1"),
        ("order_statistic", {"k": 2, "statistic": "quantile:nan"}, "write quantile:Q with 0 <= Q <= 1"),
        ("order_statistic", {"k": 2, "statistic": "lower_tail_mean:0"}, "write lower_tail_mean:Q with 0 < Q <= 1"),
        ("order_statistic", {"k": 2, "statistic": "upper_tail_mean:x"}, "write upper_tail_mean:Q with 0 < Q <= 1"),
        ("order_statistic", {"k": 2, "statistic": "trimmed_mean:0.5"}, "write trimmed_mean:Q with 0 <= Q < 0.5"),
    ],
)  # fmt: skip
def test_bad_parameters(name, params, message):
    with pytest.raises(UserError, match=message):
        compute_advantages([1.0, 0.0, 0.0, 0.5], name, **params)


def test_the_largest_parameters_give_finite_advantages():
    huge = np.where(np.arange(16) < 8, 1e15, -1e15)
    for name, params in (
        ("maxk_mix", {"coefficients": [1e15] * 15}),
        ("order_statistic", {"k": 15, "weights": [1e15] * 15}),
        ("order_statistic", {"k": 8, "weights": [1e15, -1e15] * 4}),
    ):
        assert np.isfinite(compute_advantages(huge, name, **params)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CAPPED, 1), "group_size: got 1; it must be at least 2"),
        ((CAPPED, 4, np.array([])), "pass_rates: give numbers from 0 to 1"),
        ((CAPPED, 4, np.array([0.5, 1.5])), "pass_rates: give numbers from 0 to 1"),
        ((CAPPED, 4, np.array([NAN])), "pass_rates: give numbers from 0 to 1"),
        ((lambda p: math.inf if p < 0.2 else 1.0, 4, np.array([0.5, 0.1])), "weight: it is inf at pass rate 0.1"),
    ],
)
def test_bad_arguments_of_fit_weight(arguments, message):
    with pytest.raises(UserError, match=message):
        fit_weight(*arguments)


AUTHORS = {
    ("median", 3): [-0.36, -0.72, 0.6, 0.6, -0.72, 0.6],
    ("top_mean:2", 3): [-0.63, -0.81, 2.31, -0.03, -0.81, -0.03],
    ("lower_tail_mean:0.5", 4): [0.44, -3.16, 0.92, 0.92, -0.04, 0.92],
    ("upper_tail_mean:0.25", 4): [-1.04, -1.04, 5.2, -1.04, -1.04, -1.04],
}
"""K times `OrderStatTransform.lstat_advantage` of the NumPy backend of ordergrad (commit 50b89ea) for six rewards with
a tie, by the statistic's name here and K."""


@pytest.mark.parametrize(("statistic", "k"), AUTHORS)
def test_advantages_of_the_authors_of_ordergrad(statistic, k):
    rewards = np.array([[0.3, -1.2, 2.0, 0.7, 0.1, 0.7]])
    found = exact(rewards, "order_statistic", k=k, statistic=statistic)
    np.testing.assert_allclose(found[0], AUTHORS[statistic, k], atol=1e-12)
