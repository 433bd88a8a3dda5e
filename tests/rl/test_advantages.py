"""Advantages against the definitions: every subset of the group, every outcome of a small bandit, float64.

The oracles know max@K as a mean over subsets and the gradient of an objective as a sum over outcomes; none of them
sorts, and none knows a closed form.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.errors import UserError
from tunix_like.rl import advantages
from tunix_like.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    ZERO_WHEN_CONSTANT,
    check_parameters,
    check_rewards,
    compute_advantages,
    estimator_parameters,
    find_estimator,
    least_scored,
    register_advantage_estimator,
)

NAN = float("nan")
EVERY = [
    ("grpo", {}),
    ("grpo", {"ddof": 0}),
    ("drgrpo", {}),
    ("rloo", {}),
    ("maxrl", {}),
    ("maxrl", {"truncation_order": 3}),
    ("maxpo", {"k": 1}),
    ("maxpo", {"k": 3}),
]
every = pytest.mark.parametrize(
    ("name", "params"), EVERY, ids=["-".join([n, *(f"{k}{v}" for k, v in p.items())]) for n, p in EVERY]
)


ROWS = 256
"""Every batch of groups is padded to this many, so that a group size is compiled once."""


def estimate(rewards: np.ndarray, name: str, **params) -> np.ndarray:
    """The estimator itself, op by op: nothing is compiled anew for another parameter. `compute_advantages`, which
    compiles it whole, is held to the same values below."""
    rewards = np.asarray(rewards, np.float64)
    padded = np.zeros((-(-len(rewards) // ROWS) * ROWS, rewards.shape[1]))
    padded[: len(rewards)] = rewards
    scored = ~np.isnan(padded)
    filled = jnp.asarray(np.where(scored, padded, 0.0), jnp.float32)
    out = find_estimator(name)(filled, scored=jnp.asarray(scored), lengths=jnp.ones(padded.shape, jnp.int32), **params)
    return np.asarray(out)[: len(rewards)]


def kinds_of_groups(size: int, count: int = 24) -> np.ndarray:
    """Random groups `[4 * count, size]`: reals, heavy ties, 0/1, and non-negative shaped rewards; float32 values."""
    rng = np.random.default_rng(size)
    groups = [
        rng.normal(size=(count, size)),
        rng.integers(-1, 2, (count, size)),
        rng.integers(0, 2, (count, size)),
        rng.choice([0.0, 0.1, 1.1], (count, size)),
    ]
    return np.concatenate(groups).astype(np.float32).astype(np.float64)


def leave_two_out(rewards: np.ndarray, k: int) -> np.ndarray:
    """`L_k,i`: mean max over the k-subsets that hold i, minus that over the k-subsets that do not."""
    subsets = [(set(s), max(rewards[list(s)])) for s in itertools.combinations(range(len(rewards)), k)]
    with_i = [np.mean([top for s, top in subsets if i in s]) for i in range(len(rewards))]
    without = [np.mean([top for s, top in subsets if i not in s]) for i in range(len(rewards))]
    return np.array(with_i) - np.array(without)


def plain(name: str, params: dict, rewards: np.ndarray) -> np.ndarray:
    """The formula of one fully scored group, in float64, term by term."""
    size, mean = len(rewards), rewards.mean()
    if rewards.max() == rewards.min():
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
        return np.sum([leave_two_out(rewards, k) for k in orders], axis=0)
    return params["k"] * leave_two_out(rewards, params["k"])


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of each group's largest advantage."""
    bound = tolerance * np.abs(expected).max(axis=-1, keepdims=True) + 1e-12
    assert (np.abs(actual - expected) <= bound).all(), np.abs(actual - expected).max()


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
    ],
)
def test_hand_values(rewards, name, params, expected, atol):
    np.testing.assert_allclose(compute_advantages(rewards, name, **params), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_order_statistics_are_means_over_subsets(size):
    """maxpo for every k and maxrl for every truncation order, on reals, ties and 0/1."""
    groups = kinds_of_groups(size)
    parts = np.array([[leave_two_out(group, k) for group in groups] for k in range(1, size)])
    for k in range(1, size):
        assert_close(estimate(groups, "maxpo", k=k), k * parts[k - 1])
        assert_close(estimate(groups, "maxrl", truncation_order=k), parts[:k].sum(axis=0))


@pytest.mark.parametrize("size", range(2, 9))
def test_algorithm_1_is_the_sum_of_every_order(size):
    """On all 0/1 groups; both the library's highest order and the sum over subsets."""
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=size)))
    algorithm_1 = estimate(groups, "maxrl")
    assert_close(estimate(groups, "maxrl", truncation_order=size - 1), algorithm_1)
    distinct = groups[[2**c - 1 for c in range(size + 1)]]  # one group for every number of successes
    by_subsets = np.array([sum(leave_two_out(g, k) for k in range(1, size)) for g in distinct])
    assert_close(algorithm_1[[2**c - 1 for c in range(size + 1)]], by_subsets)


@every
def test_the_formula(name, params):
    groups = kinds_of_groups(6)
    assert_close(estimate(groups, name, **params), np.array([plain(name, params, g) for g in groups]))


def test_maxpo_of_one_is_rloo():
    groups = kinds_of_groups(7)
    assert_close(estimate(groups, "maxpo", k=1), estimate(groups, "rloo").astype(np.float64))


@pytest.mark.parametrize("size", [1024])
@pytest.mark.parametrize(
    ("name", "params"),
    [("grpo", {}), ("rloo", {}), ("maxrl", {}), ("maxpo", {"k": 4}), ("maxrl", {"truncation_order": 32})],
)
def test_float32_is_as_good_as_float64(name, params, size):
    """On the same float32 rewards, large offsets and rare large rewards included."""
    rng = np.random.default_rng(0)
    rare = np.where(np.arange(size) == 5, 1.0, 1e-3)
    groups = np.stack(
        [rng.uniform(size=size), 1000 + rng.uniform(size=size), rng.integers(0, 2, size), np.eye(size)[3], rare]
    ).astype(np.float32)
    estimator, scored = find_estimator(name), jnp.ones(groups.shape, bool)
    lengths = jnp.ones(groups.shape, jnp.int32)
    single = np.asarray(estimator(jnp.asarray(groups), scored=scored, lengths=lengths, **params))
    with jax.enable_x64(True):
        double = estimator(jnp.asarray(groups, jnp.float64), scored=scored, lengths=lengths, **params)
        assert double.dtype == jnp.float64
        double = np.asarray(double)
    assert_close(single, double)
    if not params:
        assert_close(double, np.array([plain(name, params, group) for group in groups.astype(np.float64)]), 1e-9)


@pytest.mark.parametrize("k", [1, 2, 512, 1023])
def test_maxpo_on_a_large_group(k):
    """G = 1024, 0/1 rewards: `k C(f, k) / C(G-1, k)` for a success, by whole numbers."""
    size, successes = 1024, 3
    rewards = (np.arange(size) < successes).astype(float)
    failures = size - successes
    success = k * (math.comb(failures, k) / math.comb(size - 1, k))
    expected = np.where(rewards > 0, success, -successes / failures * success)
    np.testing.assert_allclose(estimate(rewards[None], "maxpo", k=k)[0], expected, rtol=0, atol=1e-5 * max(success, 1))


# --- what the gradient is unbiased for --------------------------------------------------------------------------------

ARMS = np.array([0.2, 0.5, 0.3])
SCORES = np.eye(3) - ARMS  # gradient of log softmax for each arm


def expected_gradient(name: str, params: dict, rewards: np.ndarray, size: int) -> np.ndarray:
    """`E[(1/G) sum_i A_i grad log pi(y_i)]` over all `3^G` groups of a three-armed softmax bandit."""
    draws = np.array(list(itertools.product(range(3), repeat=size)))
    values = estimate(rewards[draws], name, **params).astype(np.float64)
    return np.einsum("n,ni,nid->d", ARMS[draws].prod(axis=1), values, SCORES[draws]) / size


def gradient_of_max(rewards: np.ndarray, k: int) -> np.ndarray:
    """Gradient of the expected maximum of k draws, by enumerating them."""
    draws = np.array(list(itertools.product(range(3), repeat=k)))
    return np.einsum("n,n,nid->d", ARMS[draws].prod(axis=1), rewards[draws].max(axis=1), SCORES[draws])


BINARY, REAL = np.array([1.0, 0.0, 0.0]), np.array([0.7, -1.2, 2.0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rloo_ascends_the_expected_reward(size):
    found = expected_gradient("rloo", {}, REAL, size)
    np.testing.assert_allclose(found, gradient_of_max(REAL, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_algorithm_1_ascends_the_likelihood_to_order_group_size_minus_1(size):
    p, grad_p = ARMS[0], ARMS[0] * SCORES[0]
    found = expected_gradient("maxrl", {}, BINARY, size)
    order = lambda t: (1 - (1 - p) ** t) / p * grad_p  # noqa: E731
    np.testing.assert_allclose(found, order(size - 1), rtol=0, atol=1e-5)
    assert np.abs(found - order(size)).max() > 1e-2, "and not to order group_size"


@pytest.mark.parametrize("rewards", [BINARY, REAL], ids=["binary", "real"])
@pytest.mark.parametrize("size", [2, 5])
def test_truncated_maxrl_ascends_the_harmonic_sum_of_maxima(size, rewards):
    for order in range(1, size):
        expected = sum(gradient_of_max(rewards, k) / k for k in range(1, order + 1))
        found = expected_gradient("maxrl", {"truncation_order": order}, rewards, size)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rewards", [BINARY, REAL], ids=["binary", "real"])
@pytest.mark.parametrize("size", [2, 5])
def test_maxpo_ascends_max_at_k(size, rewards):
    for k in range(1, size):
        found = expected_gradient("maxpo", {"k": k}, rewards, size)
        np.testing.assert_allclose(found, gradient_of_max(rewards, k), rtol=0, atol=1e-5)


PASS_RATES = (0.05, 0.3, 0.5, 0.9)


def population_weight(name: str, params: dict, size: int, p: float) -> float:
    """`w(p)` of `E[gradient] = w(p) grad p`: `E_j[j A_succ(j) / (G p) - (G-j) A_fail(j) / (G (1-p))]`."""
    groups = np.array([[1.0] * j + [0.0] * (size - j) for j in range(size + 1)])
    values = estimate(groups, name, **params).astype(np.float64)
    total = 0.0
    for j, (rewards, row) in enumerate(zip(groups, values, strict=True)):
        chance = math.comb(size, j) * p**j * (1 - p) ** (size - j)
        total += chance * (row[rewards == 1].sum() / (size * p) - row[rewards == 0].sum() / (size * (1 - p)))
    return total


def grpo_weight(size: int, p: float, ddof: int) -> float:
    chances = [math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(size + 1)]
    root = sum(chance * math.sqrt(c * (size - c)) for c, chance in enumerate(chances))
    return root / (size * p * (1 - p)) * (math.sqrt((size - 1) / size) if ddof else 1.0)


@pytest.mark.parametrize("size", [2, 7, 12])
@pytest.mark.parametrize(
    ("name", "params", "weight"),
    [
        ("grpo", {"ddof": 0}, lambda size, p: grpo_weight(size, p, 0)),
        ("grpo", {}, lambda size, p: grpo_weight(size, p, 1)),
        ("drgrpo", {}, lambda size, p: (size - 1) / size),
        ("rloo", {}, lambda size, p: 1.0),
        ("maxrl", {}, lambda size, p: (1 - (1 - p) ** (size - 1)) / p),
        ("maxrl", {"truncation_order": 5}, lambda size, p: (1 - (1 - p) ** 5) / p),
        ("maxpo", {"k": 5}, lambda size, p: 5 * (1 - p) ** 4),
    ],
)
def test_population_weight(name, params, weight, size):
    if size <= max([*params.values(), 0]) and "ddof" not in params:
        size = 6
    found = [population_weight(name, params, size, p) for p in PASS_RATES]
    np.testing.assert_allclose(found, [weight(size, p) for p in PASS_RATES], rtol=2e-5)


# --- properties -------------------------------------------------------------------------------------------------------


@every
def test_a_group_sums_to_zero(name, params):
    groups = np.abs(kinds_of_groups(6))
    values = estimate(groups, name, **params)
    assert np.abs(values).max() > 0.1
    np.testing.assert_allclose(values.sum(axis=1), 0, rtol=0, atol=2e-5)


@every
def test_order_shift_and_scale(name, params):
    """A permutation goes through; a shift changes nothing but Algorithm 1; a factor goes through, and Algorithm 1 and
    GRPO cancel it. Equal rewards have equal advantages."""
    groups = np.abs(kinds_of_groups(6))
    values = estimate(groups, name, **params).astype(np.float64)
    order = np.random.default_rng(0).permutation(6)
    assert_close(estimate(groups[:, order], name, **params), values[:, order])
    shifted, scaled = estimate(groups + 2, name, **params), estimate(4 * groups, name, **params)
    if (name, params) == ("maxrl", {}):
        assert np.abs(shifted - values).max() > 0.1
    else:
        assert_close(shifted, values)
    assert_close(scaled, values if name == "grpo" or (name, params) == ("maxrl", {}) else 4 * values, 3e-5)
    for rewards, row in zip(groups, values, strict=True):
        for reward in set(rewards):
            assert np.ptp(row[rewards == reward]) <= 1e-5 * np.abs(row).max()


@every
def test_a_constant_group_is_exactly_zero(name, params):
    """Exactly: the float32 mean of twelve times 0.7 is not 0.7."""
    groups = np.array([[value] * 12 for value in (0.7, 0.0, 1.0, 1e-3, 1234.567, 1e15)])
    assert not estimate(groups, name, **params).any()
    groups[:, 1] = NAN
    assert not estimate(groups, name, **params).any(), "with one unscored"


def test_what_promises_zeros_is_proven_to_give_them():
    """Groups without signal are left out of the update for these."""
    assert {name for name, _ in EVERY} >= ZERO_WHEN_CONSTANT > set()


@every
def test_unscored_completions_take_no_part(name, params):
    """What is left of a group has the advantages it would have alone, whatever stands in the unscored places; it is
    dropped when too little is left."""
    groups = np.abs(kinds_of_groups(6))
    rng = np.random.default_rng(1)
    kept = rng.permuted(np.broadcast_to(np.arange(6), groups.shape), axis=1) < rng.integers(0, 7, (len(groups), 1))
    values = estimate(np.where(kept, groups, NAN), name, **params)
    least = least_scored(params)
    expected = np.zeros(groups.shape)
    for row, group, scored in zip(expected, groups, kept, strict=True):
        if scored.sum() >= least:
            row[scored] = plain(name, params, group[scored])
    assert (values[~kept] == 0).all()
    assert (values[kept.sum(axis=1) < least] == 0).all()
    assert_close(values, expected)
    other = find_estimator(name)(
        jnp.asarray(np.where(kept, groups, 7e14), jnp.float32),
        scored=jnp.asarray(kept),
        lengths=jnp.ones(kept.shape, jnp.int32),
        **params,
    )
    np.testing.assert_array_equal(other, values)


@every
def test_never_nan_or_infinite(name, params):
    groups = np.array(list(itertools.product([1e15, -1e15, 1e-45, NAN], repeat=4)))
    groups = np.concatenate([groups, np.where(groups[:, :1] > 0, [[0.0, 1e-30]], [[1.0, NAN]])], axis=1)
    groups = np.abs(groups) if (name, params) == ("maxrl", {}) else groups
    values = estimate(groups, name, **params)
    assert np.isfinite(values).all()
    assert (values[np.isnan(groups)] == 0).all()


# --- the public function and the registry -----------------------------------------------------------------------------


@every
def test_one_group_or_many(name, params):
    """`[G]` and `[groups, G]`, compiled whole."""
    groups = np.abs(kinds_of_groups(6))
    groups[4:7, 2:4] = NAN
    many = compute_advantages(groups, name, **params)
    np.testing.assert_allclose(many, estimate(groups, name, **params), rtol=1e-5, atol=1e-6)
    one = compute_advantages(groups[3].tolist(), name, **params)
    assert many.shape == groups.shape and one.shape == (6,)
    assert many.dtype == one.dtype == np.float32
    np.testing.assert_allclose(one, many[3], rtol=0, atol=1e-6)


def test_none_is_unscored():
    np.testing.assert_array_equal(compute_advantages([None, 1.0, 0.0], "drgrpo"), [0.0, 0.5, -0.5])


@pytest.mark.parametrize(
    ("rewards", "name", "params", "message"),
    [
        ([1, 0], "maxlr", {}, "unknown estimator 'maxlr'. Did you mean 'maxrl'.*drgrpo, grpo, maxpo, maxrl, rloo"),
        ([1, 0, 0], "rloo", {"k": 2}, "algorithm.k: the estimator 'rloo' does not read it"),
        ([1, 0, 0], "grpo", {"kk": 2}, "algorithm.kk: the estimator 'grpo' does not read it .it reads ddof"),
        ([1, 0, 0], "maxpo", {}, "algorithm.k: the estimator 'maxpo' needs it"),
        ([1, 0, 0], "maxpo", {"k": None}, "algorithm.k: the estimator 'maxpo' needs it"),
        ([1, 0, 0], "maxpo", {"k": 3}, "algorithm.k: got 3; 'maxpo' needs 1 <= k <= 2"),
        ([1, 0, 0], "maxpo", {"k": 0}, "algorithm.k: got 0"),
        ([1, 0, 0], "maxrl", {"truncation_order": 3}, "algorithm.truncation_order: got 3.*<= 2"),
        (["a", 0], "rloo", {}, "rewards: expected numbers"),
        ([[1, 0], [1]], "rloo", {}, "rewards: expected numbers"),
        ([], "rloo", {}, "rewards: expected shape"),
        (1.0, "rloo", {}, "rewards: expected shape"),
        (np.zeros((2, 2, 2)), "rloo", {}, r"rewards: expected shape .*\[2, 2, 2\]"),
        ([1, 0, 0], "rloo", {"lengths": [1, 2]}, r"lengths: expected the shape of rewards, \[3\], got \[2\]"),
        ([[1, 0], [0, 2e15]], "rloo", {}, "group 1, completion 1.*beyond 1e15"),
        ([1, 0, -math.inf], "rloo", {}, "beyond 1e15"),
        ([[1, 0], [0, -0.5]], "maxrl", {}, "non-negative rewards only; group 1, completion 1 has -0.5"),
    ],
)
def test_bad_input_is_told(rewards, name, params, message):
    with pytest.raises(UserError, match=message):
        compute_advantages(rewards, name, **params)


def test_a_negative_reward_is_taken_with_a_truncation_order():
    assert np.isfinite(compute_advantages([1.0, -0.5, 0.0], "maxrl", truncation_order=2)).all()
    check_rewards("maxrl", {}, np.array([[1.0, NAN, -0.0]]), np.array([[True, False, True]]))


def test_what_an_estimator_declares():
    assert estimator_parameters(find_estimator("maxrl")) == {"truncation_order": None}
    assert set(estimator_parameters(find_estimator("maxpo"))) == {"k"}
    assert check_parameters("grpo", {"k": None, "ddof": 0}, 4) == {"ddof": 0}
    assert [least_scored(params) for params in ({}, {"k": 1}, {"k": 4}, {"truncation_order": 5})] == [2, 2, 5, 2]


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, so that what a test registers does not outlive it."""
    monkeypatch.setattr(advantages, "ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))


def test_a_registered_estimator_is_traced_with_its_own_parameters(registry):
    seen = []

    @register_advantage_estimator("long_is_bad")
    def long_is_bad(rewards, *, scored, lengths, price: float, floor: float = 0.0):
        seen.append(isinstance(rewards, jax.core.Tracer) and isinstance(lengths, jax.core.Tracer))
        return jnp.maximum(rewards - price * lengths, floor)

    values = compute_advantages([[3, 1], [2, 9]], "long_is_bad", lengths=[[1, 2], [3, 4]], price=0.5)
    np.testing.assert_array_equal(values, [[2.5, 0.0], [0.5, 7.0]])
    assert seen == [True]


def test_a_name_is_taken_once(registry):
    with pytest.raises(UserError, match="'maxrl' is already registered"):
        register_advantage_estimator("maxrl")(lambda rewards, *, scored, lengths: rewards)
    assert find_estimator("maxrl") is advantages.maxrl
