"""Token losses, KL estimates, weights and log-probabilities against slow loops in float64, and their gradients where
the ratio would overflow."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.config import LOSS_AGG_MODES
from tunix_like.errors import UserError
from tunix_like.rl import losses
from tunix_like.rl.losses import (
    POLICY_LOSSES,
    aggregation_weights,
    find_policy_loss,
    kl_estimate,
    log_ratio,
    loss_parameters,
    ppo_clip,
    register_policy_loss_fn,
    reinforce,
    token_logprobs,
)

SHAPE = (2, 3, 8)
RNG = np.random.default_rng(0)
# Log-ratios inside the clip range, outside it, beyond the clamp and far beyond what exp can hold.
RATIOS = RNG.choice([0.0, 0.05, -0.1, 0.5, -0.7, 1.3, 3.0, 25.0, -25.0, 1000.0, -1000.0], SHAPE).astype(np.float32)
OLD = RNG.uniform(-3, 0, SHAPE).astype(np.float32)
ADVANTAGES = RNG.choice([-1.5, -0.5, 0.0, 0.5, 2.0], (2, 3, 1)).astype(np.float32)
ADVANTAGES[0, :2] = [[1.25], [-0.75]]
MASK = np.arange(8) < np.array([[8, 5, 1], [0, 8, 3]])[..., None]
NEW = np.where(MASK, OLD + RATIOS, np.where(RATIOS > 0, 1e30, -1e30)).astype(np.float32)
"""Log-probabilities; what stands in masked places is as bad as a float can be short of infinity."""


def on_device(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(array) for array in arrays]


def by_token(function, *arrays: np.ndarray) -> np.ndarray:
    """`function` of Python floats at every unmasked token, 0 elsewhere."""
    out = np.zeros(SHAPE)
    for place in np.ndindex(SHAPE):
        if MASK[place]:
            out[place] = function(*(float(np.broadcast_to(array, SHAPE)[place]) for array in arrays))
    return out


def assert_same(actual, expected: np.ndarray) -> None:
    """At unmasked tokens; `exp(20)` is large, so relative."""
    np.testing.assert_allclose(np.asarray(actual)[MASK], expected[MASK], rtol=2e-5, atol=1e-5)


def ratio_of(new: float, old: float) -> float:
    return math.exp(max(-20.0, min(20.0, new - old)))


@pytest.mark.parametrize(
    "params",
    [{}, {"epsilon": 0.1}, {"epsilon_high": 0.6}, {"epsilon_c": 3.0}, {"epsilon": 0.3, "epsilon_high": 0.5}],
    ids=str,
)
def test_ppo_clip(params):
    low = params.get("epsilon", 0.2)
    high, bound = params.get("epsilon_high", low), params.get("epsilon_c")

    def slow(new: float, old: float, advantage: float) -> float:
        ratio = ratio_of(new, old)
        loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
        return min(loss, -bound * advantage) if bound is not None and advantage < 0 else loss

    loss, metrics = ppo_clip(*on_device(NEW, OLD, ADVANTAGES, MASK), **params)
    assert_same(loss, by_token(slow, NEW, OLD, ADVANTAGES))
    assert_same(metrics["is_ratio/mean"], by_token(ratio_of, NEW, OLD))
    clipped = lambda n, o, a: float(a * (ratio_of(n, o) - min(max(ratio_of(n, o), 1 - low), 1 + high)) > 0)  # noqa: E731
    assert_same(metrics["pg_clipfrac"], by_token(clipped, NEW, OLD, ADVANTAGES))


def test_ppo_clip_has_the_gradient_of_reinforce_on_policy():
    """Same gradient, another value; a clipped token has none."""

    def gradient(loss, old):
        new, *others, mask = on_device(NEW, old, ADVANTAGES, MASK)
        return np.asarray(jax.grad(lambda new: jnp.where(mask, loss(new, *others, mask)[0], 0.0).sum())(new))

    on_policy = np.where(MASK, -ADVANTAGES, 0.0)
    np.testing.assert_allclose(gradient(reinforce, NEW), on_policy, rtol=0, atol=0)
    np.testing.assert_allclose(gradient(ppo_clip, NEW), on_policy, rtol=1e-6, atol=0)

    def slope(new: float, old: float, advantage: float) -> float:
        ratio = ratio_of(new, old)
        clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        return 0.0 if clipped or abs(new - old) > 20 else -advantage * ratio

    np.testing.assert_allclose(gradient(ppo_clip, OLD), by_token(slope, NEW, OLD, ADVANTAGES), rtol=2e-5, atol=1e-6)


def test_reinforce():
    loss, metrics = reinforce(*on_device(NEW, OLD, ADVANTAGES, MASK))
    assert_same(loss, by_token(lambda new, advantage: -advantage * new, NEW, ADVANTAGES))
    assert (np.asarray(loss)[~MASK] == 0).all() and metrics == {}


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("kl", lambda d: d),
        ("mse_kl", lambda d: d * d / 2),
        ("low_var_kl", lambda d: math.exp(-d) + d - 1),
    ],
)
def test_kl_estimates(mode, formula):
    clamped = lambda new, ref: formula(max(-20.0, min(20.0, new - ref)))  # noqa: E731
    found = kl_estimate(mode, *on_device(NEW, OLD, MASK))
    assert_same(found, by_token(clamped, NEW, OLD))
    assert (np.asarray(found)[~MASK] == 0).all()


def test_what_the_kl_losses_descend():
    """Exactly, over a softmax of five tokens: the expected gradient of k1 is 0, of k2 that of KL(pi || ref), of k3 that
    of KL(ref || pi)."""
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


@pytest.mark.parametrize("subject", ["ppo_clip", "dual_clip", "reinforce", "kl", "mse_kl", "low_var_kl"])
def test_gradients_are_finite_and_zero_where_masked(subject):
    start, old, advantages, mask = on_device(NEW, OLD, ADVANTAGES, MASK)

    def total(new):
        if subject == "dual_clip":
            values = ppo_clip(new, old, advantages, mask, epsilon_c=3.0)[0]
        elif subject in POLICY_LOSSES:
            values = find_policy_loss(subject)(new, old, advantages, mask)[0]
        else:
            values = kl_estimate(subject, new, old, mask)
        return values.sum()

    value, gradient = jax.value_and_grad(total)(start)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~MASK] == 0).all()
    assert np.abs(np.asarray(gradient)[MASK]).max() > 0.1


def test_log_ratio_is_clamped_and_blind_to_masked_places():
    found = np.asarray(log_ratio(jnp.asarray([1.0, 1000, -1000, jnp.nan, jnp.inf]), jnp.zeros(5), jnp.arange(5) < 3))
    np.testing.assert_array_equal(found, [1, 20, -20, 0, 0])


def slow_weights(mode: str, lengths: np.ndarray, counted: np.ndarray, max_tokens: int) -> np.ndarray:
    sequences = [place for place in np.ndindex(lengths.shape) if counted[place] and lengths[place] > 0]
    out = np.zeros(lengths.shape)
    for place in sequences:
        out[place] = {
            "token-mean": 1 / max(sum(int(lengths[p]) for p in sequences), 1),
            "sequence-mean-token-mean": 1 / (len(sequences) * int(lengths[place])),
            "seq-mean-token-sum": 1 / len(sequences),
            "sequence-mean-token-scale": 1 / (len(sequences) * max_tokens),
        }[mode]
    return out


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_weights(mode):
    lengths = np.array([[3, 1, 7], [0, 5, 2], [4, 4, 4]])
    nobody = np.zeros((3, 3), bool)
    some = np.array([[True, False, True], [True, True, True], [False, False, False]])
    for counted in (~nobody, some, nobody):
        found = aggregation_weights(mode, jnp.asarray(lengths), jnp.asarray(counted), 9)
        np.testing.assert_allclose(found, slow_weights(mode, lengths, counted, 9), rtol=1e-6)
        assert (np.asarray(found)[~counted | (lengths == 0)] == 0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_of_a_constant_loss(mode):
    """What the names say: a loss of 1 a token is 1 in both means, the mean length, or its share of the longest."""
    lengths = np.array([[3, 1], [8, 4]])
    weights = np.asarray(aggregation_weights(mode, jnp.asarray(lengths), jnp.ones((2, 2), bool), 8))
    expected = {"seq-mean-token-sum": 4.0, "sequence-mean-token-scale": 0.5}.get(mode, 1.0)
    assert (weights * lengths).sum() == pytest.approx(expected, rel=1e-6)


HIDDEN = RNG.normal(size=(23, 6)).astype(np.float32)
HEAD = RNG.normal(size=(6, 11)).astype(np.float32)
TARGETS = RNG.integers(0, 11, 23)


@pytest.mark.parametrize("chunk", [1000, 23, 8, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_in_chunks(chunk, temperature):
    """Value, entropy and both gradients, whatever the chunk, against the whole table of logits in float64."""
    logits = HIDDEN.astype(np.float64) @ HEAD / temperature
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    probs, onehot, weights = np.exp(table), np.eye(11)[TARGETS], np.cos(np.arange(23))
    by_logits = weights[:, None] * (onehot - probs) / temperature

    def total(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, jnp.asarray(TARGETS), temperature, chunk)
        # the entropy is a metric: it must not steer
        return (jnp.asarray(weights, jnp.float32) * logprobs).sum() + 100 * entropy.sum(), (logprobs, entropy)

    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (logprobs, entropy)), (by_hidden, by_head) = both(jnp.asarray(HIDDEN), jnp.asarray(HEAD))
    np.testing.assert_allclose(logprobs, table[np.arange(23), TARGETS], atol=1e-5)
    np.testing.assert_allclose(entropy, -(probs * table).sum(axis=1), atol=1e-5)
    np.testing.assert_allclose(by_hidden, by_logits @ HEAD.T, atol=1e-5)
    np.testing.assert_allclose(by_head, HIDDEN.T @ by_logits, atol=2e-5)


def test_token_logprobs_of_huge_logits_are_finite():
    head = jnp.asarray(HEAD) * 1e4
    values, gradient = jax.value_and_grad(lambda h: token_logprobs(h, head, jnp.asarray(TARGETS), 1.0, 8)[0].sum())(
        jnp.asarray(HIDDEN)
    )
    assert np.isfinite(values) and np.isfinite(gradient).all()
    assert np.isfinite(token_logprobs(jnp.asarray(HIDDEN), head, jnp.asarray(TARGETS), 1.0, 8)[1]).all()


def test_the_registry(monkeypatch):
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(POLICY_LOSSES))
    with pytest.raises(UserError, match="policy loss 'ppo_clip' is already registered"):
        register_policy_loss_fn("ppo_clip")(reinforce)
    register_policy_loss_fn("mine")(reinforce)
    assert find_policy_loss("mine") is reinforce
    with pytest.raises(UserError, match="unknown loss 'ppo-clip'. Did you mean 'ppo_clip'"):
        find_policy_loss("ppo-clip")
    assert set(loss_parameters(ppo_clip)) == {"epsilon", "epsilon_high", "epsilon_c"}
    assert loss_parameters(reinforce) == {}
