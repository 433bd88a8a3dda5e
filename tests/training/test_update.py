"""Tests the compiled step against the plain model on repeated prompts: gradients, layouts, mini-batches, and inputs
that must not change the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.parameters import others_slow
from tunix_like.algorithms import losses
from tunix_like.algorithms import registry as estimators
from tunix_like.algorithms.losses import TokenInputs
from tunix_like.algorithms.objective import build_objective
from tunix_like.algorithms.off_policy import DEFAULT_UPPER
from tunix_like.config.schema import LOSS_AGG_MODES, AlgorithmConfig
from tunix_like.step import packing
from tunix_like.step.packing import Layout

from .repeated_prompts import (
    BATCH,
    BY_SOURCE,
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
    TRACES,
    VOCABULARY,
    WIDTH,
    Reinforce,
    data_of,
    difference,
    gradient_of,
    keep_gradient,
    make_objective,
    plain_logprobs,
    plain_step,
    repeated,
    repeated_logprobs,
    row_values,
    rows_of,
    step,
)

BY_GROUP = LAYOUTS[0]
"""One set and one chunk per group."""

# --- shared prompts ------------------------------------------------------------------------------------------------


def test_shared_prefix_equals_the_repeated_prompt():
    gradient, metrics, advantages = gradient_of(data_of())
    loss, expected = repeated()(PARAMS, EVERYONE, None, None)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)
    np.testing.assert_allclose(advantages, row_values(OBJECTIVES["on-policy"], EVERYONE)[0], atol=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient)), "every parameter is reached"
    gap = np.abs(np.asarray(plain_logprobs()(PARAMS)) - BATCH.rollout_logprobs)[MASK]
    assert metrics["logprob_gap/mean"] == pytest.approx(gap.mean(), rel=1e-4)
    assert metrics["logprob_gap/max"] == pytest.approx(gap.max(), rel=1e-4)


@pytest.mark.slow
def test_completions_of_one_token():
    """The width is one: only the prompt goes through the layers."""
    short = BATCH._replace(
        completion_tokens=BATCH.completion_tokens[..., :1], completion_lengths=np.minimum(LENGTHS, 1)
    )
    gradient, metrics, _ = gradient_of(data_of(batch=short))
    loss, expected = repeated(longest=1)(PARAMS, EVERYONE, None, None)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.fixture(scope="module")
def other_logprobs() -> dict[str, np.ndarray]:
    """Returns log-probabilities of slightly different weights: those before an update, and those of a reference."""
    at = plain_logprobs(0.7)
    nearby = lambda scale: jax.tree.map(lambda x: x * (1 + scale), PARAMS)  # noqa: E731
    return {"old_logprobs": np.asarray(at(nearby(0.03))), "ref_logprobs": np.asarray(at(nearby(-0.1)))}


@pytest.mark.slow
def test_shared_prefix_with_every_term(other_logprobs):
    """The loss has the ratio, the reference, the entropy, the correction for the sampler and the temperature. Layers
    are recomputed and log-probabilities are computed in chunks, which do not change the values."""
    old, ref = other_logprobs["old_logprobs"], other_logprobs["ref_logprobs"]
    options = PLAIN._replace(temperature=0.7, entropy_gradient=True)
    data = data_of(**other_logprobs)
    gradient, metrics, _ = gradient_of(data, objective="every term", options=options)
    loss, expected = repeated("every term", 0.7)(PARAMS, EVERYONE, old, ref)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert 0 < metrics["pg_clipfrac"] < 1, "some tokens are clipped, others not"
    new, entropy = (np.asarray(x) for x in jax.jit(lambda params: repeated_logprobs(params, 0.7))(PARAMS))
    ratio, d = np.exp(new - old)[MASK], (new - ref)[MASK]
    assert metrics["is_ratio/mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics["is_ratio/max"] == pytest.approx(ratio.max(), rel=1e-4)
    assert metrics["kl"] == pytest.approx((np.exp(-d) + d - 1).mean(), rel=1e-3)
    assert metrics["entropy"] == pytest.approx(entropy[MASK].mean(), rel=1e-4)
    correction = np.minimum(np.exp(old - BATCH.rollout_logprobs)[MASK], 2)
    assert metrics["sampler_is/mean"] == pytest.approx(correction.mean(), rel=1e-4)
    above = data._replace(old_logprobs=data.old_logprobs + 3)
    most = gradient_of(above, objective="every term", options=options)[1]["is_ratio/max"]
    assert most == pytest.approx(ratio.max() * np.exp(-3), rel=1e-4), "places beyond the end have no ratio"
    slower = options._replace(logits_chunk=7, remat=True)
    other, other_metrics, _ = gradient_of(data, objective="every term", options=slower)
    assert difference(other, gradient) <= 5e-6
    assert other_metrics == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sampler_correction_by_completion(layout, other_logprobs):
    """Compares the loss, and metrics over completions in every layout."""
    old, ref = other_logprobs["old_logprobs"], other_logprobs["ref_logprobs"]
    mine = np.where(MASK, old - BATCH.rollout_logprobs, 0).sum(-1)
    ratios = np.exp(mine)
    inside = (ratios >= 0.005) & (ratios <= 30)
    weights = np.where(inside, ratios, 0)
    expected = {
        "mean": weights.mean(),
        "ratio_mean": ratios.mean(),
        "outside_frac": 1 - inside.mean(),
        "ess": weights.sum() ** 2 / (weights**2).sum() / weights.size,
    }
    assert 0.1 < inside.mean() < 0.9
    given = BATCH._replace(scored=np.ones((PROMPTS, SIZE), bool))
    found = gradient_of(data_of(layout, batch=given, **other_logprobs), objective="masked")[1]
    for name, value in expected.items():
        assert found[f"sampler_is/{name}"] == pytest.approx(value, rel=1e-4), name
    gradient, metrics, _ = gradient_of(data_of(**other_logprobs), objective="masked")
    loss, wanted = repeated("masked")(PARAMS, EVERYONE, old, ref)
    assert difference(gradient, wanted) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_correction_is_one_if_the_sampler_is_the_policy(mode, other_logprobs):
    """The gradient is bitwise that of a run without a correction."""
    batch = BATCH._replace(rollout_logprobs=other_logprobs["old_logprobs"])
    data = data_of(batch=batch, **other_logprobs)
    terms = {"policy_loss_fn": "ppo_clip", "beta": 0.3, "updates": 2}
    corrected = make_objective(sampler_is=mode, sampler_is_min=0.9, **terms)

    def found(objective):
        return jax.jit(plain_step(GRAPHDEF, objective, keep_gradient, PLAIN))(PARAMS, PARAMS, data)[1:3]

    (plain, _), (gradient, metrics) = found(make_objective(**terms)), found(corrected)
    jax.tree.map(np.testing.assert_array_equal, gradient, plain)
    one = {name: float(value) for name, value in metrics.items() if name.startswith("sampler_is/")}
    assert one.pop("sampler_is/outside_frac") == 0 and list(one.values()) == pytest.approx([1, 1, 1])


# --- batches of every kind ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", others_slow(LAYOUTS, LAYOUTS[4]), ids=str)
def test_gradient_does_not_depend_on_the_layout(layout):
    """In every aggregation the gradient does not depend on the division of prompts into sets and of completions into
    chunks. Other programs round differently: one unit in the last place of the weights changes this gradient by up to
    6e-6."""
    for mode in range(len(LOSS_AGG_MODES)):
        batch = BATCH._replace(estimator_ids=np.full(PROMPTS, mode, np.int32))
        whole, whole_metrics, _ = gradient_of(data_of(batch=batch), objective="every mode")
        gradient, metrics, _ = gradient_of(data_of(layout, batch=batch), objective="every mode")
        assert difference(gradient, whole) <= 1e-5
        assert metrics == pytest.approx(whole_metrics, rel=1e-5)


@pytest.mark.slow
def test_shared_bin_equals_separate_bins(monkeypatch):
    together = data_of()
    gradient, metrics, _ = gradient_of(together)
    monkeypatch.setattr(packing, "ROWS_PER_BIN", 1)
    alone = data_of()
    assert (together.packed.start > 0).any() and not alone.packed.start.any()
    expected, expected_metrics, _ = gradient_of(alone)
    assert difference(gradient, expected) <= 1e-5
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


@pytest.mark.slow
def test_consecutive_mini_batches_equal_the_plain_model():
    """There are two updates, of groups [0, 2] and then [1]. Advantages use the whole rollout batch, weights the
    update's own groups, and ratios the weights before the first update."""
    old = np.asarray(plain_logprobs()(PARAMS))
    reference = np.zeros_like(old)
    update_by = step("every term", PLAIN._replace(entropy_gradient=True), optax.sgd(0.5))
    params, expected = PARAMS, PARAMS
    for groups in ([0, 2], [1]):
        data = data_of(Layout(2, 2, SIZE, True), groups, most_prompts=2, old_logprobs=old, ref_logprobs=reference)
        params, *_, advantages = update_by(params, (optax.EmptyState(), optax.EmptyState()), data)
        _, gradient = repeated("every term")(expected, jnp.asarray(data.in_update), old, reference)
        assert advantages.shape == (PROMPTS, SIZE) and np.abs(advantages).min(axis=1).max() > 0
        expected = jax.tree.map(lambda x, g: x - 0.5 * g, expected, gradient)
    moved = jax.tree.map(jnp.subtract, params, PARAMS)
    assert difference(moved, jax.tree.map(jnp.subtract, expected, PARAMS)) <= 1e-5


SPARSE = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]], np.float32)
"""The completion [2, 1] is unscored. Without it the rewards of the last group are equal."""


@pytest.mark.parametrize(
    ("name", "live"),
    [
        pytest.param("grpo", [4, 4, 0], marks=pytest.mark.slow),
        pytest.param("maxrl", [4, 4, 0], marks=pytest.mark.slow),
        ("maxpo", [4, 0, 0]),  # with two or three successes of four, each pair of the others has a success: no signal
        pytest.param("pkpo", [1, 3, 0], marks=pytest.mark.slow),  # failures do not increase a maximum
        pytest.param("passk", [4, 0, 0], marks=pytest.mark.slow),
    ],
)
def test_omitting_zero_advantages_does_not_change_the_gradient(name, live):
    """Groups and single completions of advantage 0 affect only the weights. A group that is split over chunks contains
    only the others. One compilation is used for all estimators."""
    objective, ids = OBJECTIVES["mixed"], np.zeros(PROMPTS, np.int32) + [*["grpo"], *BY_SOURCE].index(name)
    batch = BATCH._replace(rewards=SPARSE, estimator_ids=ids)
    whole, _, advantages = gradient_of(data_of(BY_GROUP, batch=batch), objective="mixed")
    rows = objective.live_rows(SPARSE, BATCH.scored, ids, advantages)
    assert objective.skips_zero_advantages and rows.sum(axis=1).tolist() == live
    assert (rows == (advantages != 0)).all()
    left, *_ = gradient_of(data_of(BY_GROUP, batch=batch, rows=rows), objective="mixed")
    assert difference(left, whole) <= 1e-6
    split = data_of(Layout(1, 1, 1, False), batch=batch, rows=rows)
    assert split.packed.sets == np.count_nonzero(live) and (split.packed.length > 0).sum() == sum(live)
    every_row = data_of(Layout(1, 1, 1, False), batch=batch)  # the same layout: another one changes the order of sums
    both = (gradient_of(data, objective="mixed")[0] for data in (split, every_row))
    assert difference(*both) <= 1e-6


def test_mixed_estimators_in_one_step():
    """Each group has the advantages of its estimator, and the gradient is the sum over the groups. The step is compiled
    once for all estimators."""

    def run(ids, groups):
        batch = BATCH._replace(rewards=SPARSE, estimator_ids=np.asarray(ids, np.int32))
        return gradient_of(data_of(BY_GROUP, batch=batch, rows=rows_of(groups)), objective="mixed")

    chosen = [0, 2, 4]  # grpo, pkpo and maxrl
    gradient, _, advantages = run(chosen, range(PROMPTS))
    traces = TRACES["mixed"]
    alone = [run([number] * PROMPTS, [group]) for group, number in enumerate(chosen)]
    assert difference(gradient, jax.tree.map(lambda *parts: sum(parts), *(part for part, *_ in alone))) <= 1e-6
    np.testing.assert_array_equal(advantages, [values[group] for group, (*_, values) in enumerate(alone)])
    assert TRACES["mixed"] == traces


@pytest.mark.slow
def test_prompt_weights_multiply_the_loss_of_each_group():
    """The advantages of RLOO are proportional to the rewards."""
    factors = np.array([0.5, 2.0, 1.25], np.float32)
    weighted = gradient_of(data_of(batch=BATCH._replace(prompt_weights=factors)))[0]
    scaled = gradient_of(data_of(batch=BATCH._replace(rewards=BATCH.rewards * factors[:, None])))[0]
    assert difference(weighted, scaled) < 1e-6
    assert difference(weighted, gradient_of(data_of())[0]) > 0.1


@pytest.mark.slow
def test_kl_and_entropy_need_groups_without_signal(other_logprobs):
    """KL and entropy give completions of advantage 0 a gradient too, so omitting them would change the gradient."""
    rewards = np.where(np.arange(PROMPTS)[:, None] == 1, 0.7, BATCH.rewards).astype(np.float32)
    batch, objective, ids = BATCH._replace(rewards=rewards), OBJECTIVES["every term"], np.zeros(PROMPTS, np.int32)
    how = {"objective": "every term", "options": PLAIN._replace(temperature=0.7, entropy_gradient=True)}
    whole, _, advantages = gradient_of(data_of(batch=batch, **other_logprobs), **how)
    live = objective.live_rows(rewards, BATCH.scored, ids, advantages)
    assert not advantages[1].any() and (live == BATCH.scored).all()
    left, *_ = gradient_of(data_of(batch=batch, rows=live, **other_logprobs), **how)
    assert difference(left, whole) <= 1e-6
    other, *_ = gradient_of(data_of(batch=batch, rows=rows_of([0, 2]), **other_logprobs), **how)
    assert difference(other, whole) > 0.01


def test_gradient_of_an_empty_batch_is_zero():
    none = np.zeros((PROMPTS, SIZE), bool)
    nothing, metrics, _ = gradient_of(data_of(BY_GROUP, rows=none), objective="mixed")
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    assert (metrics["loss"], metrics["grad_norm"], metrics["update/skipped"]) == (0, 0, 0)
    assert np.isnan(metrics["entropy"]), "the mean of no tokens"


SAMPLED = MASK & (np.random.default_rng(5).random(MASK.shape) < 0.6)
SAMPLED[0, 1] = False
"""The sampled tokens: some tokens of each completion, and none of one. The others are those of an environment."""


class PerToken(Reinforce):
    """Returns an advantage for every token."""

    def advantages(self, rewards, scored, lengths, ids):
        return rewards[..., None] * jnp.linspace(-1.0, 2.0, WIDTH_OF_COMPLETIONS)[None, None]


class NoAdvantages(Reinforce):
    def advantages(self, rewards, scored, lengths, ids):
        return jnp.zeros_like(rewards)


WIDTH_OF_COMPLETIONS = MASK.shape[-1]


def plain_gradient(objective, mask, ids):
    """Returns the gradient of the plain model, over the tokens of `mask`."""

    def loss(params):
        rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, mask.sum(-1)))
        everyone = jnp.ones(scored.shape, bool)
        advantages = objective.advantages(rewards, scored, lengths, ids)
        weights = objective.weights(scored, everyone, lengths, EVERYONE, ids)[..., None]
        new, entropy = repeated_logprobs(params, 1.0)
        tokens = TokenInputs(new, new, jnp.asarray(BATCH.rollout_logprobs), None, entropy, jnp.asarray(mask))
        by_token = advantages if advantages.ndim == 3 else advantages[..., None]
        return (weights * objective.token_loss(tokens, by_token)[0]).sum()

    return jax.jit(jax.grad(loss))(PARAMS)


@pytest.mark.parametrize("mode", range(len(LOSS_AGG_MODES)))
def test_masked_tokens_are_excluded_from_loss_and_aggregation(mode):
    """They are excluded from the loss and from the aggregation, in all four modes. They stay in the context of later
    tokens."""
    ids = np.full(PROMPTS, mode, np.int32)
    batch = BATCH._replace(token_mask=SAMPLED, estimator_ids=ids)
    found, metrics, _ = gradient_of(data_of(batch=batch), objective="every mode")
    assert difference(found, plain_gradient(OBJECTIVES["every mode"], SAMPLED, jnp.asarray(ids))) <= 1e-5
    assert metrics["update/empty"] == 0
    nothing = batch._replace(token_mask=np.zeros_like(SAMPLED))
    _, metrics, _ = gradient_of(data_of(batch=nothing), objective="every mode")
    assert metrics["update/empty"] == 1 and metrics["grad_norm"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [0.0, -1e4, np.inf], ids=["zero", "low", "infinite"])
def test_values_at_masked_tokens_do_not_change_the_gradient(garbage, other_logprobs):
    """The test changes the log-probabilities at masked tokens, whose ratios may overflow, and the last token of a
    completion, as a target."""
    batch = BATCH._replace(token_mask=SAMPLED)

    def found(changed: bool):
        values = {**other_logprobs, "rollout_logprobs": BATCH.rollout_logprobs}
        if changed:
            values = {name: np.where(SAMPLED, value, np.float32(garbage)) for name, value in values.items()}
        tokens = batch.completion_tokens.copy()
        for index in np.argwhere(LENGTHS > 0) if changed else ():
            last = (*index, LENGTHS[tuple(index)] - 1)
            tokens[last] = tokens[last] if SAMPLED[last] else (tokens[last] + 5) % VOCABULARY
        own = batch._replace(rollout_logprobs=values.pop("rollout_logprobs"), completion_tokens=tokens)
        return gradient_of(data_of(batch=own, **values), objective="every term")

    one, other = found(False), found(True)
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    np.testing.assert_equal(one[1], other[1])
    assert np.isfinite(one[1]["grad_norm"]) and one[1]["grad_norm"] > 0


def test_mask_of_all_tokens_equals_no_mask():
    """Gradient and metrics are bitwise equal."""
    whole = BATCH._replace(token_mask=MASK)
    one, other = (gradient_of(data_of(batch=batch)) for batch in (BATCH, whole))
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    np.testing.assert_equal(one[1], other[1])


@pytest.mark.slow
def test_advantages_of_single_tokens():
    batch = BATCH._replace(token_mask=SAMPLED)
    by_token = np.asarray(PerToken().advantages(BATCH.rewards, None, None, None), np.float32)
    run = jax.jit(plain_step(GRAPHDEF, NoAdvantages(), keep_gradient, PLAIN))
    _, found, _, _ = run(PARAMS, PARAMS, data_of(batch=batch)._replace(token_advantages=by_token))
    expected = plain_gradient(PerToken(), SAMPLED, jnp.zeros(PROMPTS, jnp.int32))
    assert difference(found, expected) <= 1e-5
    assert difference(found, plain_gradient(Reinforce(), SAMPLED, jnp.zeros(PROMPTS, jnp.int32))) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("loss", others_slow(["nan in the loss", "nan in the gradient"], "nan in the gradient"))
def test_non_finite_loss_does_not_change_weights_and_optimizer(loss, monkeypatch):
    """One token of one completion is affected. Adam's counts and moments are unchanged too."""

    def broken(logprobs, old, advantages, mask):
        if loss == "nan in the loss":
            return (-advantages * logprobs).at[0, 0, 0].set(jnp.nan), {}
        return -advantages * logprobs + jnp.sqrt(jax.lax.stop_gradient(logprobs) - logprobs), {}  # 0, of slope -inf

    monkeypatch.setitem(losses.POLICY_LOSSES, "broken", losses.PolicyLoss(broken, "trainer", True))
    config = AlgorithmConfig(
        advantage_estimator="rloo", policy_loss_fn="broken", loss_agg_mode="token-mean", num_generations=SIZE
    )
    optimizer = optax.adam(1e-3)
    state = optimizer.init(PARAMS)
    run = jax.jit(plain_step(GRAPHDEF, build_objective(config, WIDTH, 1), optimizer, PLAIN))
    params, after, metrics, advantages = run(PARAMS, state, data_of())
    assert metrics["update/skipped"] == 1 and np.isfinite(advantages).all()
    for kept, given in zip(jax.tree.leaves((params, after)), jax.tree.leaves((PARAMS, state)), strict=True):
        np.testing.assert_array_equal(kept, given)


def test_uncounted_tokens_do_not_change_the_gradient():
    """These are tokens beyond a row's length, unscored completions, completions that are not trained, and dropped
    groups. Other values in them, or their omission, do not change the gradient."""
    scored, trained = BATCH.scored.copy(), np.ones((PROMPTS, SIZE), bool)
    scored[1, 1:] = False  # a single scored completion, which is too few
    trained[0, 1] = trained[2, 3] = False
    counted = scored & trained & (scored.sum(axis=1, keepdims=True) > 1)
    batch = BATCH._replace(scored=scored, trained=trained)
    inside = np.arange(WIDTH) < PROMPT_LENGTHS[:, None]
    other = batch._replace(
        prompt_tokens=np.where(inside, BATCH.prompt_tokens, 7).astype(np.int32),
        completion_tokens=np.where(MASK & counted[..., None], BATCH.completion_tokens, 3).astype(np.int32),
    )
    gradient, *_ = gradient_of(data_of(batch=batch))
    assert difference(gradient_of(data_of(batch=other))[0], gradient) <= 1e-6
    assert difference(gradient_of(data_of(batch=batch, rows=counted))[0], gradient) <= 1e-6
    assert difference(gradient_of(data_of())[0], gradient) > 0.1, "they would teach otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("bad", others_slow([np.nan, np.inf], np.inf))
def test_non_finite_advantage_does_not_change_weights_and_optimizer(bad, monkeypatch):
    """Weights and the optimizer's state are bitwise unchanged."""
    monkeypatch.setattr(estimators, "ADVANTAGE_ESTIMATORS", dict(estimators.ADVANTAGE_ESTIMATORS))
    estimators.register_advantage_estimator("raw")(lambda rewards, *, scored, lengths: rewards)
    objective, adam = make_objective(advantage_estimator="raw"), optax.adamw(0.1, weight_decay=0.1)
    run = jax.jit(plain_step(GRAPHDEF, objective, adam, PLAIN))
    data = data_of(BY_GROUP)
    *moved, _, _ = run(PARAMS, jax.jit(adam.init)(PARAMS), data)
    assert difference(moved[0], PARAMS) > 0.1 and float(optax.tree.norm(moved[1][0].mu)) > 1e-3
    rewards = BATCH.rewards.copy()
    rewards[1, 2] = bad
    *after, _, advantages = run(*moved, data._replace(batch=data.batch._replace(rewards=rewards)))
    assert not np.isfinite(advantages[1, 2])
    jax.tree.map(np.testing.assert_array_equal, after, moved)
    rewards[1, 2], scored = bad, BATCH.scored.copy()
    scored[1, 2] = False
    *after, _, _ = run(*moved, data._replace(batch=data.batch._replace(rewards=rewards, scored=scored)))
    assert difference(after[0], moved[0]) > 1e-3, "an unscored completion's reward is nobody's business"
