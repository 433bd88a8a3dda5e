"""Tests the weights of the aggregations against slow loops, and the chunked log-probabilities and entropies, with their
gradients, against the full table of logits in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms.losses import aggregation_weights
from tunix_like.config.schema import LOSS_AGG_MODES
from tunix_like.models.log_probabilities import token_logprobs


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
def test_aggregation_of_a_constant_loss_has_the_documented_value(mode):
    """A loss of 1 per token aggregates to 1 in both means, to the mean length, or to its fraction of the longest
    length."""
    lengths = np.array([[3, 1], [8, 4]])
    weights = np.asarray(aggregation_weights(mode, jnp.asarray(lengths), jnp.ones((2, 2), bool), 8))
    expected = {"seq-mean-token-sum": 4.0, "sequence-mean-token-scale": 0.5}.get(mode, 1.0)
    assert (weights * lengths).sum() == pytest.approx(expected, rel=1e-6)


RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(23, 6)).astype(np.float32)
HEAD = RNG.normal(size=(6, 11)).astype(np.float32)
TARGETS = RNG.integers(0, 11, 23)
WEIGHTS = np.cos(np.arange(23))


def table_of(temperature: float) -> np.ndarray:
    """Returns the log-probabilities of all tokens in float64."""
    logits = HIDDEN.astype(np.float64) @ HEAD / temperature
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


LANES = 2


def in_lanes(hidden, head, temperature, chunk, entropy_gradient=False):
    """Arranges the 23 tokens in two rows. The last place is padding."""
    hidden = jnp.pad(hidden, ((0, 1), (0, 0))).reshape(LANES, -1, hidden.shape[-1])
    targets = jnp.pad(jnp.asarray(TARGETS), (0, 1)).reshape(LANES, -1)
    found = token_logprobs(hidden, head, targets, temperature, chunk, entropy_gradient)
    return tuple(x.reshape(-1)[:23] for x in found)


@pytest.mark.parametrize("chunk", [1000, 23, 8, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_token_logprobs_match_the_full_table(chunk, temperature):
    """Values, entropies and both gradients match the full table for any chunk size."""
    table = table_of(temperature)
    probs, onehot = np.exp(table), np.eye(11)[TARGETS]
    by_logits = WEIGHTS[:, None] * (onehot - probs) / temperature

    def total(hidden, head):
        logprobs, entropy = in_lanes(hidden, head, temperature, chunk)
        # The entropy is a metric here, so it must not contribute to the gradient.
        return (jnp.asarray(WEIGHTS, jnp.float32) * logprobs).sum() + 100 * entropy.sum(), (logprobs, entropy)

    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (logprobs, entropy)), (by_hidden, by_head) = both(jnp.asarray(HIDDEN), jnp.asarray(HEAD))
    np.testing.assert_allclose(logprobs, table[np.arange(23), TARGETS], atol=1e-5)
    np.testing.assert_allclose(entropy, -(probs * table).sum(axis=1), atol=1e-5)
    np.testing.assert_allclose(by_hidden, by_logits @ HEAD.T, atol=1e-5)
    np.testing.assert_allclose(by_head, HIDDEN.T @ by_logits, atol=2e-5)


@pytest.mark.parametrize("chunk", [1000, 8])
@pytest.mark.parametrize("steers", [True, False])
def test_gradient_of_the_entropy_matches_the_formula(chunk, steers):
    """The gradient is `dH/dz = -p (log p + H)`, where H is the entropy. It is computed only on request."""
    temperature = 0.7
    table = table_of(temperature)
    probs = np.exp(table)
    expected = -(probs * table).sum(axis=1)
    by_logits = -WEIGHTS[:, None] * probs * (table + expected[:, None]) / temperature

    def total(hidden, head):
        entropy = in_lanes(hidden, head, temperature, chunk, entropy_gradient=steers)[1]
        return (jnp.asarray(WEIGHTS, jnp.float32) * entropy).sum(), entropy

    (by_hidden, by_head), entropy = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD)
    np.testing.assert_allclose(entropy, expected, atol=1e-5)
    if not steers:
        assert not by_hidden.any() and not by_head.any()
        return
    assert np.abs(by_logits @ HEAD.T).max() > 0.1
    np.testing.assert_allclose(by_hidden, by_logits @ HEAD.T, atol=1e-5)
    np.testing.assert_allclose(by_head, HIDDEN.T @ by_logits, atol=2e-5)


def test_token_logprobs_of_huge_logits_are_finite():
    def total(hidden):
        logprobs, entropy = in_lanes(hidden, jnp.asarray(HEAD) * 1e4, 1.0, 8, True)
        return logprobs.sum() + entropy.sum()

    value, gradient = jax.value_and_grad(total)(jnp.asarray(HIDDEN))
    assert np.isfinite(value) and np.isfinite(gradient).all()
