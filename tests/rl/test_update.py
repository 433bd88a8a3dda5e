"""The compiled step against the plain model on repeated prompts: gradients, micro- and mini-batches, and what it
computes.

The oracle writes every prompt out once per completion and sends the rows through `model(tokens, attention_mask)`; it
shares no attention, no log-probability code and no loop over micro-batches with the step.
"""

from __future__ import annotations

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tunix_like.config import LOSS_AGG_MODES, AlgorithmConfig
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.rl import estimators, losses, update
from tunix_like.rl.losses import TokenInputs
from tunix_like.rl.objective import build_objective
from tunix_like.rl.packing import pack, unpack
from tunix_like.rl.update import (
    MOST_SKIPPED,
    ForwardOptions,
    SkipWatch,
    UpdateInput,
    batch_logprobs,
    micro_logprobs,
    micro_loss,
    update_input,
    update_step,
)
from tunix_like.sampling import decoding
from tunix_like.types import GroupBatch

PROMPTS, SIZE, WIDTH, STEPS, VOCABULARY = 3, 4, 6, 5, 19
PROMPT_LENGTHS = np.array([6, 3, 1], np.int32)
LENGTHS = np.array([[5, 1, 3, 2], [1, 1, 1, 1], [4, 5, 2, 1]], np.int32)
MASK = np.arange(STEPS) < LENGTHS[..., None]


def make_model(seed: int = 0, **changes) -> tuple:
    """(graphdef, params) of a small decoder whose every weight, bias and norm matters."""
    numbers = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "qkv_bias": True,
        "qk_norm": True,
    }
    graphdef, state = nnx.split(Decoder(DecoderConfig(**numbers | changes), rngs=nnx.Rngs(seed)))
    rng = np.random.default_rng(seed)
    spread = lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


GRAPHDEF, PARAMS = make_model()


def make_batch() -> GroupBatch:
    """Ragged prompts and completions, a group of one-token completions, one unscored completion. Padding is filled with
    tokens that mean something, since masks come from lengths alone."""
    rng = np.random.default_rng(1)
    scored = np.ones((PROMPTS, SIZE), bool)
    scored[2, 1] = False
    return GroupBatch(
        prompt_tokens=rng.integers(0, VOCABULARY, (PROMPTS, WIDTH)).astype(np.int32),
        prompt_lengths=PROMPT_LENGTHS,
        completion_tokens=rng.integers(0, VOCABULARY, (PROMPTS, SIZE, STEPS)).astype(np.int32),
        completion_lengths=LENGTHS,
        rollout_logprobs=rng.uniform(-3, 0, (PROMPTS, SIZE, STEPS)).astype(np.float32),
        rewards=np.where(scored, rng.normal(size=(PROMPTS, SIZE)), 0).astype(np.float32),
        scored=scored,
    )


BATCH = make_batch()


def make_objective(updates: int = 1, sources=None, **changes):
    plain = {"advantage_estimator": "rloo", "policy_loss_fn": "reinforce", "loss_agg_mode": "seq-mean-token-sum"}
    settings = plain | {"kl_loss_mode": "low_var_kl", "kl_in_reward": False, "num_generations": SIZE} | changes
    return build_objective(AlgorithmConfig(**settings), STEPS, updates, sources)


BY_SOURCE = {"maxpo": {"k": 2}, "pkpo": {"k": 2}, "passk": {"k": 2}, "maxrl": {}}
OBJECTIVES = {
    "on-policy": make_objective(),
    "every term": make_objective(
        policy_loss_fn="ppo_clip",
        loss_agg_mode="token-mean",
        beta=0.3,
        entropy_coef=0.2,
        sampler_is="token",
        updates=2,
    ),
    "mixed": make_objective(
        advantage_estimator="grpo",
        policy_loss_fn="ppo_clip",
        loss_agg_mode="token-mean",
        sources={name: {"advantage_estimator": name, **params} for name, params in BY_SOURCE.items()},
    ),
}
PLAIN = ForwardOptions(temperature=1.0, chunk=1000, remat=False)
keep_gradient = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
)
"""Changes nothing and hands the gradient out as its state, so that no rounding of an update blurs it."""


TRACES: collections.Counter[str] = collections.Counter()


@functools.cache
def step(objective="on-policy", options=PLAIN, optimizer=keep_gradient):
    def run(params, state, data):
        TRACES[objective] += 1
        return update_step(GRAPHDEF, OBJECTIVES[objective], optimizer, options, params, state, data)

    return jax.jit(run)


def rows_of(groups) -> np.ndarray:
    """All completions of these groups."""
    return np.isin(np.arange(PROMPTS), list(groups))[:, None] & np.ones(SIZE, bool)


def data_of(shape=(PROMPTS, SIZE), groups=range(PROMPTS), batch=BATCH, rows=None, **packing) -> UpdateInput:
    """One update of `groups`, of which only the completions `rows` go through the model."""
    micro = pack(batch, rows_of(groups) if rows is None else rows, shape, **packing)
    return update_input(batch, rows_of(groups)[:, 0], micro)


def gradient_of(data: UpdateInput, **how) -> tuple:
    """(gradient, metrics, advantages) of the step."""
    _, gradient, metrics, advantages = step(**how)(PARAMS, PARAMS, data)
    return gradient, {name: float(value) for name, value in metrics.items()}, np.asarray(advantages)


def repeated_logprobs(params, temperature: float, lengths=LENGTHS):
    """Log-probabilities and entropies `[P G T]` by the plain model: each completion behind its own copy of its prompt,
    padded right."""
    rows, real = np.zeros((2, PROMPTS * SIZE, WIDTH + STEPS), np.int32)
    place = np.zeros((PROMPTS * SIZE, STEPS), np.int32)
    for row, (p, i) in enumerate(np.ndindex(PROMPTS, SIZE)):
        length = int(PROMPT_LENGTHS[p])
        tokens = [*BATCH.prompt_tokens[p, :length], *BATCH.completion_tokens[p, i, : lengths[p, i]]]
        rows[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
        place[row] = np.minimum(length + np.arange(STEPS), WIDTH + STEPS - 1)
    logits = nnx.merge(GRAPHDEF, params)(jnp.asarray(rows), jnp.asarray(real))
    every = np.arange(len(rows))[:, None]
    table = jax.nn.log_softmax(logits / temperature, axis=-1)[every, place - 1]
    chosen = jnp.take_along_axis(table, jnp.asarray(rows[every, place])[..., None], axis=-1)[..., 0]
    shape = (PROMPTS, SIZE, STEPS)
    return chosen.reshape(shape), -(jnp.exp(table) * table).sum(axis=-1).reshape(shape)


@functools.cache
def plain_logprobs(temperature: float = 1.0):
    """`params -> [P G T]`, compiled."""
    return jax.jit(lambda params: repeated_logprobs(params, temperature)[0])


def row_values(objective, in_update, lengths=LENGTHS) -> tuple[jax.Array, jax.Array]:
    """Advantages and weights `[P G]`, which have tests of their own."""
    rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, lengths))
    ids, everyone = jnp.zeros(PROMPTS, jnp.int32), jnp.ones(scored.shape, bool)
    advantages = objective.advantages(rewards, scored, lengths, ids)
    return advantages, objective.weights(scored, everyone, lengths, in_update, ids)


@functools.cache
def repeated(objective: str = "on-policy", temperature: float = 1.0, longest: int = STEPS):
    """`(params, in_update, old, ref) -> (loss, gradient)` of the repeated-prompt loss, completions cut at `longest`."""
    objective, lengths = OBJECTIVES[objective], np.minimum(LENGTHS, longest)
    mask = jnp.asarray(np.arange(STEPS) < lengths[..., None])

    def loss(params, in_update, old, ref):
        advantages, weights = (values[..., None] for values in row_values(objective, in_update, lengths))
        new, entropy = repeated_logprobs(params, temperature, lengths)
        tokens = TokenInputs(new, new if old is None else old, jnp.asarray(BATCH.rollout_logprobs), ref, entropy, mask)
        return (weights * objective.token_loss(tokens, advantages)[0]).sum()

    return jax.jit(jax.value_and_grad(loss))


def difference(found, expected) -> float:
    """`||g1 - g2|| / ||g2||` over all parameters."""
    norm = lambda tree: float(optax.tree.norm(tree))  # noqa: E731
    assert norm(expected) > 1e-3
    return norm(jax.tree.map(jnp.subtract, found, expected)) / norm(expected)


EVERYONE = jnp.ones(PROMPTS, bool)


# --- the prompt is computed once, and it changes nothing --------------------------------------------------------------


def test_shared_prefix_is_the_repeated_prompt():
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


def test_completions_of_one_token():
    """Of width one: nothing but the prompt goes through the layers."""
    short = BATCH._replace(
        completion_tokens=BATCH.completion_tokens[..., :1], completion_lengths=np.minimum(LENGTHS, 1)
    )
    gradient, metrics, _ = gradient_of(data_of(batch=short))
    loss, expected = repeated(longest=1)(PARAMS, EVERYONE, None, None)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.fixture(scope="module")
def other_logprobs() -> dict[str, np.ndarray]:
    """Log-probabilities of slightly other weights: those before an update, and those of a reference."""
    at = plain_logprobs(0.7)
    nearby = lambda scale: jax.tree.map(lambda x: x * (1 + scale), PARAMS)  # noqa: E731
    return {"old_logprobs": np.asarray(at(nearby(0.03))), "ref_logprobs": np.asarray(at(nearby(-0.1)))}


def test_shared_prefix_with_every_term(other_logprobs):
    """Ratio, reference, entropy, correction for the sampler and temperature; layers recomputed and log-probabilities in
    chunks, which change nothing."""
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
    above = data._replace(micro=data.micro._replace(old_logprobs=data.micro.old_logprobs + 3))
    most = gradient_of(above, objective="every term", options=options)[1]["is_ratio/max"]
    assert most == pytest.approx(ratio.max() * np.exp(-3), rel=1e-4), "places beyond the end have no ratio"
    slower = options._replace(chunk=7, remat=True)
    other, other_metrics, _ = gradient_of(data, objective="every term", options=slower)
    assert difference(other, gradient) <= 5e-6
    assert other_metrics == pytest.approx(metrics, rel=1e-5)


def test_less_memory_is_really_asked_for():
    """By remat and by chunks, which change no value: each layer is recomputed, and log-probabilities go in a loop."""
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), data_of().micro)

    def count(names: set[str], **options) -> int:
        run = functools.partial(micro_logprobs, GRAPHDEF, micro=micro, options=PLAIN._replace(**options))
        return sum(equation.primitive.name in names for equation in jax.make_jaxpr(run)(PARAMS).eqns)

    recomputed = {"remat2", "checkpoint"}
    assert count(recomputed, remat=True) == count(recomputed) + 2
    assert count({"scan"}, chunk=7) == 1 and count({"scan"}) == 0


def test_logprobs_without_gradient():
    """What becomes `old` and `ref`: micro-batches out and back in, at every unmasked token."""
    micro = pack(BATCH, rows_of(range(PROMPTS)), (2, 3))
    found = jax.jit(batch_logprobs, static_argnums=(0, 3))(GRAPHDEF, PARAMS, micro, PLAIN)
    whole = unpack(np.asarray(found), micro, (PROMPTS, SIZE))
    expected = np.asarray(plain_logprobs()(PARAMS))
    np.testing.assert_allclose(whole[MASK], expected[MASK], rtol=0, atol=1e-5)


# --- batches of every kind --------------------------------------------------------------------------------------------


class EveryMode:
    """The objective whose aggregation is chosen by `estimator_ids`, so that one compilation serves all four."""

    modes = tuple(make_objective(loss_agg_mode=mode) for mode in LOSS_AGG_MODES)
    token_loss = modes[0].token_loss

    def advantages(self, rewards, scored, lengths, ids):
        return self.modes[0].advantages(rewards, scored, lengths, jnp.zeros_like(ids))

    def weights(self, scored, trained, lengths, in_update, ids):
        own = jnp.zeros_like(ids)
        return jnp.stack([mode.weights(scored, trained, lengths, in_update, own) for mode in self.modes])[ids[0]]


OBJECTIVES["every mode"] = EveryMode()


@pytest.mark.parametrize("shape", [(1, SIZE), (2, 3), (1, 1)], ids=str)
def test_micro_batches_add_up(shape):
    """In every aggregation: whole groups; uneven parts of groups, two at a time; one by one."""
    for mode in range(len(LOSS_AGG_MODES)):
        batch = BATCH._replace(estimator_ids=np.full(PROMPTS, mode, np.int32))
        whole, whole_metrics, _ = gradient_of(data_of(batch=batch), objective="every mode")
        gradient, metrics, _ = gradient_of(data_of(shape, batch=batch), objective="every mode")
        assert difference(gradient, whole) <= 1e-6
        assert metrics == pytest.approx(whole_metrics, rel=1e-5)


def test_mini_batches_follow_one_another():
    """Two updates, [0, 2] then [1]: advantages over the whole rollout batch, weights over the update's own groups,
    ratios to the weights before the first."""
    old = np.asarray(plain_logprobs()(PARAMS))
    reference = np.zeros_like(old)
    update_by = step("every term", PLAIN._replace(entropy_gradient=True), optax.sgd(0.5))
    params, expected = PARAMS, PARAMS
    for groups in ([0, 2], [1]):
        data = data_of((2, SIZE), groups, old_logprobs=old, ref_logprobs=reference)
        params, *_, advantages = update_by(params, (optax.EmptyState(), optax.EmptyState()), data)
        _, gradient = repeated("every term")(expected, jnp.asarray(data.in_update), old, reference)
        assert advantages.shape == (PROMPTS, SIZE) and np.abs(advantages).min(axis=1).max() > 0
        expected = jax.tree.map(lambda x, g: x - 0.5 * g, expected, gradient)
    moved = jax.tree.map(jnp.subtract, params, PARAMS)
    assert difference(moved, jax.tree.map(jnp.subtract, expected, PARAMS)) <= 1e-5


SPARSE = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]], np.float32)
"""The completion [2, 1] is unscored: without it the last group is constant."""


@pytest.mark.parametrize(
    ("name", "live"),
    [
        ("grpo", [4, 4, 0]),
        ("maxrl", [4, 4, 0]),
        ("maxpo", [4, 0, 0]),  # with two or three successes of four, one in every pair of others: no signal
        ("pkpo", [1, 3, 0]),  # what fails adds nothing to a maximum
        ("passk", [4, 0, 0]),
    ],
)
def test_what_has_no_signal_can_be_left_out(name, live):
    """Groups and single completions of advantage 0 count in the weights and nowhere else; a group split over
    micro-batches packs only the others. One compilation serves all the estimators."""
    objective, ids = OBJECTIVES["mixed"], np.zeros(PROMPTS, np.int32) + [*["grpo"], *BY_SOURCE].index(name)
    batch = BATCH._replace(rewards=SPARSE, estimator_ids=ids)
    whole, _, advantages = gradient_of(data_of((1, SIZE), batch=batch), objective="mixed")
    rows = objective.live_rows(SPARSE, BATCH.scored, ids, advantages)
    assert objective.looks_for_zeros and rows.sum(axis=1).tolist() == live
    assert (rows == (advantages != 0)).all()
    left, *_ = gradient_of(data_of((1, SIZE), batch=batch, rows=rows, room=PROMPTS), objective="mixed")
    assert difference(left, whole) <= 1e-6
    split = data_of((1, 2), batch=batch, rows=rows, room=PROMPTS)
    assert (split.micro.lengths > 0).any(axis=(1, 2)).sum() == sum(-(-count // 2) for count in live)
    assert difference(gradient_of(split, objective="mixed")[0], whole) <= 1e-6


def test_mixed_estimators_in_one_step():
    """Each group has its own estimator's advantages, and the gradient is the sum of what the groups give; whichever
    they are, the step is compiled once."""

    def run(ids, groups):
        batch = BATCH._replace(rewards=SPARSE, estimator_ids=np.asarray(ids, np.int32))
        return gradient_of(data_of((1, SIZE), batch=batch, rows=rows_of(groups), room=PROMPTS), objective="mixed")

    chosen = [0, 2, 4]  # grpo, pkpo and maxrl
    gradient, _, advantages = run(chosen, range(PROMPTS))
    traces = TRACES["mixed"]
    alone = [run([number] * PROMPTS, [group]) for group, number in enumerate(chosen)]
    assert difference(gradient, jax.tree.map(lambda *parts: sum(parts), *(part for part, *_ in alone))) <= 1e-6
    np.testing.assert_array_equal(advantages, [values[group] for group, (*_, values) in enumerate(alone)])
    assert TRACES["mixed"] == traces


def test_another_term_needs_the_groups_without_signal(other_logprobs):
    """KL and entropy move completions of advantage 0 too: leaving them out would be another gradient."""
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


def test_with_nothing_left_the_gradient_is_zero():
    none = np.zeros((PROMPTS, SIZE), bool)
    nothing, metrics, _ = gradient_of(data_of((1, SIZE), rows=none, room=PROMPTS), objective="mixed")
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    assert (metrics["loss"], metrics["grad_norm"], metrics["update/skipped"]) == (0, 0, 0)
    assert np.isnan(metrics["entropy"]), "the mean of no tokens"


@pytest.mark.parametrize("loss", ["nan in the loss", "nan in the gradient"])
def test_a_loss_that_is_no_number_leaves_weights_and_optimizer_alone(loss, monkeypatch):
    """Of one token of one completion; adam's counts and moments stay too."""

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
    run = jax.jit(functools.partial(update_step, GRAPHDEF, build_objective(config, WIDTH, 1), optimizer, PLAIN))
    params, after, metrics, advantages = run(PARAMS, state, data_of())
    assert metrics["update/skipped"] == 1 and np.isfinite(advantages).all()
    for kept, given in zip(jax.tree.leaves((params, after)), jax.tree.leaves((PARAMS, state)), strict=True):
        np.testing.assert_array_equal(kept, given)


def test_skipped_updates_are_told_and_end_the_run(caplog):
    watch = SkipWatch("the loss 'x'")
    for _ in range(MOST_SKIPPED - 1):
        watch([{"update/skipped": 1.0}, {"update/skipped": 1.0}])
    watch([{"update/skipped": 1.0}, {"update/skipped": 0.0}])
    assert "1 of 2 updates of this step skipped: the loss 'x' or its gradient" in caplog.text
    for _ in range(MOST_SKIPPED - 1):
        watch([{"update/skipped": 1.0}])
    with pytest.raises(UserError, match="'x' or its gradient was not finite in 5 steps in a row"):
        watch([{"update/skipped": 1.0}])


def test_what_weighs_nothing_teaches_nothing():
    """Tokens beyond a row's length, unscored completions, those that are not trained and dropped groups: what they say
    changes no gradient, and without them it is the same."""
    scored, trained = BATCH.scored.copy(), np.ones((PROMPTS, SIZE), bool)
    scored[1, 1:] = False  # one is left, too few
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
    assert difference(gradient_of(data_of(batch=batch, rows=counted, room=PROMPTS))[0], gradient) <= 1e-6
    assert difference(gradient_of(data_of())[0], gradient) > 0.1, "they would teach otherwise"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_advantage_that_is_no_number_changes_nothing(bad, monkeypatch):
    """Weights and the optimizer's state stay as they were, to the bit."""
    monkeypatch.setattr(estimators, "ADVANTAGE_ESTIMATORS", dict(estimators.ADVANTAGE_ESTIMATORS))
    estimators.register_advantage_estimator("raw")(lambda rewards, *, scored, lengths: rewards)
    objective, adam = make_objective(advantage_estimator="raw"), optax.adamw(0.1, weight_decay=0.1)
    run = jax.jit(functools.partial(update_step, GRAPHDEF, objective, adam, PLAIN))
    data = data_of((1, SIZE))
    *moved, _, _ = run(PARAMS, jax.jit(adam.init)(PARAMS), data)
    assert difference(moved[0], PARAMS) > 0.1 and float(optax.tree.norm(moved[1][0].mu)) > 1e-3
    rewards = BATCH.rewards.copy()
    rewards[1, 2] = bad
    *after, _, advantages = run(*moved, data._replace(rewards=rewards))
    assert not np.isfinite(advantages[1, 2])
    jax.tree.map(np.testing.assert_array_equal, after, moved)
    rewards[1, 2], scored = bad, BATCH.scored.copy()
    scored[1, 2] = False
    *after, _, _ = run(*moved, data._replace(rewards=rewards, scored=scored))
    assert difference(after[0], moved[0]) > 1e-3, "an unscored completion's reward is nobody's business"


def test_every_token_up_to_the_last_is_trained(monkeypatch):
    """The derivative of the loss by each token's log-probability: weight times advantage up to and including the
    end-of-sequence token at `length - 1`, exactly zero beyond."""
    original, objective = update.token_logprobs, OBJECTIVES["on-policy"]
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), data_of().micro)
    advantages, weights = row_values(objective, EVERYONE)

    def loss(delta):
        monkeypatch.setattr(update, "token_logprobs", lambda *a: (original(*a)[0] + delta, original(*a)[1]))
        return micro_loss(PARAMS, GRAPHDEF, objective, PLAIN, micro, advantages, weights)[0]

    found = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros(MASK.size))).reshape(MASK.shape)
    np.testing.assert_allclose(found, np.where(MASK, -(weights * advantages)[..., None], 0), rtol=1e-6)
    last = np.take_along_axis(found, LENGTHS[..., None] - 1, axis=-1)[..., 0]
    assert (np.abs(last[BATCH.scored]) > 1e-4).all()


# --- the whole learner loss, in expectation ---------------------------------------------------------------------------

COMPLETIONS = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]], np.int32)
"""Every completion of at most two tokens out of three, of which 0 ends it."""
COMPLETION_LENGTHS = np.array([1, 2, 2, 2, 2, 2, 2], np.int32)
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


@jax.jit
def chances(params):
    """The probability of each completion, by the plain model."""
    rows = np.concatenate([np.broadcast_to(PROMPT, (7, 3)), COMPLETIONS], axis=1)
    table = jax.nn.log_softmax(nnx.merge(tiny()[0], params)(jnp.asarray(rows)), axis=-1)
    tokens = table[np.arange(7)[:, None], np.array([[2, 3]]), COMPLETIONS]
    return jnp.exp(jnp.where(np.arange(2)[None] < COMPLETION_LENGTHS[:, None], tokens, 0.0).sum(axis=1))


@functools.cache
def every_group(mode: str, loss: str):
    """`(rewards, estimator) -> expected gradient` of the whole loss: each of the `7^3` groups is an update of its own,
    its gradient weighted by the group's probability."""
    sources = {name: {"advantage_estimator": each, **params} for name, (each, params, *_) in ASCENDS.items()}
    objective = make_objective(policy_loss_fn=loss, loss_agg_mode=mode, num_generations=3, sources=sources)
    count, shape = len(DRAWS), DRAWS.shape
    batch = GroupBatch(
        prompt_tokens=np.broadcast_to(PROMPT, (count, 3)),
        prompt_lengths=np.full(count, 3, np.int32),
        completion_tokens=COMPLETIONS[DRAWS],
        completion_lengths=COMPLETION_LENGTHS[DRAWS],
        rollout_logprobs=None,
        rewards=np.zeros(shape, np.float32),
        scored=np.ones(shape, bool),
    )
    # an axis more, for the one group of each: rewards [n 1 G], micro-batches [n 1 1 G T]
    data = update_input(batch, np.ones(count, bool), pack(batch, batch.scored, (1, 3)))
    data = jax.tree.map(lambda x: jnp.asarray(x)[:, None], data)
    data = data._replace(micro=data.micro._replace(group=jnp.zeros_like(data.micro.group)))
    graphdef, params = tiny()
    run = functools.partial(update_step, graphdef, objective, keep_gradient, PLAIN, params, params)
    gradients = jax.jit(jax.vmap(lambda data: run(data)[1]))
    probabilities = np.asarray(chances(params), np.float64)[DRAWS].prod(axis=1)
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)

    def expected(name: str, rewards: np.ndarray):
        ids = jnp.full_like(data.estimator_ids, objective.sources[name])
        found = gradients(data._replace(rewards=jnp.asarray(rewards[DRAWS])[:, None], estimator_ids=ids))
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


# --- what it costs ----------------------------------------------------------------------------------------------------

COST = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_layers": 2}
LONG, SHORT, MANY = 512, 16, 16


class Reinforce:
    """Any objective will do; this one takes any shape of group."""

    def advantages(self, rewards, scored, lengths, ids):
        return rewards

    def weights(self, scored, trained, lengths, in_update, ids):
        return jnp.full(scored.shape, 1.0 / scored.size)

    def token_loss(self, tokens, advantages):
        return jnp.where(tokens.mask, -advantages * tokens.logprobs, 0.0), {}


class Counted(Reinforce):
    """Knows how many micro-batches went through the model."""

    def __init__(self):
        self.computed = 0

    def token_loss(self, tokens, advantages):
        jax.debug.callback(self.count)
        return super().token_loss(tokens, advantages)

    def count(self):
        self.computed += 1


def test_padding_costs_nothing():
    """Of the micro-batches there is room for, those without a row do not go through the model."""
    objective = Counted()
    run = jax.jit(functools.partial(update_step, GRAPHDEF, objective, keep_gradient, PLAIN))
    for groups in ([0, 1, 2], [1], []):
        objective.computed = 0
        jax.block_until_ready(run(PARAMS, PARAMS, data_of((1, SIZE), groups, room=PROMPTS)))
        jax.effects_barrier()
        assert objective.computed == len(groups)


def flops(function, *arguments, **keywords) -> float:
    return jax.jit(function).lower(*arguments, **keywords).compile().cost_analysis()["flops"]


def cost_batch(groups: int, size: int) -> GroupBatch:
    ones = lambda *shape: np.ones(shape, np.int32)  # noqa: E731
    shape = (groups, size)
    return GroupBatch(
        prompt_tokens=ones(groups, LONG),
        prompt_lengths=LONG * ones(groups),
        completion_tokens=ones(*shape, SHORT),
        completion_lengths=SHORT * ones(*shape),
        rollout_logprobs=np.zeros((*shape, SHORT), np.float32),
        rewards=np.ones(shape, np.float32),
        scored=np.ones(shape, bool),
    )


def test_the_prompt_is_computed_once():
    """Compiled FLOPs of one group of 16 on a prompt of 512, against 16 groups of one on the same prompt: the same code
    with the prompt repeated. No loop hides any: layers unrolled, one micro-batch, one log-probability chunk."""
    graphdef, params = make_model(**COST)
    weights = sum(x.size for x in jax.tree.leaves(params["layers"]))

    def train_step(groups: int, size: int) -> float:
        batch = cost_batch(groups, size)
        data = update_input(batch, np.ones(groups, bool), pack(batch, batch.scored, (groups, size)))
        run = functools.partial(update_step, graphdef, Reinforce(), keep_gradient, PLAIN)
        return flops(run, params, params, data)

    def prefill(groups: int, size: int) -> float:
        batch = cost_batch(groups, size)
        run = functools.partial(decoding.prefill, graphdef)
        return flops(run, params, batch.prompt_tokens, batch.prompt_lengths)

    for cost, passes in ((train_step, 3), (prefill, 1)):
        shared, repeated = cost(1, MANY), cost(MANY, 1)
        assert repeated >= 2 * passes * weights * MANY * LONG, "the matrix products are counted"
        print(f"{cost.__name__}: {shared:.3g} / {repeated:.3g} = {shared / repeated:.4f}")
        assert shared <= repeated / 5
