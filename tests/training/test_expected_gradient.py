"""The whole learner loss in expectation, by enumeration of all groups of a tiny model, against the true gradient."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tunix_like.algorithms.losses import kl_estimate
from tunix_like.training.packing import Layout, pack
from tunix_like.training.train_step import StepInputs, step_inputs
from tunix_like.types import GroupBatch

from .repeated_prompts import PLAIN, difference, keep_gradient, make_model, make_objective, plain_step

COMPLETIONS = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]], np.int32)
"""Every completion of at most two tokens out of three, of which 0 ends it."""
COMPLETION_LENGTHS = np.array([1, 2, 2, 2, 2, 2, 2], np.int32)
TOKENS = np.arange(2)[None] < COMPLETION_LENGTHS[:, None]
BINARY = np.array([0, 1, 0, 0, 1, 0, 0], np.float32)
REAL = np.array([-0.9, 1.0, -0.6, 0.0, 1.4, 0.0, -1.1], np.float32)


HARMONIC = {1: 1.0, 2: 0.5}
ASCENDS = {
    "rloo": ("rloo", {}, REAL, {1: 1.0}),
    "maxrl": ("maxrl", {}, BINARY, HARMONIC),
    "maxrl to order 1": ("maxrl", {"truncation_order": 1}, REAL, {1: 1.0}),
    "maxrl to order 2": ("maxrl", {"truncation_order": 2}, REAL, HARMONIC),
    "maxpo": ("maxpo", {"k": 2}, REAL, {2: 1.0}),
    "pkpo of 2": ("pkpo", {"k": 2}, REAL, {2: 1.0}),
    "pkpo of 3": ("pkpo", {"k": 3}, REAL, {3: 1.0}),
}
"""Estimator, its parameters, a reward per completion, and its objective as a sum of max@k: `{k: factor}`. In groups of
three, Algorithm 1 of MaxRL has order 2 (on 0/1 rewards, whose maximum over k is pass@k)."""
PROMPT = np.array([1, 2, 2], np.int32)
DRAWS = np.array(list(itertools.product(range(7), repeat=3)))


@functools.cache
def tiny() -> tuple:
    return make_model(3, vocab_size=3, num_layers=1, hidden_size=8, head_dim=4, intermediate_size=8)


def token_logprobs(params):
    """Log-probabilities [7, 2, 3] of every next token after the prompt and the first token of each completion."""
    rows = np.concatenate([np.broadcast_to(PROMPT, (7, 3)), COMPLETIONS], axis=1)
    return jax.nn.log_softmax(nnx.merge(tiny()[0], params)(jnp.asarray(rows))[:, 2:4], axis=-1)


def own_logprobs(params):
    """Log-probabilities [7, 2] of the tokens of each completion, 0 beyond its length."""
    tokens = jnp.take_along_axis(token_logprobs(params), COMPLETIONS[..., None], axis=-1)[..., 0]
    return jnp.where(TOKENS, tokens, 0.0)


@jax.jit
def chances(params):
    """The probability of each completion, by the plain model."""
    return jnp.exp(own_logprobs(params).sum(axis=1))


def one_group(draw: np.ndarray) -> StepInputs:
    """The update of the one group of these three completions: two bins a chunk, of two tokens each."""
    lengths, scored = COMPLETION_LENGTHS[draw][None], np.ones((1, 3), bool)
    batch = GroupBatch(
        prompt_tokens=PROMPT[None],
        prompt_lengths=np.array([3], np.int32),
        completion_tokens=COMPLETIONS[draw][None],
        completion_lengths=lengths,
        rollout_logprobs=None,
        rewards=np.zeros((1, 3), np.float32),
        scored=scored,
    )
    return step_inputs(batch, np.ones(1, bool), pack(lengths, scored, 2, Layout(1, 1, 2, False)))


@functools.cache
def every_group(mode: str, loss: str):
    """`(rewards, estimator) -> expected gradient` of the whole loss: each of the `7^3` groups is an update of its own,
    its gradient weighted by the group's probability."""
    sources = {name: {"advantage_estimator": each, **params} for name, (each, params, *_) in ASCENDS.items()}
    objective = make_objective(policy_loss_fn=loss, loss_agg_mode=mode, num_generations=3, sources=sources)
    updates = [one_group(draw) for draw in DRAWS]
    data = jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *updates)
    graphdef, params = tiny()
    run = plain_step(graphdef, objective, keep_gradient, PLAIN)
    gradients = jax.jit(jax.vmap(lambda data: run(params, params, data)[1]))
    probabilities = np.asarray(chances(params), np.float64)[DRAWS].prod(axis=1)
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)

    def expected(name: str, rewards: np.ndarray):
        ids = jnp.full_like(data.batch.estimator_ids, objective.sources[name])
        batch = data.batch._replace(rewards=jnp.asarray(rewards[DRAWS])[:, None], estimator_ids=ids)
        found = gradients(data._replace(batch=batch))
        return jax.tree.map(lambda g: np.einsum("n,n...->...", probabilities, np.asarray(g, np.float64)), found)

    return expected


@pytest.mark.parametrize("name", ASCENDS)
def test_the_expected_gradient_is_the_true_one(name):
    """Of the whole learner loss under `seq-mean-token-sum`, over all groups of three of all completions of a prompt;
    `token-mean` rescales it by the lengths, which depend on what was said."""
    *_, rewards, factors = ASCENDS[name]
    draws = {k: np.array(list(itertools.product(range(7), repeat=k))) for k in factors}

    def minus_objective(params):
        every = chances(params)
        maxima = {k: (every[d].prod(axis=1) * rewards[d].max(axis=1)).sum() for k, d in draws.items()}
        return -sum(factor * maxima[k] for k, factor in factors.items())

    true = jax.jit(jax.grad(minus_objective))(tiny()[1])
    assert difference(every_group("seq-mean-token-sum", "ppo_clip")(name, rewards), true) <= 1e-5
    if name == "rloo":
        assert difference(every_group("seq-mean-token-sum", "reinforce")(name, rewards), true) <= 1e-5
        other = every_group("token-mean", "ppo_clip")(name, rewards)
        along = optax.tree.vdot(other, true) / optax.tree.vdot(true, true)
        assert difference(jax.tree.map(lambda g: g / along, other), true) > 0.05, "not even in its direction"


def test_the_gradients_of_the_kl():
    """k1 in the reward has the gradient of the KL of whole completions. In the loss, k1 has none, and k2 and k3 have
    that of the next-token KLs at the sampled prefixes, which is another one."""
    params, other = tiny()[1], jax.tree.map(lambda x: 3.0 * jnp.roll(x, 1, axis=-1), tiny()[1])
    reference, reference_tokens = own_logprobs(other), token_logprobs(other)

    def whole_kl(params):
        return (chances(params) * (own_logprobs(params) - reference).sum(axis=1)).sum()

    def per_prefix(params, reverse):
        ours, theirs = token_logprobs(params), reference_tokens
        p, q = (theirs, ours) if reverse else (ours, theirs)
        kl = jnp.where(TOKENS, (jnp.exp(p) * (p - q)).sum(-1), 0.0).sum(axis=1)
        return (jax.lax.stop_gradient(chances(params)) * kl).sum()

    def in_loss(params, mode):
        kl = jnp.where(TOKENS, kl_estimate(mode, own_logprobs(params), reference, jnp.asarray(TOKENS)), 0.0)
        return (jax.lax.stop_gradient(chances(params)) * kl.sum(axis=1)).sum()

    def in_reward(params):
        ours = own_logprobs(params)
        reward = jax.lax.stop_gradient(kl_estimate("kl", ours, reference, jnp.asarray(TOKENS)))
        weight = jax.lax.stop_gradient(chances(params)) * jnp.where(TOKENS, reward, 0.0).sum(axis=1)
        return (weight * ours.sum(axis=1)).sum()

    true = jax.grad(whole_kl)(params)
    assert difference(jax.grad(in_reward)(params), true) <= 1e-5
    assert float(optax.tree.norm(jax.grad(in_loss)(params, "kl"))) <= 1e-6
    assert difference(jax.grad(in_loss)(params, "mse_kl"), jax.grad(per_prefix)(params, False)) <= 1e-5
    assert difference(jax.grad(in_loss)(params, "low_var_kl"), jax.grad(per_prefix)(params, True)) <= 1e-5
    assert 0.26 < difference(jax.grad(in_loss)(params, "mse_kl"), true) < 0.28, "the figure of docs/algorithms.md"
