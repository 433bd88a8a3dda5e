"""Tests the updates of a learner: several per batch against the plain forward pass, steps without data, and the KL."""

import functools
import threading
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.parameters import others_slow
from tests.tiny_model import HF
from tunix_like import (
    GRPOConfig,
    GRPOLearner,
    MaxRLConfig,
    OptimizerConfig,
    RLOOConfig,
    RLOOLearner,
    RolloutConfig,
    UserError,
)
from tunix_like.planning.sizes import Planner
from tunix_like.rollout.collection import longest_batch
from tunix_like.rollout.requests import collect as collect_samples
from tunix_like.rollout.requests import samples_of
from tunix_like.rollout.rollouts import with_width
from tunix_like.step.train_step import jit_train_step

from .small_learner import (
    ROWS,
    assert_same,
    collect,
    differ,
    make,
    make_model,
    params_of,
    varied,
    watch_advantages,
    watch_rewards,
    watch_sampler,
)


@pytest.mark.slow
def test_a_step_without_a_counted_token_changes_nothing(tmp_path):
    """The optimizer is AdamW with weight decay: momentum does not change the weights, and the schedule does not
    advance. A step with equal rewards, in contrast, is a regular update of the optimizer."""
    calls = []

    def reward(prompts, completions, answer):
        calls.append(len(prompts))
        if len(calls) in (2, 3):  # in the second step; a function that fails for all is called again
            return [None] * len(completions)
        return [1.0] * len(completions) if len(calls) == 5 else varied(prompts, completions, answer)

    weights = []
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4)
    learner = make(
        GRPOConfig(num_generations=4), learner=GRPOLearner, reward=reward, max_steps=5, actor_optimizer=optimizer
    )
    learner._listeners[0] = lambda row, total: weights.append((row, jax.tree.map(np.asarray, learner.state.params)))
    learner.train(ROWS, batch_size=4)
    rows = [row for row, _ in weights]
    empty = [row["train/update/empty"] for row in rows]
    assert sum(empty) == 2 and empty[0] == empty[-1] == 0, (empty, calls)
    rate = 0
    for (_, before), (row, after), was in zip(weights, weights[1:], empty[1:], strict=False):
        assert differ(before, after) == (not was), row["step"]
    for row, was in zip(rows, empty, strict=True):
        assert row["train/learning_rate"] == pytest.approx(1e-2 * min(rate + 1, 4) / 4)
        rate += not was
    assert rows[-1]["train/groups/zero_signal_frac"] == 1 and rows[-1]["train/grad_norm"] == 0


@pytest.mark.slow
def test_maxima_of_several_updates_are_not_averaged(monkeypatch):
    """The ratio is 1 in the first update of a batch, and the metric is the maximum of the second."""
    updates = []

    def recorded(*arguments):
        program = jit_train_step(*arguments)

        def update(*inputs):
            out = program(*inputs)
            updates.append({name: float(value) for name, value in out[1].items()})
            return out

        update.lower = program.lower
        return update

    monkeypatch.setattr("tunix_like.step.train_step.jit_train_step", recorded)
    monkeypatch.setattr("tunix_like.step.train_step._SHARED", OrderedDict())
    algo = GRPOConfig(num_generations=4, num_iterations=2)
    last = make(algo, learner=GRPOLearner, reward=varied, max_steps=1).train(ROWS, batch_size=4)
    first, second = updates
    assert first["is_ratio/max"] == pytest.approx(1) and second["is_ratio/max"] > 1.01
    assert last["train/is_ratio/max"] == second["is_ratio/max"]
    assert last["train/is_ratio/mean"] == pytest.approx((first["is_ratio/mean"] + second["is_ratio/mean"]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [{"num_iterations": 2}, {"mini_batch_size": 2}])
def test_several_updates_of_one_batch(updates):
    """ppo_clip uses the batch again with the log-probabilities before the first update, so ratios differ from 1."""
    algorithm = {name: value for name, value in updates.items() if name == "num_iterations"}
    training = {name: value for name, value in updates.items() if name != "num_iterations"}
    optimizer = optax.sgd(2.0)
    learner = make(
        MaxRLConfig(num_generations=4, epsilon=0.01, **algorithm),
        max_steps=1,
        actor_optimizer=optimizer,
        reward=varied,
        **training,
    )
    row = collect(learner)[0]
    assert row["train/is_ratio/max"] > 1.01 and row["train/pg_clipfrac"] > 0
    assert row["train/perf/update_programs"] == 1
    with pytest.raises(UserError, match="'reinforce' allows one update.*give 2. Use ppo_clip"):
        make(RLOOConfig(num_generations=4, **algorithm), learner=RLOOLearner, **training).train(ROWS, batch_size=4)
    one = collect(make(max_steps=1, reward=varied, actor_optimizer=optimizer))[0]
    assert one["train/is_ratio/max"] == pytest.approx(1.0, abs=1e-6) and one["train/pg_clipfrac"] == 0


LOSSES = {
    "ppo_clip": {},
    "gspo": {"policy_loss_fn": "gspo", "epsilon": 0.02, "epsilon_high": 0.03},
    "dppo": {"policy_loss_fn": "dppo", "dppo_mask_high": 0.02, "dppo_mask_low": 0.02, "kl_tau": 0.1},
    "sampler_is": {"sampler_is": "token", "sampler_is_threshold": 1.15},
    "gmpo": {"policy_loss_fn": "gmpo", "epsilon": 0.02, "off_policy_mask_threshold": 0.03},
    "vespo": {"policy_loss_fn": "vespo", "off_policy_mask_threshold": 0.03},
}


def naive_token_loss(kind, logprobs, old, rollout, advantages, mask):
    """Returns the loss of every token by its formula; arguments are `[G, T]`, advantages `[G, 1]`."""
    if kind == "dppo":
        ratio, moved = jnp.exp(logprobs - rollout), jnp.exp(logprobs) - jnp.exp(rollout)
        dropped = ((advantages > 0) & (moved > 0.02)) | ((advantages <= 0) & (moved < -0.02))
        return jnp.where(dropped, 0.0, -ratio * advantages) + 0.1 * (logprobs - rollout) ** 2
    if kind in ("gmpo", "vespo"):
        behind = ((rollout - logprobs) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        kept = (advantages >= 0) | (behind <= 0.03)
    if kind == "gmpo":
        moved = logprobs - old
        clipped = jnp.where(advantages > 0, jnp.minimum(moved, 0.02), jnp.maximum(moved, -0.02))
        mean = (clipped * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        ratio = jnp.exp(jax.lax.stop_gradient(mean - clipped) + clipped)
        return jax.lax.stop_gradient(kept) * -ratio * advantages
    if kind == "vespo":
        whole = jnp.exp(jax.lax.stop_gradient(((logprobs - rollout) * mask).sum(1, keepdims=True)))
        up, down = whole**2 * jnp.exp(3 * (1 - whole)), whole**3 * jnp.exp(2 * (1 - whole))
        return jax.lax.stop_gradient(kept) * -jnp.where(advantages >= 0, up, down) * advantages * logprobs
    ratio, low, high, factor = jnp.exp(logprobs - old), 0.2, 0.2, 1.0
    if kind == "gspo":
        low, high = 0.02, 0.03
        mean = ((logprobs - old) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        ratio = jnp.exp(jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs))
    if kind == "sampler_is":
        factor = jnp.minimum(jnp.exp(old - rollout), 1.15)
    return factor * -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


@functools.partial(jax.jit, static_argnums=0)
def naive_logprobs(graphdef, params, texts, places, targets):
    """Returns log-probabilities of the plain forward pass of prompt and completion in one row."""
    table = jax.nn.log_softmax(nnx.merge(graphdef, params)(texts))
    return table[jnp.arange(len(texts))[:, None], places, targets]


@functools.partial(jax.jit, static_argnums=0)
def naive_gradient(graphdef, params, texts, places, targets, slope):
    return jax.grad(lambda p: (naive_logprobs(graphdef, p, texts, places, targets) * slope).sum())(params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(LOSSES, "ppo_clip"))
def test_two_passes_in_two_mini_batches_equal_loops(kind):
    """Four updates of one batch are repeated with the plain forward pass. The old log-probabilities are those before
    the first update, and the sampler's are those of the rollout (changed here, so that they differ). Advantages use the
    whole batch."""
    rewards, asked, rate = [], [], 0.3
    learner = make(
        MaxRLConfig(num_generations=4, num_iterations=2, **LOSSES[kind]),
        reward=watch_rewards(rewards), max_steps=1, mini_batch_size=2, actor_optimizer=optax.sgd(rate),
        max_logprob_gap=None,
    )  # fmt: skip
    generate = learner.engine.generate

    def shifted(params, requests, *rest):
        out = with_width(collect_samples(generate(params, requests, *rest), requests), 4)
        out = out._replace(logprobs=out.logprobs + np.array([0.2, -0.2, 0.1, 0.0], np.float32))
        asked.append(([request.tokens for request in requests], out))
        return samples_of(out)

    learner.engine.generate = shifted
    params = jax.tree.map(jnp.array, learner.params)
    row = collect(learner)[0]

    prompts, out = asked[0]
    texts, places = np.zeros((16, 8), np.int32), np.zeros((16, 4), np.int32)
    for n in range(16):
        prompt = prompts[n // 4]
        texts[n, : len(prompt)] = prompt
        texts[n, len(prompt) : len(prompt) + 4] = out.tokens[n // 4, n % 4]
        places[n] = len(prompt) - 1 + np.arange(4)
    targets, lengths = out.tokens.reshape(16, 4), out.lengths.reshape(16)
    mask = np.arange(4) < lengths[:, None]
    rollout = jnp.asarray(out.logprobs.reshape(16, 4))
    advantages = tunix_like.compute_advantages(rewards[0], "maxrl").reshape(16, 1)
    old = naive_logprobs(learner.graphdef, params, texts, places, targets)
    for half in (0, 1) * 2:
        inside = mask & (np.arange(16) // 8 == half)[:, None]
        now = naive_logprobs(learner.graphdef, params, texts, places, targets)
        each = functools.partial(naive_token_loss, kind, old=old, rollout=rollout, advantages=advantages, mask=mask)
        slope = jax.grad(lambda x: jnp.where(inside, each(x), 0.0).sum() / inside.sum())(now)  # noqa: B023
        gradient = naive_gradient(learner.graphdef, params, texts, places, targets, slope)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), learner.params, params)
    assert row.get("train/pg_clipfrac", 0) > 0 or kind in ("ppo_clip", "sampler_is", "vespo")
    assert 0 < row.get("train/off_policy_mask/dropped_frac", 0.5) < 1
    assert row.get("train/sampler_is/mean", 0.9) < 1


def test_kl_to_the_initial_weights_starts_at_zero():
    learner = make(GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, reward=varied, max_steps=3)
    start = jax.tree.map(np.asarray, learner.params)
    rows = collect(learner)
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < rows[1]["train/kl"] < rows[2]["train/kl"], "k3 is never negative, and the policy moves away"
    assert_same(jax.tree.map(np.asarray, learner.reference.params), start)
    assert make(GRPOConfig(num_generations=4), learner=GRPOLearner).reference is None, "beta 0 holds no reference"


@pytest.mark.slow
def test_kl_without_a_reward_signal_leads_to_the_reference():
    """With equal rewards the KL still has a gradient, and the weights approach the reference."""
    learner = make(
        GRPOConfig(num_generations=4, beta=1.0),
        learner=GRPOLearner,
        ref_model=make_model(seed=7),
        reward=lambda prompts, completions: [0.0] * len(completions),
        max_steps=4,
    )
    rows = collect(learner)
    assert 0 < rows[3]["train/kl"] < 0.9 * rows[0]["train/kl"]
    assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/kl"], rel=0.5)


@pytest.mark.slow
def test_kl_in_the_reward_with_another_reference():
    """rloo subtracts beta * sum of log-ratios from each reward before the estimator. The test computes this
    separately."""
    kept = []
    model, reference = make_model(), make_model(seed=7)
    learner = make(
        RLOOConfig(num_generations=4, beta=0.5), learner=RLOOLearner, model=model, ref_model=reference,
        reward=lambda prompts, completions: [0.0] * len(completions),
        metric_fns=[watch_advantages(kept)], max_steps=1,
    )  # fmt: skip
    caught, asked, generate = watch_sampler(learner), [], learner.engine.generate
    learner.engine.generate = lambda *a: asked.append([request.tokens for request in a[1]]) or generate(*a)
    row = collect(learner)[0]
    prompts, out = asked[0], caught[0]
    texts = [[*prompts[i], *out.tokens[i, j, : out.lengths[i, j]]] for i, j in np.ndindex(4, 4)]
    tokens = np.array([text + [0] * (16 - len(text)) for text in texts])
    logprobs = np.asarray(jax.jit(lambda x: jax.nn.log_softmax(reference(x)))(tokens))
    kl = np.zeros((4, 4))
    for n, (i, j) in enumerate(np.ndindex(4, 4)):
        for t in range(out.lengths[i, j]):
            place = len(prompts[i]) + t
            kl[i, j] += out.logprobs[i, j, t] - logprobs[n, place - 1, tokens[n, place]]
    np.testing.assert_allclose(kept[0], tunix_like.compute_advantages(-0.5 * kl, "rloo"), rtol=1e-3, atol=1e-4)
    assert row["train/rewards/mean"] == 0.0, "the reported reward is the reward function's"
    assert "train/kl" in row and row["train/kl"] == pytest.approx(kl.sum() / out.lengths.sum(), rel=1e-3, abs=1e-5)


def test_the_model_itself_as_reference():
    model = make_model()
    of = functools.partial(make, GRPOConfig(num_generations=4, beta=0.1), learner=GRPOLearner, model=model)
    learner = of(ref_model=nnx.merge(*nnx.split(model)))  # another model with the same arrays
    where = lambda tree: {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}  # noqa: E731
    assert not where(learner.reference.params) & where(learner.state.params)
    assert len(collect(of(ref_model=model))) == 2


REFERENCES = {
    "no use": (lambda: make_model(), {"beta": 0.0}, "ref_model: algorithm.beta is 0"),
    "reward model": (lambda: tunix_like.add_scalar_head(make_model()), {"beta": 0.1}, "ref_model: it is a reward"),
    "vocabulary": (
        lambda: tunix_like.load_model(HF | {"vocab_size": 11}, init="random")[0], {"beta": 0.1},
        "ref_model: it has a vocabulary of 11 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_references_that_cannot_be_read_are_refused(name):
    reference, settings, message = REFERENCES[name]
    with pytest.raises(UserError, match=message):
        make(GRPOConfig(num_generations=4, **settings), learner=GRPOLearner, ref_model=reference())


def test_an_engine_by_name_needs_the_engine():
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4, engine="vllm", urls=["http://127.0.0.1:1"])
    with pytest.raises(UserError, match="rollout.engine: got 'vllm'; give the engine itself"):
        make(rollout=rollout)


@pytest.fixture
def update_threads():
    """The names of the threads that compiled an update."""
    names = []

    def on_event(event, duration, **metadata):
        if event == "/jax/core/compile/backend_compile_duration" and metadata.get("fun_name") in ("step", "jit(step)"):
            names.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield names
    finish_compilations()
    jax.monitoring.unregister_event_duration_listener(on_event)


def finish_compilations():
    """Waits for what is compiled ahead. An update of other lengths does not."""
    for thread in threading.enumerate():
        if thread.name.startswith("compiler"):
            thread.join()


AHEAD = {
    "one update": {},
    "two updates": {"mini_batch_size": 2},
    "with a reference": {"algo": GRPOConfig(num_generations=4, beta=0.1), "learner": GRPOLearner},
}


@pytest.mark.parametrize("settings", others_slow(AHEAD, "one update"))
def test_first_update_is_compiled_while_its_completions_are_sampled(settings, update_threads):
    # another optimizer than that of other tests, whose programs would be used again
    learner = make(reward=varied, actor_optimizer=optax.sgd(0.25), **AHEAD[settings])
    rows = collect(learner)
    assert len(update_threads) == 1 and update_threads[0].startswith("compiler")
    assert [row["train/perf/update_programs"] for row in rows] == [1, 1]


def test_update_of_other_lengths_than_were_compiled_ahead(update_threads, monkeypatch):
    def shorter(*arguments):
        batch = longest_batch(*arguments)
        cut = {"completion_lengths": batch.completion_lengths - 2}
        for name in ("completion_tokens", "rollout_logprobs", "token_mask"):
            cut[name] = getattr(batch, name)[:, :, :-2]
        return batch._replace(**cut)

    expected = make(reward=varied, actor_optimizer=optax.sgd(0.25))
    rows = collect(expected)
    monkeypatch.setattr("tunix_like.training.learner.longest_batch", shorter)
    update_threads.clear()
    learner = make(reward=varied, actor_optimizer=optax.sgd(0.25))
    assert [row["train/loss"] for row in collect(learner)] == [row["train/loss"] for row in rows]
    assert_same(params_of(learner.model), params_of(expected.model))
    finish_compilations()
    assert len(update_threads) == 2 and learner.programs.traces == 2


def test_update_that_would_not_fit_is_not_compiled_ahead(update_threads, monkeypatch):
    """The longest completions may never come, so what they would need does not end the run."""
    pack = Planner.pack

    def small_memory(planner, batch, *arguments):
        if (batch.completion_lengths == 24).all():
            raise UserError("does not fit")
        return pack(planner, batch, *arguments)

    monkeypatch.setattr(Planner, "pack", small_memory)
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=24)
    learner = make(reward=varied, rollout=rollout, actor_optimizer=optax.sgd(0.25))
    assert collect(learner)[-1]["step"] == 2
    assert set(update_threads) == {threading.main_thread().name}
