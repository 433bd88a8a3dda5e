"""Tests all values per token against slow loops in float64 written from the formulas: the policy losses, the correction
for the sampler and the KL estimates. Gradients are compared with finite differences of these loops."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms import losses
from tunix_like.algorithms.losses import (
    POLICY_LOSSES,
    find_policy_loss,
    kl_estimate,
    log_ratio,
    loss_parameters,
    register_policy_loss_fn,
    reinforce,
)
from tunix_like.algorithms.off_policy import DEFAULT_UPPER, SamplerCorrection
from tunix_like.errors import UserError

RNG = np.random.default_rng(0)
STEPS = 8
RATIOS = np.stack(
    [
        np.zeros(STEPS),
        2e-4 * RNG.normal(size=STEPS),  # within GSPO's clip range
        0.15 * RNG.normal(size=STEPS),
        1.2 * RNG.normal(size=STEPS),
        np.array([25.0, -25.0, 1000.0, -1000.0, 0.1, 19.0, -19.0, 1000.0]),
        np.full(STEPS, 1000.0),
        np.full(STEPS, -1000.0),
        np.full(STEPS, 0.5),
        np.zeros(STEPS),
    ]
)
"""Log-ratios, one kind per row."""
SHAPE = (3, len(RATIOS), STEPS)
LENGTHS = np.array([8, 8, 7, 8, 8, 5, 3, 1, 0])
MASK = np.broadcast_to(np.arange(STEPS) < LENGTHS[:, None], SHAPE)
ADVANTAGES = np.broadcast_to(np.array([1.5, -0.75, 0.0], np.float32)[:, None, None], (*SHAPE[:2], 1))
BASE = RNG.uniform(-3, -0.05, SHAPE)
NEW = (BASE + np.minimum(RATIOS, 0)).astype(np.float32)
OLD = (BASE - np.maximum(RATIOS, 0)).astype(np.float32)
"""Log-probabilities, so at most 0."""
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def garbled(values: np.ndarray, garbage: float = math.nan) -> jax.Array:
    """Replaces the values at masked places by arbitrary numbers."""
    return jnp.asarray(np.where(MASK, values, garbage), jnp.float32)


def clamped(difference: float) -> float:
    return max(-20.0, min(20.0, difference))


# Each function returns the loss of one token and whether it counts as clipped. Its arguments are `new`, the
# log-probability, and `at`, the same number where the formula detaches it. `row` holds the log-ratios of the tokens of
# the completion.


def slow_ppo_clip(new, at, old, advantage, row, epsilon=0.2, epsilon_high=None, epsilon_c=None):
    return slow_clip(math.exp(clamped(new - old)), advantage, epsilon, epsilon_high, epsilon_c)


def slow_clip(ratio, advantage, low, high, bound):
    clipped = min(max(ratio, 1 - low), 1 + (low if high is None else high))
    loss = max(-ratio * advantage, -clipped * advantage)
    if advantage < 0 and bound is not None:
        loss = min(loss, -bound * advantage)
    return loss, (ratio - clipped) * advantage > 0


def slow_reinforce(new, at, old, advantage, row):
    return -advantage * new, None


def slow_gspo(new, at, old, advantage, row, epsilon=3e-4, epsilon_high=4e-4, epsilon_c=None):
    sequence = math.exp(clamped(sum(row) / len(row)))
    return slow_clip(sequence * math.exp(new - at), advantage, epsilon, epsilon_high, epsilon_c)


def slow_cispo(new, at, old, advantage, row, epsilon=0.2, epsilon_high=None):
    ratio = math.exp(clamped(at - old))
    clipped = min(max(ratio, 1 - epsilon), 1 + (epsilon if epsilon_high is None else epsilon_high))
    return -clipped * advantage * new, clipped != ratio


def slow_dppo(new, at, old, advantage, row, dppo_mask_high=0.2, dppo_mask_low=0.2, kl_tau=1e-3):
    moved = math.exp(at) - math.exp(old)
    dropped = moved > dppo_mask_high if advantage > 0 else moved < -dppo_mask_low
    difference = clamped(new - old)
    return (0.0 if dropped else -advantage * math.exp(difference)) + kl_tau * difference**2, dropped


def slow_dppo_kl(new, at, old, advantage, row, dppo_mask_high=0.05, dppo_mask_low=0.05, kl_tau=1e-3):
    own, sampler = math.exp(at), math.exp(old)
    divergence = sampler * clamped(old - at) + (1 - sampler) * math.log((1 - sampler) / (1 - own))
    if advantage > 0:
        dropped = own > sampler and divergence > dppo_mask_high
    else:
        dropped = own < sampler and divergence > dppo_mask_low
    difference = clamped(new - old)
    return (0.0 if dropped else -advantage * math.exp(difference)) + kl_tau * difference**2, dropped


def slow_sapo(new, at, old, advantage, row, sapo_tau_pos=1.0, sapo_tau_neg=1.05):
    tau = sapo_tau_pos if advantage > 0 else sapo_tau_neg
    ratio = math.exp(clamped(new - old))
    return -advantage * 4 / tau * (0.5 + 0.5 * math.tanh(tau * (ratio - 1) / 2)), None


def gmpo_clip(difference, advantage, epsilon, epsilon_high):
    high = epsilon if epsilon_high is None else epsilon_high
    return min(clamped(difference), high) if advantage > 0 else max(clamped(difference), -epsilon)


def slow_gmpo(new, at, old, advantage, row, epsilon=0.4, epsilon_high=None):
    clip = lambda difference: gmpo_clip(difference, advantage, epsilon, epsilon_high)  # noqa: E731
    mean = sum(map(clip, row)) / len(row)
    clipped = clip(at - old) != clamped(at - old)
    return -advantage * math.exp(mean + clip(new - old) - clip(at - old)), clipped


def slow_vespo(
    new, at, old, advantage, row, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0
):
    k, decay = (vespo_k_pos, vespo_lambda_pos) if advantage >= 0 else (vespo_k_neg, vespo_lambda_neg)
    weight = math.exp(clamped(sum(row)))
    return -(weight**k) * math.exp(decay - decay * weight) * advantage * new, None


SLOW = {
    "ppo_clip": slow_ppo_clip,
    "reinforce": slow_reinforce,
    "gspo": slow_gspo,
    "cispo": slow_cispo,
    "dppo": slow_dppo,
    "dppo_kl": slow_dppo_kl,
    "sapo": slow_sapo,
    "gmpo": slow_gmpo,
    "vespo": slow_vespo,
}
RATIO = {
    "gspo": lambda params, new, old, a, row: row.mean(),
    "gmpo": lambda params, new, old, a, row: (
        sum(gmpo_clip(d, a, params.get("epsilon", 0.4), params.get("epsilon_high")) for d in row) / len(row)
    ),
    "vespo": lambda params, new, old, a, row: row.sum(),
}
"""The logarithm of the ratio in the metrics, for losses whose ratio is not that of the token."""
CASES = [
    ("ppo_clip", {}),
    ("ppo_clip", {"epsilon": 0.1, "epsilon_high": 0.6}),
    ("ppo_clip", {"epsilon": 0.3}),
    ("ppo_clip", {"epsilon_c": 3.0}),
    ("reinforce", {}),
    ("gspo", {}),
    ("gspo", {"epsilon": 0.1, "epsilon_high": 0.2}),
    ("gspo", {"epsilon": 0.1, "epsilon_high": None, "epsilon_c": 3.0}),
    ("cispo", {}),
    ("cispo", {"epsilon": 0.1, "epsilon_high": 0.6}),
    ("dppo", {}),
    ("dppo", {"dppo_mask_high": 0.05, "dppo_mask_low": 0.4, "kl_tau": 0.5}),
    ("dppo_kl", {}),
    ("dppo_kl", {"dppo_mask_high": 0.01, "dppo_mask_low": 0.2, "kl_tau": 0.0}),
    ("sapo", {}),
    ("sapo", {"sapo_tau_pos": 0.5, "sapo_tau_neg": 3.0}),
    ("gmpo", {}),
    ("gmpo", {"epsilon": 0.1, "epsilon_high": 0.6}),
    ("vespo", {}),
    ("vespo", {"vespo_k_pos": 0.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 0.5}),
]
KL = {"kl": lambda d: d, "mse_kl": lambda d: d * d / 2, "low_var_kl": lambda d: math.exp(-d) + d - 1}


def by_token(function) -> np.ndarray:
    """Evaluates `function(new, old, advantage, row)` in floats at every unmasked token, and returns 0 elsewhere."""
    out = np.zeros(SHAPE)
    for place in np.argwhere(MASK):
        sequence, place = tuple(place[:2]), tuple(place)
        row = (NEW[sequence].astype(float) - OLD[sequence])[MASK[sequence]]
        out[place] = function(float(NEW[place]), float(OLD[place]), float(ADVANTAGES[sequence][0]), row)
    return out


def slope(function, at: float) -> float:
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6


def assert_same(actual, expected: np.ndarray) -> None:
    """Compares unmasked tokens. The tolerance is relative, because `exp(20)` is large."""
    np.testing.assert_allclose(np.asarray(actual)[MASK], expected[MASK], rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_losses_and_their_gradients_match_the_loops(name, params):
    slow, advantages, mask = SLOW[name], jnp.asarray(ADVANTAGES), jnp.asarray(MASK)

    def total(new):
        loss, metrics = find_policy_loss(name).function(new, garbled(OLD), advantages, mask, **params)
        return loss.sum(), (loss, metrics)

    (_, (loss, metrics)), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(garbled(NEW))
    assert_same(loss, by_token(lambda new, old, a, row: slow(new, new, old, a, row, **params)[0]))
    moved = lambda new, old, a, row: slope(lambda x: slow(x, new, old, a, row, **params)[0], new)  # noqa: E731
    assert_same(gradient, by_token(moved))
    assert np.isfinite(loss).all(), "a number even where masked, since it is weighted before it is masked"
    assert (np.asarray(gradient)[~MASK] == 0).all()
    if name == "reinforce":
        assert metrics == {}
        return
    if "pg_clipfrac" in metrics or name not in ("sapo", "vespo"):
        clipped = by_token(lambda new, old, a, row: slow(new, new, old, a, row, **params)[1])
        assert_same(metrics["pg_clipfrac"], clipped)
        assert clipped[:2].any(axis=(1, 2)).all() and 0 < clipped[MASK].mean() < 1, "each sign of A meets its bound"
    ratio = RATIO.get(name, lambda params, new, old, a, row: new - old)
    assert_same(metrics["is_ratio/mean"], by_token(lambda *args: math.exp(clamped(ratio(params, *args)))))


@pytest.mark.parametrize("name", sorted(SLOW))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    def total(new):
        loss, _ = find_policy_loss(name).function(new, garbled(NEW), jnp.asarray(ADVANTAGES), jnp.asarray(MASK))
        return loss.sum()

    gradient = jax.jit(jax.grad(total))(garbled(NEW))
    np.testing.assert_allclose(gradient, np.where(MASK, -ADVANTAGES, 0.0), rtol=1e-6, atol=0)


def test_every_loss_is_tested():
    built_in = {name for name in POLICY_LOSSES if ":" not in name}  # without those of other tests
    assert set(SLOW) == built_in == {name for name, _ in CASES}


@pytest.mark.parametrize("name", [*SLOW, *DEFAULT_UPPER, *KL])
def test_masked_places_change_no_value_and_no_gradient(name):
    """NaN and infinity at masked places change no value and no gradient."""
    advantages, mask = jnp.asarray(ADVANTAGES), jnp.asarray(MASK)

    def total(new, old):
        if name in SLOW:
            values = find_policy_loss(name).function(new, old, advantages, mask)[0]
        elif name in KL:
            values = kl_estimate(name, new, old, mask)
        else:
            correction = SamplerCorrection(name, 0.1, 2.0)
            values = correction.weights(correction.ratios(new, old, mask)) * new.clip(-1e3, 1e3)
        values = jnp.where(mask, values, 0.0)
        return values.sum(), values

    both = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, values = both(*(garbled(x, -1.0) for x in (NEW, OLD)))
    assert np.isfinite(values).all() and all(np.isfinite(g).all() for g in gradients)
    assert np.abs(gradients[0]).max() > 0.1
    for garbage in GARBAGE:
        found_gradients, found = both(garbled(NEW, garbage), garbled(OLD, -garbage))
        np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(np.where(MASK, found_gradients, 0), np.where(MASK, gradients, 0))
        if name in SLOW or name in KL:
            assert (np.asarray(found_gradients)[:, ~MASK] == 0).all()


@pytest.mark.parametrize("mode", KL)
def test_kl_estimates_and_their_gradients(mode):
    def total(new):
        values = kl_estimate(mode, new, garbled(OLD), jnp.asarray(MASK))
        return values.sum(), values

    gradient, values = jax.grad(total, has_aux=True)(garbled(NEW))
    assert_same(values, by_token(lambda new, old, a, row: KL[mode](clamped(new - old))))
    assert_same(gradient, by_token(lambda new, old, a, row: slope(lambda x: KL[mode](clamped(x - old)), new)))
    assert (np.asarray(values)[~MASK] == 0).all() and (np.asarray(gradient)[~MASK] == 0).all()


def test_expected_gradients_of_the_kl_losses():
    """The expected gradients over a softmax of five tokens are exact: 0 for k1, that of KL(pi || ref) for k2, and that
    of KL(ref || pi) for k3."""
    ref = jnp.log(jnp.asarray([0.3, 0.1, 0.2, 0.25, 0.15]))
    logits = jnp.asarray([0.2, -0.4, 0.9, 0.0, -0.1])
    everywhere = jnp.ones(5, bool)

    def expected_gradient(mode):
        weights = jax.lax.stop_gradient(jax.nn.softmax(logits))
        return jax.grad(lambda z: (weights * kl_estimate(mode, jax.nn.log_softmax(z), ref, everywhere)).sum())(logits)

    own = lambda z: (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref)).sum()  # noqa: E731
    other = lambda z: (jnp.exp(ref) * (ref - jax.nn.log_softmax(z))).sum()  # noqa: E731
    np.testing.assert_allclose(expected_gradient("kl"), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(expected_gradient("mse_kl"), jax.grad(own)(logits), atol=1e-6)
    np.testing.assert_allclose(expected_gradient("low_var_kl"), jax.grad(other)(logits), atol=1e-6)


def test_log_ratio_is_clamped_and_ignores_masked_places():
    found = np.asarray(log_ratio(jnp.asarray([1.0, 1000, -1000, jnp.nan, jnp.inf]), jnp.zeros(5), jnp.arange(5) < 3))
    np.testing.assert_array_equal(found, [1, 20, -20, 0, 0])


def test_the_registry(monkeypatch):
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(POLICY_LOSSES))
    with pytest.raises(UserError, match="policy loss 'ppo_clip' is already registered"):
        register_policy_loss_fn("ppo_clip")(reinforce)
    with pytest.raises(UserError, match="policy loss 'mine.py': names with '.' or ':' are reserved"):
        register_policy_loss_fn("mine.py")(reinforce)
    with pytest.raises(UserError, match="policy loss 'mine': behaviour must be 'trainer' or 'rollout', got 'sampler'"):
        register_policy_loss_fn("mine", behaviour="sampler")(reinforce)
    register_policy_loss_fn("mine", behaviour="rollout")(reinforce)
    found = find_policy_loss("mine")
    assert (found.function, found.behaviour, found.extra_term) == (reinforce, "rollout", True)
    with pytest.raises(UserError, match="unknown loss 'ppo-clip'. Did you mean 'ppo_clip'"):
        find_policy_loss("ppo-clip")
    assert loss_parameters("ppo_clip") == {"epsilon": 0.2, "epsilon_high": None, "epsilon_c": None}
    assert loss_parameters("dppo") == {"dppo_mask_high": 0.2, "dppo_mask_low": 0.2, "kl_tau": 1e-3}
    assert loss_parameters("reinforce") == {}
    own = {n: each for n, each in POLICY_LOSSES.items() if ":" not in n}
    assert {n: each.extra_term for n, each in own.items() if each.extra_term} == {"dppo": "kl_tau", "dppo_kl": "kl_tau"}
    assert [n for n, each in own.items() if each.behaviour == "rollout"] == ["dppo", "dppo_kl", "vespo"]
