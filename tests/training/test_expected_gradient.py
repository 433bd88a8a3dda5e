"""Tests the expectation of the whole learner loss, by enumeration of all groups of a tiny model, against the exact
gradient.

A completion has one turn, or two turns with tokens of an environment between them.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.parameters import others_slow
from tunix_like.algorithms.distillation import teacher_advantages
from tunix_like.algorithms.losses import kl_estimate
from tunix_like.config.schema import TeacherConfig
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import StepInputs, step_inputs
from tunix_like.types import GroupBatch

from .repeated_prompts import PLAIN, difference, keep_gradient, make_model, make_objective, plain_step


class World(NamedTuple):
    """All seven possible completions, their lengths, and the mask of the tokens that the policy samples."""

    completions: np.ndarray
    lengths: np.ndarray
    sampled: np.ndarray


ONE_TURN = World(
    np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]], np.int32),
    np.array([1, 2, 2, 2, 2, 2, 2], np.int32),
    np.array([[True, False], *[[True, True]] * 6]),
)
"""Every completion of at most two tokens out of three, of which 0 ends it."""
TWO_TURNS = World(
    np.array([[0] * 4, *([1, 2, last, 0] for last in range(3)), *([2, 0, 1, last] for last in range(3))], np.int32),
    np.array([1, 3, 3, 3, 4, 4, 4], np.int32),
    np.array([[True] + [False] * 3, *[[True, False, True, False]] * 3, *[[True, False, False, True]] * 3]),
)
"""Turns of one token. 0 ends the trajectory; the environment replies to 1 with the token 2, and to 2 with 0 and 1; then
the policy samples another token. Thus the environment's tokens depend on the policy."""
WORLDS = {"one turn": ONE_TURN, "two turns": TWO_TURNS}
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


def token_logprobs(params, world=ONE_TURN):
    """Returns log-probabilities [7, T, 3] of every next token after the prompt and after each token of each
    completion."""
    rows = np.concatenate([np.broadcast_to(PROMPT, (7, 3)), world.completions], axis=1)
    return jax.nn.log_softmax(nnx.merge(tiny()[0], params)(jnp.asarray(rows))[:, 2:-1], axis=-1)


def own_logprobs(params, world=ONE_TURN):
    """Returns log-probabilities [7, T] of the sampled tokens of each completion, 0 elsewhere."""
    tokens = jnp.take_along_axis(token_logprobs(params, world), world.completions[..., None], axis=-1)[..., 0]
    return jnp.where(world.sampled, tokens, 0.0)


def chances(params, world=ONE_TURN):
    """Returns the probability of each completion by the plain model."""
    return jnp.exp(own_logprobs(params, world).sum(axis=1))


def one_group(world: World, draw: np.ndarray) -> StepInputs:
    """Returns the update of a single group of these three completions, with two bins per chunk."""
    lengths, scored = world.lengths[draw][None], np.ones((1, 3), bool)
    batch = GroupBatch(
        prompt_tokens=PROMPT[None],
        prompt_lengths=np.array([3], np.int32),
        completion_tokens=world.completions[draw][None],
        completion_lengths=lengths,
        rollout_logprobs=None,
        rewards=np.zeros((1, 3), np.float32),
        scored=scored,
        token_mask=world.sampled[draw][None],
    )
    width = world.completions.shape[1]
    return step_inputs(batch, np.ones(1, bool), pack(lengths, scored, width, Layout(1, 1, 2, False)))


@functools.cache
def every_group(mode: str, loss: str, kind: str = "one turn"):
    """Returns the function `(rewards, estimator) -> expected gradient` of the whole loss. Each of the `7^3` groups is a
    separate update, whose gradient is weighted by the group's probability."""
    sources = {name: {"advantage_estimator": each, **params} for name, (each, params, *_) in ASCENDS.items()}
    objective = make_objective(policy_loss_fn=loss, loss_agg_mode=mode, num_generations=3, sources=sources)
    updates = [one_group(WORLDS[kind], draw) for draw in DRAWS]
    data = jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *updates)
    graphdef, params = tiny()
    run = plain_step(graphdef, objective, keep_gradient, PLAIN)
    gradients = jax.jit(jax.vmap(lambda data: run(params, params, data)[1]))
    probabilities = np.asarray(chances(params, WORLDS[kind]), np.float64)[DRAWS].prod(axis=1)
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)

    def expected(name: str, rewards: np.ndarray):
        ids = jnp.full_like(data.batch.estimator_ids, objective.sources[name])
        batch = data.batch._replace(rewards=jnp.asarray(rewards[DRAWS])[:, None], estimator_ids=ids)
        found = gradients(data._replace(batch=batch))
        return jax.tree.map(lambda g: np.einsum("n,n...->...", probabilities, np.asarray(g, np.float64)), found)

    return expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("name", ASCENDS)
def test_expected_gradient_equals_the_exact_gradient(name, kind):
    """The loss is the whole learner loss under `seq-mean-token-sum`, over all groups of three of all completions of a
    prompt. `token-mean` rescales it by the lengths, which depend on the completions."""
    *_, rewards, factors = ASCENDS[name]
    draws = {k: np.array(list(itertools.product(range(7), repeat=k))) for k in factors}

    def minus_objective(params):
        every = chances(params, WORLDS[kind])
        maxima = {k: (every[d].prod(axis=1) * rewards[d].max(axis=1)).sum() for k, d in draws.items()}
        return -sum(factor * maxima[k] for k, factor in factors.items())

    true = jax.jit(jax.grad(minus_objective))(tiny()[1])
    assert difference(every_group("seq-mean-token-sum", "ppo_clip", kind)(name, rewards), true) <= 1e-5
    if name == "rloo" and kind == "one turn":
        assert difference(every_group("seq-mean-token-sum", "reinforce")(name, rewards), true) <= 1e-5
        other = every_group("token-mean", "ppo_clip")(name, rewards)
        along = optax.tree.vdot(other, true) / optax.tree.vdot(true, true)
        assert difference(jax.tree.map(lambda g: g / along, other), true) > 0.05, "not even in its direction"


@pytest.mark.slow
def test_the_gradients_of_the_kl():
    """k1 in the reward has the gradient of the KL of whole completions. In the loss, k1 has expected gradient zero; k2
    and k3 have that of the KLs of next tokens at the sampled prefixes, which differs."""
    params, other = tiny()[1], jax.tree.map(lambda x: 3.0 * jnp.roll(x, 1, axis=-1), tiny()[1])
    reference, reference_tokens = own_logprobs(other), token_logprobs(other)

    def whole_kl(params):
        return (chances(params) * (own_logprobs(params) - reference).sum(axis=1)).sum()

    def per_prefix(params, reverse):
        ours, theirs = token_logprobs(params), reference_tokens
        p, q = (theirs, ours) if reverse else (ours, theirs)
        kl = jnp.where(ONE_TURN.sampled, (jnp.exp(p) * (p - q)).sum(-1), 0.0).sum(axis=1)
        return (jax.lax.stop_gradient(chances(params)) * kl).sum()

    def in_loss(params, mode):
        kl = jnp.where(
            ONE_TURN.sampled, kl_estimate(mode, own_logprobs(params), reference, jnp.asarray(ONE_TURN.sampled)), 0.0
        )
        return (jax.lax.stop_gradient(chances(params)) * kl.sum(axis=1)).sum()

    def in_reward(params):
        ours = own_logprobs(params)
        reward = jax.lax.stop_gradient(kl_estimate("kl", ours, reference, jnp.asarray(ONE_TURN.sampled)))
        weight = jax.lax.stop_gradient(chances(params)) * jnp.where(ONE_TURN.sampled, reward, 0.0).sum(axis=1)
        return (weight * ours.sum(axis=1)).sum()

    true = jax.grad(whole_kl)(params)
    assert difference(jax.grad(in_reward)(params), true) <= 1e-5
    assert float(optax.tree.norm(jax.grad(in_loss)(params, "kl"))) <= 1e-6
    assert difference(jax.grad(in_loss)(params, "mse_kl"), jax.grad(per_prefix)(params, False)) <= 1e-5
    assert difference(jax.grad(in_loss)(params, "low_var_kl"), jax.grad(per_prefix)(params, True)) <= 1e-5
    assert 0.26 < difference(jax.grad(in_loss)(params, "mse_kl"), true) < 0.28, "the figure of docs/algorithms.md"


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(WORLDS, "one turn"))
def test_the_expected_gradient_of_a_teachers_advantages(kind):
    """It is that of the sum of the next-token divergences KL(policy || teacher) at the sampled prefixes, and not that
    of the KL of whole completions. All completions are enumerated; those of an update are equal."""
    world, (graphdef, params) = WORLDS[kind], tiny()
    other = jax.tree.map(lambda x: 3.0 * jnp.roll(x, 1, axis=-1), params)
    sampled, every = jnp.asarray(world.sampled), np.arange(7)
    values = teacher_advantages(own_logprobs(other, world), own_logprobs(params, world), sampled)
    updates = [
        one_group(world, np.full(3, i))._replace(token_advantages=np.broadcast_to(values[i], (1, 3, *values[i].shape)))
        for i in every
    ]
    data = jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *updates)
    objective = make_objective(
        advantage_estimator="distillation",
        policy_loss_fn="ppo_clip",
        num_generations=3,
        teacher=TeacherConfig(path="x"),
    )
    run = plain_step(graphdef, objective, keep_gradient, PLAIN)
    gradients = jax.jit(jax.vmap(lambda data: run(params, params, data)[1]))(data)
    probabilities = np.asarray(chances(params, world), np.float64)
    found = jax.tree.map(lambda g: np.einsum("n,n...->...", probabilities, np.asarray(g, np.float64)), gradients)

    def at_prefixes(params):
        ours, theirs = token_logprobs(params, world), token_logprobs(other, world)
        kl = jnp.where(sampled, (jnp.exp(ours) * (ours - theirs)).sum(-1), 0.0).sum(axis=1)
        return (jax.lax.stop_gradient(chances(params, world)) * kl).sum()

    def of_completions(params):
        ratio = own_logprobs(params, world) - own_logprobs(other, world)
        return (chances(params, world) * ratio.sum(axis=1)).sum()

    assert difference(found, jax.grad(at_prefixes)(params)) <= 1e-5
    assert difference(found, jax.grad(of_completions)(params)) > 0.05
