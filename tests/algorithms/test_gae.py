"""Tests generalised advantage estimates against sums over lists of actions, and against the recursion of verl."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms.losses import TokenInputs
from tunix_like.algorithms.ppo import ValueObjective, at_last_action, estimate, gae, whitened

SHAPE = (3, 4, 11)


def random_case(seed):
    """Returns rewards, values and masks with gaps, as after several turns; one completion has no action."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.6
    mask[0, 0] = False
    return rng.normal(size=SHAPE), rng.normal(size=SHAPE), mask


def of_actions(rewards, values, gamma, lam):
    """Returns the advantages of one completion's actions: `A_t = sum_k (gamma lam)^k delta_{t+k}`."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.9, 0.0)])
def test_estimates_equal_sums_over_the_actions(gamma, lam):
    for seed in range(5):
        rewards, values, mask = random_case(seed)
        found = gae(rewards, values, mask, gamma, lam)
        assert (found[~mask] == 0).all()
        for place in np.ndindex(SHAPE[:2]):
            acts = mask[place]
            expected = of_actions(rewards[place][acts], values[place][acts], gamma, lam)
            np.testing.assert_allclose(found[place][acts], expected, atol=1e-12)


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5])
def test_estimates_equal_the_recursion_of_verl(lam):
    """Also those of Tunix: masks blend the states of the recursion, and the unbiased variance whitens."""
    rewards, values, mask = random_case(7)
    m = mask.astype(np.float64)
    value, last, found = np.zeros(SHAPE[:2]), np.zeros(SHAPE[:2]), []
    for t in range(SHAPE[-1] - 1, -1, -1):
        new = rewards[..., t] + 0.97 * value - values[..., t] + 0.97 * lam * last
        value = values[..., t] * m[..., t] + (1 - m[..., t]) * value
        last = new * m[..., t] + (1 - m[..., t]) * last
        found.insert(0, last)
    theirs = np.stack(found, axis=-1)
    ours = gae(rewards, values, mask, 0.97, lam)
    np.testing.assert_allclose(ours[mask], theirs[mask], atol=1e-12)
    mean = (theirs * m).sum() / m.sum()
    variance = ((theirs - mean) ** 2 * m).sum() / m.sum() * m.sum() / (m.sum() - 1)
    np.testing.assert_allclose(whitened(ours, mask)[mask], ((theirs - mean) * (variance + 1e-8) ** -0.5)[mask])


def test_without_values_and_discount_every_action_has_the_return():
    _, values, mask = random_case(2)
    rewards = np.arange(12.0).reshape(SHAPE[:2])
    found = estimate(at_last_action(rewards, mask), np.zeros(SHAPE), mask, 1.0, 1.0)
    np.testing.assert_array_equal(found.returns, np.where(mask, rewards[..., None], 0))
    with_values = estimate(at_last_action(rewards, mask), values, mask, 1.0, 1.0)
    np.testing.assert_allclose(with_values.returns, found.returns, atol=1e-5, err_msg="lambda 1: values cancel")
    assert found.advantages[mask].mean() == pytest.approx(0, abs=1e-6)
    assert found.advantages[mask].std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert (with_values.advantages[~mask] == 0).all() and (with_values.values[~mask] == 0).all()


def test_the_discount_counts_actions_and_penalties_are_rewards():
    mask = np.array([[[True, False, False, True, True, False]]])
    rewards = at_last_action(np.array([[8.0]]), mask)
    found = estimate(rewards, np.zeros(mask.shape), mask, 0.5, 1.0)
    np.testing.assert_array_equal(found.returns[0, 0], [2, 0, 0, 4, 8, 0])
    penalties = np.array([[[1.0, 9, 9, 2, 4, 9]]])
    found = estimate(rewards - penalties, np.zeros(mask.shape), mask, 0.5, 1.0)
    np.testing.assert_array_equal(found.returns[0, 0], [-1 + (-2 + 4 / 2) / 2, 0, 0, -2 + 4 / 2, 4, 0])


def test_metrics():
    _, values, mask = random_case(3)
    found = estimate(at_last_action(np.arange(12.0).reshape(SHAPE[:2]), mask), values, mask, 1.0, 0.9)
    v, r = (np.concatenate([x[place][mask[place]] for place in np.ndindex(SHAPE[:2])]) for x in found[:2])
    got = found.metrics(mask)
    assert got["critic/explained_variance"] == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-5)
    assert (got["critic/value"], got["critic/return"]) == (pytest.approx(v.mean()), pytest.approx(r.mean()))
    nothing = estimate(np.ones(SHAPE), values, np.zeros(SHAPE, bool), 1.0, 1.0)
    assert all(map(np.isnan, nothing.metrics(np.zeros(SHAPE, bool)).values()))
    equal = estimate(at_last_action(np.ones(SHAPE[:2]), mask), np.zeros(SHAPE), mask, 1.0, 1.0)
    assert np.isnan(equal.metrics(mask)["critic/explained_variance"]) and (equal.advantages == 0).all()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_and_its_gradient(clip):
    """The gradient of a value is 0 where the clipped error is larger, and `V - R` elsewhere."""
    rng = np.random.default_rng(0)
    v, old, returns = rng.normal(size=(3, 5, 9))
    mask = rng.random((5, 9)) < 0.7

    def loss(values):
        tokens = TokenInputs(values, jnp.asarray(old), None, None, jnp.zeros_like(values), jnp.asarray(mask))
        return ValueObjective(clip).token_loss(tokens, jnp.asarray(returns))

    found, metrics = loss(jnp.asarray(v))
    near = v if clip is None else np.where(np.abs(v - old) <= clip, v, old + clip * np.sign(v - old))
    worse = (near - returns) ** 2 > (v - returns) ** 2
    assert clip is None or 3 < (worse & mask).sum() < mask.sum() - 3
    expected = np.where(worse, near - returns, v - returns) ** 2 / 2
    np.testing.assert_allclose(found, np.where(mask, expected, 0), rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda values: loss(values)[0].sum())(jnp.asarray(v))
    np.testing.assert_allclose(slope, np.where(mask & ~worse, v - returns, 0), rtol=1e-5, atol=1e-6)
    assert set(metrics) == (set() if clip is None else {"clipfrac"})
    if clip is not None:
        np.testing.assert_array_equal(metrics["clipfrac"], worse)
