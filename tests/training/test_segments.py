"""Tests completions of several segments in the training step: each segment is a separate row after the prompt, with the
advantage and the weight of its completion.

The oracle is the plain model on one row for each segment.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tunix_like.algorithms.losses import TokenInputs
from tunix_like.config.schema import LOSS_AGG_MODES
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import DeltaRule
from tunix_like.step.forward import batch_logprobs
from tunix_like.types import GroupBatch

from .repeated_prompts import (
    BATCH,
    EVERYONE,
    GRAPHDEF,
    LAYOUTS,
    LENGTHS,
    MASK,
    OBJECTIVES,
    PARAMS,
    PLAIN,
    PROMPT_LENGTHS,
    PROMPTS,
    SIZE,
    STEPS,
    VOCABULARY,
    WIDTH,
    EveryMode,
    data_of,
    difference,
    gradient_of,
    keep_gradient,
    make_model,
    make_objective,
    packed_as,
    plain_step,
)

STARTS = {(0, 0): [0, 2, 4], (0, 2): [0, 1], (2, 0): [0, 3], (2, 1): [0, 1, 2, 3, 4]}
"""The starts of the segments of some completions. The others have a single segment."""


def segments_of(starts: dict[tuple[int, int], list[int]]) -> np.ndarray:
    out = np.zeros((PROMPTS, SIZE, STEPS), np.int32)
    for index, places in starts.items():
        for place in places:
            out[index][place:] = place
    return out


SEGMENTS = segments_of(STARTS)
SAMPLED = MASK & (SEGMENTS == 0)
SAMPLED[0, 0] = [True, True, False, True, True]
SAMPLED[2, 0] = [True, True, False, True, False]
SAMPLED[2, 1] = [True, False, True, False, True]
BATCH_OF_SEGMENTS = BATCH._replace(segment_start=SEGMENTS, token_mask=SAMPLED)


def segment_logprobs(params, graphdef=GRAPHDEF, batch: GroupBatch = BATCH_OF_SEGMENTS) -> tuple:
    """Returns log-probabilities and entropies `[P G T]` of the plain model. Each segment follows its own copy of its
    prompt."""
    segments = np.asarray(batch.segment_start)
    place = [
        (p, i, start, np.flatnonzero((segments[p, i] == start) & MASK[p, i]))
        for p, i in np.ndindex(PROMPTS, SIZE)
        for start in np.unique(segments[p, i][MASK[p, i]])
    ]
    rows, real = np.zeros((2, len(place), WIDTH + STEPS), np.int32)
    for row, (p, i, _, own) in enumerate(place):
        tokens = [*batch.prompt_tokens[p, : PROMPT_LENGTHS[p]], *batch.completion_tokens[p, i, own]]
        rows[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
    table = jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(rows), jnp.asarray(real)), axis=-1)
    found, entropy = jnp.zeros((2, PROMPTS, SIZE, STEPS))
    for row, (p, i, _, own) in enumerate(place):
        values = table[row, PROMPT_LENGTHS[p] - 1 :][: len(own)]
        found = found.at[p, i, own].set(values[jnp.arange(len(own)), batch.completion_tokens[p, i, own]])
        entropy = entropy.at[p, i, own].set(-(jnp.exp(values) * values).sum(-1))
    return found, entropy


def plain_gradient(objective, ids):
    """Returns the gradient of the sum over segments, each with the advantage and the weight of its completion."""

    def loss(params):
        rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, SAMPLED.sum(-1)))
        advantages = objective.advantages(rewards, scored, lengths, ids)
        everyone = jnp.ones(scored.shape, bool)
        weights = objective.weights(scored, everyone, lengths, EVERYONE, ids)
        new, entropy = segment_logprobs(params)
        tokens = TokenInputs(new, new, jnp.asarray(BATCH.rollout_logprobs), None, entropy, jnp.asarray(SAMPLED))
        return (weights[..., None] * objective.token_loss(tokens, advantages[..., None])[0]).sum()

    return jax.jit(jax.grad(loss))(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", others_slow(range(len(LOSS_AGG_MODES)), 0), ids=LOSS_AGG_MODES)
def test_gradient_equals_the_sum_over_segments_as_separate_rows(mode):
    ids = np.full(PROMPTS, mode, np.int32)
    batch = BATCH_OF_SEGMENTS._replace(estimator_ids=ids)
    found, _, _ = gradient_of(data_of(batch=batch), objective="every mode")
    assert difference(found, plain_gradient(OBJECTIVES["every mode"], jnp.asarray(ids))) <= 1e-5
    whole, _, _ = gradient_of(data_of(batch=batch._replace(segment_start=None)), objective="every mode")
    assert difference(whole, found) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"policy_loss_fn": "gmpo", "off_policy_mask_threshold": 0.1}], ids=str)
def test_sequence_ratio_includes_all_segments(changes):
    """GSPO, GMPO and the off-policy mask have one value per completion, over the sampled tokens of all its segments."""
    settings = {"policy_loss_fn": "gspo", "loss_agg_mode": "sequence-mean-token-mean", "beta": 0.0} | changes
    objective = make_objective(**settings, updates=2)
    old = np.asarray(jax.jit(segment_logprobs)(jax.tree.map(lambda x: 1.001 * x, PARAMS))[0])
    run = jax.jit(plain_step(GRAPHDEF, objective, keep_gradient, PLAIN))
    _, found, _, _ = run(PARAMS, PARAMS, data_of(batch=BATCH_OF_SEGMENTS, old_logprobs=old))

    def loss(params):
        rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, SAMPLED.sum(-1)))
        ids = jnp.zeros(PROMPTS, jnp.int32)
        advantages = objective.advantages(rewards, scored, lengths, ids)
        weights = objective.weights(scored, jnp.ones(scored.shape, bool), lengths, EVERYONE, ids)
        new, entropy = segment_logprobs(params)
        tokens = TokenInputs(
            new, jnp.asarray(old), jnp.asarray(BATCH.rollout_logprobs), None, entropy, jnp.asarray(SAMPLED)
        )
        return (weights[..., None] * objective.token_loss(tokens, advantages[..., None])[0]).sum()

    assert difference(found, jax.jit(jax.grad(loss))(PARAMS)) <= 1e-5


CONFIG = nnx.merge(GRAPHDEF, PARAMS).config
MODELS = {
    "plain": (GRAPHDEF, PARAMS),
    "windows": make_model(windows=(3, None)),
    "recurrent": make_model(delta_rule=DeltaRule(1, 2, 8, 8, 4), recurrent_layers=(True, False)),
    "blocked": (nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0), attention="blocked"))[0], PARAMS),
}


@pytest.mark.parametrize("model", others_slow(MODELS, "blocked"))
@pytest.mark.parametrize("layout", others_slow([LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], LAYOUTS[1]), ids=str)
def test_logprobs_equal_those_of_separate_rows(model, layout):
    graphdef, params = MODELS[model]
    run = jax.jit(functools.partial(batch_logprobs, graphdef, options=PLAIN))
    found = np.asarray(run(params, BATCH_OF_SEGMENTS, packed_as(layout)))
    expected = np.asarray(jax.jit(functools.partial(segment_logprobs, graphdef=graphdef))(params)[0])
    np.testing.assert_allclose(found[MASK], expected[MASK], rtol=0, atol=1e-5)


OTHERS = {"old_logprobs": BATCH.rollout_logprobs * 1.01, "ref_logprobs": BATCH.rollout_logprobs * 0.9}


@pytest.mark.slow
def test_single_segment_equals_no_segments():
    """Gradient and metrics are bitwise equal with and without a segment array."""
    batches = [BATCH._replace(token_mask=SAMPLED, segment_start=start) for start in (None, np.zeros_like(SEGMENTS))]
    one, other = (gradient_of(data_of(batch=batch, **OTHERS), objective="every term") for batch in batches)
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    np.testing.assert_equal(one[1], other[1])


@pytest.mark.slow
def test_masked_target_does_not_change_the_gradient():
    """The target is the last token of a segment, which is not in the context of another token."""
    changed = BATCH.completion_tokens.copy()
    places = [(p, i, t) for p, i, t in np.argwhere(MASK & ~SAMPLED)
              if t + 1 == LENGTHS[p, i] or SEGMENTS[p, i, t + 1] == t + 1]  # fmt: skip
    assert len(places) >= 3
    for place in places:
        changed[place] = (changed[place] + 5) % VOCABULARY

    def garbage(values):
        return np.where(SAMPLED, values, np.float32(-1e4))

    other = BATCH_OF_SEGMENTS._replace(completion_tokens=changed, rollout_logprobs=garbage(BATCH.rollout_logprobs))
    cases = [(BATCH_OF_SEGMENTS, OTHERS), (other, {name: garbage(values) for name, values in OTHERS.items()})]
    one, two = (gradient_of(data_of(batch=batch, **given), objective="every term") for batch, given in cases)
    jax.tree.map(np.testing.assert_array_equal, one[0], two[0])
    np.testing.assert_equal(one[1], two[1])
    assert one[1]["grad_norm"] > 0


def test_segments_do_not_attend_to_each_other():
    """Other tokens in one segment change no bit of the log-probabilities in the others."""
    run = jax.jit(functools.partial(batch_logprobs, GRAPHDEF, options=PLAIN))
    before = np.asarray(run(PARAMS, BATCH_OF_SEGMENTS, packed_as(LAYOUTS[0])))
    for start in (0, 2):
        tokens = BATCH.completion_tokens.copy()
        own = (SEGMENTS[0, 0] == start) & MASK[0, 0]
        tokens[0, 0, own] = (tokens[0, 0, own] + 7) % VOCABULARY
        after = np.asarray(run(PARAMS, BATCH_OF_SEGMENTS._replace(completion_tokens=tokens), packed_as(LAYOUTS[0])))
        np.testing.assert_array_equal(after[0, 0, ~own], before[0, 0, ~own])
        np.testing.assert_array_equal(after[0, 1:], before[0, 1:])
        assert (after[0, 0, own] != before[0, 0, own]).all()


class Counting(EveryMode):
    """A loss that is the advantage of every counted token."""

    def token_loss(self, tokens, advantages):
        return jnp.where(tokens.mask, advantages, 0.0), {}


@pytest.mark.slow
def test_rewritten_history_does_not_change_the_weights():
    """There are two turns of two tokens each. In one batch a reply of one token is appended, in the other the row
    restarts with three tokens. The loss is the sum of weight times advantage over tokens, in each of the four modes."""
    lengths = np.full((PROMPTS, SIZE), 4, np.int32)
    short = BATCH._replace(completion_tokens=np.zeros((PROMPTS, SIZE, 7), np.int32), scored=np.ones_like(BATCH.scored),
                           rollout_logprobs=np.zeros((PROMPTS, SIZE, 7), np.float32))  # fmt: skip
    appended = np.isin(np.arange(7), [0, 1, 3, 4]) & np.ones((PROMPTS, SIZE, 1), bool)
    rewritten = appended.copy()
    rewritten[0, 1] = rewritten[1, :2] = np.isin(np.arange(7), [0, 1, 5, 6])
    start = np.where(rewritten[..., 6:] & (np.arange(7) >= 2), 2, 0).astype(np.int32)
    longer = np.where(rewritten[..., 6], 7, 5).astype(np.int32)
    run = jax.jit(plain_step(GRAPHDEF, Counting(), keep_gradient, PLAIN))

    def loss(mode: int, batch: GroupBatch) -> float:
        batch = batch._replace(estimator_ids=np.full(PROMPTS, mode, np.int32))
        _, _, metrics, advantages = run(PARAMS, PARAMS, data_of(batch=batch))
        assert np.abs(advantages).max() > 0.1
        return float(metrics["loss"])

    assert (appended.sum(-1) == lengths).all() and (rewritten.sum(-1) == lengths).all()
    for mode in range(len(LOSS_AGG_MODES)):
        plain = short._replace(token_mask=appended, completion_lengths=lengths + 1)
        other = short._replace(token_mask=rewritten, completion_lengths=longer, segment_start=start)
        uncentred = [batch._replace(rewards=np.abs(BATCH.rewards)) for batch in (plain, other)]
        one, two = (loss(mode, batch) for batch in uncentred)
        assert one == pytest.approx(two, rel=1e-6, abs=1e-9)
