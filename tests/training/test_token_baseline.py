"""Tests OTB: score norms, advantages of tokens, and the learner."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.parameters import others_slow
from tests.tiny_model import HF
from tunix_like import OTBConfig, OTBLearner
from tunix_like.algorithms.token_baseline import token_baseline_advantages
from tunix_like.config.schema import MeshConfig
from tunix_like.models.log_probabilities import token_score_norms
from tunix_like.models.sharding import build_mesh

from .repeated_prompts import PLAIN, difference, keep_gradient, make_objective, plain_step
from .small_learner import ROWS, TOKENIZER, collect, make, make_model, params_of, varied, watch_sampler
from .test_environments import LENGTHS as TURN_LENGTHS
from .test_environments import TURNS, Vowels
from .test_expected_gradient import DRAWS, REAL, WORLDS, chances, one_group, tiny, token_logprobs


def norms_of_logits(logits, targets):
    """Returns the squared norms of the gradients of log-probabilities with respect to their logits, in float64."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return ((np.eye(logits.shape[-1])[targets] - p) ** 2).sum(-1)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_score_norms_are_those_of_all_logits(cap):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (2, 7, 8)), jax.random.normal(keys[1], (8, 11))
    targets = jax.random.randint(keys[2], (2, 7), 0, 11)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    logits = (logits if cap is None else cap * np.tanh(logits / cap)) / 0.7
    expected = norms_of_logits(logits, np.asarray(targets))
    for chunk in (3, 1000):
        found = token_score_norms(hidden, head, targets, 0.7, chunk, cap)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def in_loops(rewards, counted, norms, sampled):
    """Returns the advantages of one group: the baseline of each token by two loops over completions and tokens."""
    out = np.zeros(norms.shape)
    own = [norms[j][sampled[j]] for j in range(len(rewards))]
    for i in np.flatnonzero(counted):
        others = [j for j in np.flatnonzero(counted) if j != i]
        for n, t in enumerate(np.flatnonzero(sampled[i]), start=1):
            energy = {j: own[j][:n].sum() for j in others if len(own[j]) >= n}
            if sum(energy.values()) > 0:
                baseline = sum(w * rewards[j] for j, w in energy.items()) / sum(energy.values())
            else:
                baseline = np.mean([rewards[j] for j in others]) if others else rewards[i]
            out[i, t] = rewards[i] - baseline
    return out


@pytest.mark.parametrize("holes", [False, True])
def test_advantages_match_the_definition(holes):
    random = np.random.default_rng(1)
    norms = random.uniform(0, 2, (6, 5, 9))
    lengths = random.integers(1, 10, (6, 5))
    sampled = np.arange(9) < lengths[..., None]
    if holes:
        sampled &= random.uniform(size=sampled.shape) < 0.7
    sampled[..., 0] = True
    counted = random.uniform(size=(6, 5)) < 0.8 if holes else np.ones((6, 5), bool)
    counted[0] = [True, False, True, False, False]
    norms[1] = 0.0  # no energy: the mean of the others
    rewards = random.normal(size=(6, 5))
    found = token_baseline_advantages(rewards, counted, norms, sampled)
    expected = np.stack([in_loops(*group) for group in zip(rewards, counted, norms, sampled, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    plain = tunix_like.compute_advantages(np.where(counted[1], rewards[1], np.nan), "rloo")
    np.testing.assert_allclose(found[1], np.where(sampled[1], plain[:, None], 0), atol=1e-6)
    equal = token_baseline_advantages(np.full_like(rewards, 0.1), counted, norms, sampled)
    assert not equal.any(), "equal rewards give exactly 0"


def test_the_difference_to_the_baseline_with_the_completion_itself():
    """With the completion's own energy in both sums, as in the paper and verl, the advantage shrinks by the share of
    the others in the energy."""
    random = np.random.default_rng(2)
    norms, rewards = random.uniform(0.1, 2, (1, 4, 6)), random.normal(size=(1, 4))
    energy = norms.cumsum(-1)
    whole = rewards[..., None] - (energy * rewards[..., None]).sum(1, keepdims=True) / energy.sum(1, keepdims=True)
    share = 1 - energy / energy.sum(1, keepdims=True)
    found = token_baseline_advantages(rewards, np.ones((1, 4), bool), norms, np.ones((1, 4, 6), bool))
    np.testing.assert_allclose(found * share, whole, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(WORLDS, "one turn"))
def test_the_gradient_estimate_is_unbiased(kind):
    """Over all groups of three of all completions, whose lengths differ, the whole loss has the gradient of the
    expected reward. With a baseline that contains the completion itself it does not."""
    world, (graphdef, params) = WORLDS[kind], tiny()
    norms = norms_of_logits(np.asarray(token_logprobs(params, world), np.float64), world.completions)
    counted = np.ones((1, 3), bool)
    energy = np.where(world.sampled, norms, 0.0).cumsum(-1)

    def biased(draw):
        weights = np.where(world.sampled[draw], energy[draw], 0.0)
        baseline = (weights * REAL[draw][:, None]).sum(0) / np.maximum(weights.sum(0), 1e-9)
        return np.where(world.sampled[draw], REAL[draw][:, None] - baseline, 0.0)[None]

    def unbiased(draw):
        return token_baseline_advantages(REAL[draw][None], counted, norms[draw][None], world.sampled[draw][None])

    objective = make_objective(
        advantage_estimator="otb", policy_loss_fn="reinforce", loss_agg_mode="seq-mean-token-sum", num_generations=3
    )
    run = plain_step(graphdef, objective, keep_gradient, PLAIN)
    gradients = jax.jit(jax.vmap(lambda data: run(params, params, data)[1]))
    probabilities = np.asarray(chances(params, world), np.float64)[DRAWS].prod(axis=1)
    true = jax.grad(lambda params: -(chances(params, world) * REAL).sum())(params)

    def expected(advantages):
        updates = [one_group(world, draw)._replace(token_advantages=np.float32(advantages(draw))) for draw in DRAWS]
        found = gradients(jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *updates))
        return jax.tree.map(lambda g: np.einsum("n,n...->...", probabilities, np.asarray(g, np.float64)), found)

    assert difference(expected(unbiased), true) <= 1e-5
    assert difference(expected(biased), true) > 0.05


def one_step(**arguments):
    """Trains one step with learning rate 1. Returns the learner, its samples, rewards, shown advantages and metrics."""

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append((rewards, advantages))
        return {}

    kept = []
    made = make(
        OTBConfig(num_generations=4), learner=OTBLearner, actor_optimizer=optax.sgd(1.0), max_steps=1,
        metric_fns=[keep], **{"reward": varied} | arguments,
    )  # fmt: skip
    sampled = watch_sampler(made)
    row = collect(made, shuffle=False)[0]
    return made, sampled[0], *kept[0], row


@pytest.mark.slow
@pytest.mark.parametrize("turns", others_slow(["one turn", "several turns"], "one turn"))
def test_one_step_equals_brute_force(turns):
    """The policy moves by the gradient of `-A log pi`, with score norms from whole texts; an unscored completion takes
    no part."""

    def scored(prompts, completions, **columns):
        return [None if i in (2, 9) else float(len(text)) for i, text in enumerate(completions)]

    several = turns == "several turns"
    own = {"rollout": TURN_LENGTHS, "environment": Vowels, "environment_config": TURNS} if several else {}
    made, out, total, shown, _ = one_step(reward={"length": scored}, **own)
    shape, start, model = out.lengths.shape, params_of(make_model()), make_model()
    total = np.reshape(total, shape)
    prompts = [TOKENIZER.encode_prompt(row["prompt"], False)[1] for row in ROWS]

    def logits(model, p, i):
        tokens = out.tokens[p, i, : out.lengths[p, i]]
        return model(jnp.asarray([*prompts[p], *tokens])[None])[0, len(prompts[p]) - 1 : -1], tokens

    sampled = np.arange(out.tokens.shape[2]) < out.lengths[..., None]
    sampled &= True if out.token_mask is None else out.token_mask
    norms = np.zeros(sampled.shape)
    for p, i in np.ndindex(shape):
        every, tokens = logits(model, p, i)
        norms[p, i, : len(tokens)] = norms_of_logits(np.asarray(every, np.float64), tokens)
    groups = zip(total, ~np.isnan(total), norms, sampled, strict=True)
    advantages = np.stack([in_loops(*group) for group in groups])
    assert np.ptp(advantages, axis=-1).max() > 1e-3, "the tokens of a completion differ"

    def loss(params):
        policy, value = nnx.merge(made.graphdef, params), 0.0
        for p, i in np.argwhere(~np.isnan(total)):
            every, tokens = logits(policy, p, i)
            own = jnp.take_along_axis(jax.nn.log_softmax(every), jnp.asarray(tokens)[:, None], axis=-1)[:, 0]
            value -= (own * advantages[p, i, : len(tokens)]).sum()
        return value / (~np.isnan(total)).sum()

    expected = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, start))
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), start, made.params)
    assert float(optax.tree.norm(expected)) > 1e-2 and difference(moved, expected) < 2e-4
    means = advantages.sum(-1) / np.maximum(sampled.sum(-1), 1)
    np.testing.assert_allclose(np.reshape(shown, shape), means, atol=1e-4)


@pytest.mark.slow
def test_mesh_equals_a_single_device():
    wide = HF | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16}
    rows = []
    for mesh in (None, build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=["data", "fsdp", "tp"]))):
        model = tunix_like.load_model(wide, init="random", mesh=mesh)[0]
        rows.append(one_step(mesh=mesh, model=model)[-1])
    for name in ("loss", "grad_norm", "advantage/abs_mean"):
        assert rows[0][f"train/{name}"] == pytest.approx(rows[1][f"train/{name}"], rel=1e-4)


def test_a_source_with_a_sparse_estimator_leaves_the_others_whole():
    """Completions of `pkpo` with advantage 0 are left out of the update; those of `otb`, whose advantages come later,
    are not."""
    objective = make_objective(
        advantage_estimator="otb", num_generations=4, sources={"b": {"advantage_estimator": "pkpo", "k": 2}}
    )
    assert objective.skips_zero_advantages
    rewards = np.array([[0, 1, 0, 1], [0, 1, 0, 1]], np.float32)
    scored, ids = np.ones((2, 4), bool), np.array([0, 1], np.int32)
    advantages = np.array([[0, 0, 0, 0], [0, 2, 0, 2]], np.float32)
    found = objective.live_rows(rewards, scored, ids, advantages)
    np.testing.assert_array_equal(found, [[True] * 4, [False, True, False, True]])
