"""The compiled step against the plain model on repeated prompts: gradients, micro- and mini-batches, and what it
computes.

The oracle writes every prompt out once per completion and sends the rows through `model(tokens, attention_mask)`; it
shares no attention, no log-probability code and no loop over micro-batches with the step.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tunix_like.config import AlgorithmConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.rl import update
from tunix_like.rl.objective import build_objective
from tunix_like.rl.packing import pack, unpack
from tunix_like.rl.update import ForwardOptions, UpdateInput, batch_logprobs, micro_logprobs, micro_loss, update_step
from tunix_like.sampling import sampler
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


def make_objective(updates: int = 1, **changes):
    plain = {"advantage_estimator": "rloo", "policy_loss_fn": "reinforce", "loss_agg_mode": "seq-mean-token-sum"}
    settings = plain | {"kl_loss_mode": "low_var_kl", "kl_in_reward": False, "num_generations": SIZE} | changes
    return build_objective(AlgorithmConfig(**settings), STEPS, updates)


OBJECTIVES = {
    "on-policy": make_objective(),
    "clipped": make_objective(policy_loss_fn="ppo_clip", loss_agg_mode="token-mean", beta=0.3, updates=2),
}
PLAIN = ForwardOptions(temperature=1.0, chunk=1000, remat=False)
keep_gradient = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
)
"""Changes nothing and hands the gradient out as its state, so that no rounding of an update blurs it."""


@functools.cache
def step(objective="on-policy", options=PLAIN, optimizer=keep_gradient):
    return jax.jit(functools.partial(update_step, GRAPHDEF, OBJECTIVES[objective], optimizer, options))


def data_of(shape=(PROMPTS, SIZE), groups=range(PROMPTS), batch=BATCH, computed=None, **packing) -> UpdateInput:
    """One update of `groups`, of which only the `computed` ones go through the model."""
    in_update = np.isin(np.arange(PROMPTS), groups)
    micro = pack(batch, groups if computed is None else computed, shape, **packing)
    return UpdateInput(batch.rewards, batch.scored, batch.completion_lengths, in_update, micro)


def gradient_of(data: UpdateInput, **how) -> tuple:
    """(gradient, metrics, advantages) of the step."""
    _, gradient, metrics, advantages = step(**how)(PARAMS, PARAMS, data)
    return gradient, {name: float(value) for name, value in metrics.items()}, np.asarray(advantages)


def repeated_logprobs(params, temperature: float, lengths=LENGTHS):
    """`[P G T]` by the plain model: each completion behind its own copy of its prompt, padded right."""
    rows, real = np.zeros((2, PROMPTS * SIZE, WIDTH + STEPS), np.int32)
    place = np.zeros((PROMPTS * SIZE, STEPS), np.int32)
    for row, (p, i) in enumerate(np.ndindex(PROMPTS, SIZE)):
        length = int(PROMPT_LENGTHS[p])
        tokens = [*BATCH.prompt_tokens[p, :length], *BATCH.completion_tokens[p, i, : lengths[p, i]]]
        rows[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
        place[row] = np.minimum(length + np.arange(STEPS), WIDTH + STEPS - 1)
    logits = nnx.merge(GRAPHDEF, params)(jnp.asarray(rows), jnp.asarray(real))
    table = jax.nn.log_softmax(logits / temperature, axis=-1)
    every = np.arange(len(rows))[:, None]
    return table[every, place - 1, rows[every, place]].reshape(PROMPTS, SIZE, STEPS)


@functools.cache
def plain_logprobs(temperature: float = 1.0):
    """`params -> [P G T]`, compiled."""
    return jax.jit(functools.partial(repeated_logprobs, temperature=temperature))


def row_values(objective, in_update, lengths=LENGTHS) -> tuple[jax.Array, jax.Array]:
    """Advantages and weights `[P G]`, which have tests of their own."""
    rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, lengths))
    return objective.advantages(rewards, scored, lengths), objective.weights(scored, lengths, in_update)


@functools.cache
def repeated(objective: str = "on-policy", temperature: float = 1.0, longest: int = STEPS):
    """`(params, in_update, old, ref) -> (loss, gradient)` of the repeated-prompt loss, completions cut at `longest`."""
    objective, lengths = OBJECTIVES[objective], np.minimum(LENGTHS, longest)
    mask = jnp.asarray(np.arange(STEPS) < lengths[..., None])

    def loss(params, in_update, old, ref):
        advantages, weights = (values[..., None] for values in row_values(objective, in_update, lengths))
        new = repeated_logprobs(params, temperature, lengths)
        token_loss, _ = objective.token_loss(new, new if old is None else old, ref, advantages, mask)
        return (weights * token_loss).sum()

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


def test_shared_prefix_with_ratio_reference_and_temperature(other_logprobs):
    """And with layers recomputed and log-probabilities in chunks, which change nothing either."""
    old, ref = other_logprobs["old_logprobs"], other_logprobs["ref_logprobs"]
    data = data_of(**other_logprobs)
    gradient, metrics, _ = gradient_of(data, objective="clipped", options=PLAIN._replace(temperature=0.7))
    loss, expected = repeated("clipped", 0.7)(PARAMS, EVERYONE, old, ref)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert 0 < metrics["pg_clipfrac"] < 1, "some tokens are clipped, others not"
    new = np.asarray(plain_logprobs(0.7)(PARAMS))
    ratio, d = np.exp(new - old)[MASK], (new - ref)[MASK]
    assert metrics["is_ratio/mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics["is_ratio/max"] == pytest.approx(ratio.max(), rel=1e-4)
    assert metrics["kl"] == pytest.approx((np.exp(-d) + d - 1).mean(), rel=1e-3)
    above = data._replace(micro=data.micro._replace(old_logprobs=data.micro.old_logprobs + 3))
    most = gradient_of(above, objective="clipped", options=PLAIN._replace(temperature=0.7))[1]["is_ratio/max"]
    assert most == pytest.approx(ratio.max() * np.exp(-3), rel=1e-4), "places beyond the end have no ratio"
    slower = ForwardOptions(temperature=0.7, chunk=7, remat=True)
    other, other_metrics, _ = gradient_of(data, objective="clipped", options=slower)
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
    micro = pack(BATCH, range(PROMPTS), (2, 3))
    found = jax.jit(batch_logprobs, static_argnums=(0, 3))(GRAPHDEF, PARAMS, micro, PLAIN)
    whole = unpack(np.asarray(found), micro, (PROMPTS, SIZE))
    expected = np.asarray(plain_logprobs()(PARAMS))
    np.testing.assert_allclose(whole[MASK], expected[MASK], rtol=0, atol=1e-5)


# --- batches of every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, SIZE), (2, 3)], ids=str)
def test_micro_batches_add_up(shape):
    """Whole groups; uneven parts of groups, two at a time."""
    whole, whole_metrics, _ = gradient_of(data_of())
    gradient, metrics, _ = gradient_of(data_of(shape))
    assert difference(gradient, whole) <= 1e-6
    assert metrics == pytest.approx(whole_metrics, rel=1e-5)


def test_mini_batches_follow_one_another():
    """Two updates, [0, 2] then [1]: advantages over the whole rollout batch, weights over the update's own groups,
    ratios to the weights before the first."""
    old = np.asarray(plain_logprobs()(PARAMS))
    reference = np.zeros_like(old)
    update_by = step("clipped", PLAIN, optax.sgd(0.5))
    params, expected = PARAMS, PARAMS
    for groups in ([0, 2], [1]):
        data = data_of((2, SIZE), groups, old_logprobs=old, ref_logprobs=reference)
        params, *_, advantages = update_by(params, (optax.EmptyState(), optax.EmptyState()), data)
        _, gradient = repeated("clipped")(expected, jnp.asarray(data.in_update), old, reference)
        assert advantages.shape == (PROMPTS, SIZE) and np.abs(advantages).min(axis=1).max() > 0
        expected = jax.tree.map(lambda x, g: x - 0.5 * g, expected, gradient)
    moved = jax.tree.map(jnp.subtract, params, PARAMS)
    assert difference(moved, jax.tree.map(jnp.subtract, expected, PARAMS)) <= 1e-5


def test_groups_without_signal_can_be_left_out():
    """They count in the weights and nowhere else; with none left, the gradient is exactly zero."""
    batch = BATCH._replace(rewards=np.where(np.arange(PROMPTS)[:, None] == 1, 0.7, BATCH.rewards).astype(np.float32))
    whole, _, advantages = gradient_of(data_of(batch=batch))
    assert not advantages[1].any()
    left, *_ = gradient_of(data_of((1, SIZE), batch=batch, computed=[0, 2], room=PROMPTS))
    assert difference(left, whole) <= 1e-6
    nothing, metrics, _ = gradient_of(data_of((1, SIZE), batch=batch, computed=[], room=PROMPTS))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    assert all(np.isfinite(value) for value in metrics.values())


def test_padding_means_nothing():
    """Tokens at and beyond a row's length, and what an unscored completion says, change no gradient."""
    inside = np.arange(WIDTH) < PROMPT_LENGTHS[:, None]
    other = BATCH._replace(
        prompt_tokens=np.where(inside, BATCH.prompt_tokens, 7).astype(np.int32),
        completion_tokens=np.where(MASK & BATCH.scored[..., None], BATCH.completion_tokens, 3).astype(np.int32),
    )
    assert difference(gradient_of(data_of(batch=other))[0], gradient_of(data_of())[0]) <= 1e-6


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
SUCCESS = np.array([0, 1, 0, 0, 1, 0, 0], np.float32)


@pytest.mark.parametrize(
    ("estimator", "loss", "target"),
    [("rloo", "reinforce", lambda p: p), ("maxrl", "ppo_clip", lambda p: p - (1 - p) ** 2 / 2)],
)
def test_the_expected_gradient_is_the_true_one(estimator, loss, target):
    """Under `seq-mean-token-sum`, over all groups of three of all completions of a prompt: RLOO's is that of the pass
    rate, MaxRL's that of the log-likelihood to order 2, `-(1-p) - (1-p)^2 / 2`."""
    graphdef, params = make_model(3, vocab_size=3, num_layers=1, hidden_size=8, head_dim=4, intermediate_size=8)
    prompt = np.array([1, 2, 2], np.int32)
    rows = np.concatenate([np.broadcast_to(prompt, (7, 3)), COMPLETIONS], axis=1)

    def chances(params):
        table = jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(rows)), axis=-1)
        tokens = table[np.arange(7)[:, None], np.array([[2, 3]]), COMPLETIONS]
        return jnp.exp(jnp.where(np.arange(2)[None] < COMPLETION_LENGTHS[:, None], tokens, 0.0).sum(axis=1))

    draws = np.array(list(itertools.product(range(7), repeat=3)))
    batch = GroupBatch(
        prompt_tokens=np.broadcast_to(prompt, (len(draws), 3)),
        prompt_lengths=np.full(len(draws), 3, np.int32),
        completion_tokens=COMPLETIONS[draws],
        completion_lengths=COMPLETION_LENGTHS[draws],
        rollout_logprobs=np.zeros((*draws.shape, 2), np.float32),
        rewards=SUCCESS[draws],
        scored=np.ones(draws.shape, bool),
    )
    objective = make_objective(advantage_estimator=estimator, policy_loss_fn=loss, num_generations=3)

    def one_group(data):
        return update_step(graphdef, objective, keep_gradient, PLAIN, params, params, data)[1]

    # every group is an update of its own: rewards [n 1 G], micro-batches [n 1 1 G T]
    micro = jax.tree.map(lambda x: jnp.asarray(x)[:, None], pack(batch, range(len(draws)), (1, 3)))
    micro = micro._replace(group=jnp.zeros_like(micro.group))
    single = UpdateInput(
        batch.rewards[:, None],
        batch.scored[:, None],
        batch.completion_lengths[:, None],
        np.ones((len(draws), 1), bool),
        micro,
    )
    gradients = jax.jit(jax.vmap(one_group))(single)
    weights = np.asarray(jax.jit(chances)(params), np.float64)[draws].prod(axis=1)
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    found = jax.tree.map(lambda g: jnp.einsum("n,n...->...", jnp.asarray(weights, jnp.float32), g), gradients)
    true = jax.jit(jax.grad(lambda params: -target((chances(params) * SUCCESS).sum())))(params)
    assert difference(found, true) <= 1e-4


# --- what it costs ----------------------------------------------------------------------------------------------------

COST = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_layers": 2}
LONG, SHORT, MANY = 512, 16, 16


class Reinforce:
    """Any objective will do; this one takes any shape of group."""

    def advantages(self, rewards, scored, lengths):
        return rewards

    def weights(self, scored, lengths, in_update):
        return jnp.full(scored.shape, 1.0 / scored.size)

    def token_loss(self, logprobs, old, reference, advantages, mask):
        return jnp.where(mask, -advantages * logprobs, 0.0), {}


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
        data = UpdateInput(
            batch.rewards,
            batch.scored,
            batch.completion_lengths,
            np.ones(groups, bool),
            pack(batch, range(groups), (groups, size)),
        )
        run = functools.partial(update_step, graphdef, Reinforce(), keep_gradient, PLAIN)
        return flops(run, params, params, data)

    def prefill(groups: int, size: int) -> float:
        batch, key = cost_batch(groups, size), jax.random.key(0)
        run = functools.partial(sampler._start, graphdef, size=size, max_tokens=SHORT, room=SHORT)
        return flops(run, params, batch.prompt_tokens, batch.prompt_lengths, np.arange(groups, dtype=np.uint32), key)

    for cost, passes in ((train_step, 3), (prefill, 1)):
        shared, repeated = cost(1, MANY), cost(MANY, 1)
        assert repeated >= 2 * passes * weights * MANY * LONG, "the matrix products are counted"
        print(f"{cost.__name__}: {shared:.3g} / {repeated:.3g} = {shared / repeated:.4f}")
        assert shared <= repeated / 5
