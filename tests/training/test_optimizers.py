"""Tests muon, lion, adafactor and moments in bfloat16: updates against optax in a loop over the parameters, layouts,
meshes, resume, skipped updates, refused keys, and the bytes of the state against the estimate."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from tests.callbacks import OnRow
from tests.parameters import others_slow
from tunix_like import OptimizerConfig, RolloutConfig, SFTConfig, SFTTrainer
from tunix_like.config.schema import LoraConfig, MeshConfig
from tunix_like.errors import UserError
from tunix_like.models.lora import add_lora
from tunix_like.models.sharding import build_mesh, place_params, scope, shardings_of
from tunix_like.planning import sizes
from tunix_like.planning.memory import update_phases
from tunix_like.step.optimizer import (
    build_optimizer,
    build_schedule,
    critic_optimizer,
    init_optimizer,
    moment_segments,
    unstack_moments,
    updates_done,
)
from tunix_like.step.train_step import StepSpec, TrainState, jit_train_step, train_step

from .repeated_prompts import PLAIN, WHOLE, data_of, make_model, make_objective
from .small_learner import ROWS, TOKENIZER, assert_same, collect, differ, make
from .small_learner import make_model as make_small
from .test_working_weights import MODELS

NAMES = "adamw", "muon", "lion", "adafactor"
KINDS = (*((name, "float32") for name in NAMES), *((name, "bfloat16") for name in NAMES[:3]))
"""Optimizers with the dtypes of moments that they support."""
_MOST_SLOW = [
    kind if kind == ("muon", "bfloat16") else pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1:]
]
WIDE = dict(hidden_size=128, intermediate_size=136, num_layers=2)
"""Some matrices have two axes of at least 128, so Adafactor factorises their second moment."""


def settings(name: str, dtype: str = "float32", **changes: Any) -> OptimizerConfig:
    """Returns settings in which clipping, warm-up, schedule and weight decay change every update."""
    return OptimizerConfig(
        **dict(learning_rate=0.02, schedule="linear", warmup_steps=2, weight_decay=0.5, max_grad_norm=0.1)
        | dict(name=name, moments_dtype=dtype)
        | changes
    )


def compiled_updates(config: OptimizerConfig, graphdef: Any, params: Any, stacked: bool, mesh: Any = None, steps=3):
    """Runs the compiled step on one batch. Returns the trees of weights after each update, and the last state with
    moments per layer."""
    segments = moment_segments(nnx.merge(graphdef, params).config, config, stacked)
    optimizer = build_optimizer(config, 10, segments is not None)
    state = TrainState(jax.tree.map(jnp.copy, params), init_optimizer(optimizer, params, segments))
    shardings = shardings_of(state, mesh)
    options = PLAIN._replace(stacked=stacked)
    step = jit_train_step(StepSpec(graphdef, make_objective(), optimizer, options, shardings, segments))
    found = []
    with scope(mesh):
        for _ in range(steps):
            state, metrics, _ = step(state, data_of(WHOLE), {})
            assert float(metrics["update/skipped"]) == 0
            found.append(jax.tree.map(np.array, state.params))
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
    return found, unstack_moments(optimizer, state.opt_state, state.params, segments)


@functools.cache
def compiled_gradient(graphdef: Any) -> Any:
    """Returns a function from weights to the gradient of the batch, which is the state of the identity with a trace."""
    trace = optax.trace(0.0)
    step = jax.jit(functools.partial(train_step, StepSpec(graphdef, make_objective(), trace, PLAIN)))
    return lambda params: step(TrainState(params, trace.init(params)), data_of(WHOLE), {})[0].opt_state.trace


def optax_of(name: str, path: tuple[Any, ...], x: Any, config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the optimizer of one parameter. Matrices of experts are parameters of their own."""
    rate = build_schedule(config, 10)
    decay = 0.5 if x.ndim > 1 else 0.0
    if name == "lion":
        return optax.lion(rate, 0.9, 0.99, weight_decay=decay)
    if name == "adafactor":
        fading = lambda update: decay * rate(update)  # noqa: E731
        return optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=fading)
    if name == "muon" and path[-1] == "kernel" and path[0] == "layers":
        return optax.contrib.muon(rate, beta=0.95, weight_decay=decay, consistent_rms=0.2)
    return optax.adamw(rate, 0.9, 0.99, 1e-8, weight_decay=decay)


def by_hand(config: OptimizerConfig, graphdef: Any, params: Any, steps: int = 3) -> list[dict[Any, np.ndarray]]:
    """Updates each parameter alone. The gradient is that of the compiled step, whose tests are elsewhere; its global
    norm is clipped here."""

    def parts(tree: Any) -> dict[Any, Any]:
        flat = {}
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            names = tuple(key.key for key in path)
            apart = config.name == "muon" and names[-1] == "kernel" and x.ndim == 3
            flat |= {(*names[:-1], i, names[-1]): x[i] for i in range(len(x))} if apart else {names: x}
        return flat

    optimizers = {path: optax_of(config.name, path, x, config) for path, x in parts(params).items()}
    states = [optimizer.init(x) for optimizer, x in zip(optimizers.values(), parts(params).values(), strict=True)]

    @jax.jit
    def updated(arrays: Any, states: Any, grads: Any) -> Any:
        found = []
        for optimizer, x, state, grad in zip(optimizers.values(), arrays, states, grads, strict=True):
            updates, state = optimizer.update(grad, state, x)
            found.append((x + updates, state))
        return tuple(zip(*found, strict=True))

    trees = []
    for _ in range(steps):
        grads = list(parts(compiled_gradient(graphdef)(params)).values())
        norm = np.sqrt(sum(float(np.square(np.asarray(x, np.float64)).sum()) for x in grads))
        clipped = [x * min(1.0, 0.1 / norm) for x in grads]
        arrays, states = updated(list(parts(params).values()), states, clipped)
        new = dict(zip(optimizers, arrays, strict=True))

        def together(path: Any, x: Any, new: Any = new) -> Any:
            names = tuple(key.key for key in path)
            if names in new:
                return new[names]
            return jnp.stack([new[(*names[:-1], i, names[-1])] for i in range(len(x))])

        params = jax.tree_util.tree_map_with_path(together, params)
        trees.append(params)
    return trees


def assert_close(found: Any, expected: Any, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_three_updates_equal_optax_on_each_parameter(name):
    """The rate is up to 0.02, and the tolerance a hundredth of it after one update. Lion takes the sign of sums, so
    some numbers whose sum is 0 but for rounding may differ by two steps."""
    model = MODELS["experts after a plain layer"] if name == "muon" else WIDE
    graphdef, params = make_model(**model)
    found, _ = compiled_updates(settings(name), graphdef, params, stacked=False)
    for update, (one, other) in enumerate(zip(found, by_hand(settings(name), graphdef, params), strict=True)):
        far = [np.abs(a - b) > 2e-4 for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)]
        share = sum(x.sum() for x in far) / sum(x.size for x in far)
        assert share <= (1e-3 if name == "lion" else 0), update


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_stacked_layers_on_a_mesh_have_the_updates_of_single_layers(name):
    """Muon also with experts, whose axis is split over devices. Lion and Adafactor divide gradients by their size, so
    they are tested with a model that has no gradient of 0 but for rounding."""
    model = {"muon": MODELS["experts after a plain layer"], "adafactor": WIDE, "lion": dict(num_layers=2)}[name]
    graphdef, params = make_model(**model | {"vocab_size": 20})
    mesh = build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=["fsdp", "ep", "tp"]))
    plain, moments = compiled_updates(settings(name), graphdef, params, False, steps=2)
    split, others = compiled_updates(settings(name), graphdef, place_params(params, mesh), True, mesh, steps=2)
    assert jax.tree.structure(moments) == jax.tree.structure(others)
    assert_close(split[0], plain[0], 2e-4)  # after the second update, signs of Lion differ by rounding


@pytest.mark.parametrize("name", others_slow(NAMES, "muon"))
def test_state_counts_updates_and_skips_non_finite_gradients(name):
    graphdef, params = make_model(num_layers=1)
    optimizer = build_optimizer(settings(name), 10)
    state = TrainState(params, init_optimizer(optimizer, params))
    bad = jax.tree.map(jnp.copy, state)
    bad.params["norm"]["scale"] = bad.params["norm"]["scale"].at[0].set(jnp.nan)
    before, poisoned = (jax.tree.map(np.array, each) for each in (state, bad))
    step = jit_train_step(StepSpec(graphdef, make_objective(), optimizer, PLAIN))
    bad, metrics, _ = step(bad, data_of(WHOLE), {})
    assert float(metrics["update/skipped"]) == 1
    assert_same(jax.tree.map(np.asarray, bad), poisoned)
    state, metrics, _ = step(state, data_of(WHOLE), {})
    assert float(metrics["update/skipped"]) == 0 and updates_done(state.opt_state) == 1
    assert differ(state.params, before.params)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_estimate_of_the_moments_equals_the_bytes_of_the_state(name, dtype):
    model = make_small()
    config = settings(name, dtype)
    params = nnx.to_pure_dict(nnx.split(model)[1])
    arrays = jax.tree.leaves(init_optimizer(build_optimizer(config, 10), params))
    held = sum(x.nbytes for x in arrays)
    planner = sizes.Planner(model, training=sizes.RLTrainingConfig(actor_optimizer=config))
    work = planner.update_work((4, 4), (8, 4))
    assert work.moments == held and update_phases(work, 1)[0].parts["optimizer"] == held
    sizes_of = {tuple(key.key for key in path): x.size for path, x in jax.tree_util.tree_leaves_with_path(params)}
    count = sum(sizes_of.values())
    kernels = sum(size for path, size in sizes_of.items() if path[0] == "layers" and path[-1] == "kernel")
    size = 2 if dtype == "bfloat16" else 4
    expected = {"adamw": 2 * count, "muon": 2 * count - kernels, "lion": count}
    if name in expected:
        assert held == pytest.approx(size * expected[name], abs=64)  # counters and Muon's three coefficients
        wide = [x for x in arrays if x.ndim > 1]
        assert {str(x.dtype) for x in wide} == {dtype}


def test_estimates_of_the_critic_and_on_a_mesh():
    """The moments of a critic, and those that one of eight devices holds."""
    model = make_small()
    kinds = model.param_dtype, None, None
    works = {
        name: sizes.critic_work(model.config, kinds, True, None, critic_optimizer(settings(name), 0.1))
        for name in NAMES[:3]
    }
    assert works["lion"].moments + 4 < works["muon"].moments < works["adamw"].moments
    mesh = build_mesh(MeshConfig(shape=[8, 1]))
    graphdef, params = make_model(vocab_size=24, num_layers=1)
    model = nnx.merge(graphdef, params)
    for name in NAMES:
        config = settings(name)
        training = sizes.RLTrainingConfig(actor_optimizer=config)
        state = init_optimizer(build_optimizer(config, 10), place_params(params, mesh))
        shards = (x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        assert sizes.Planner(model, mesh, training).update_work((4, 4), (8, 4)).moments == sum(shards)


def test_transformation_of_the_user_is_counted():
    learner = make()  # SGD without momentum
    assert learner.planner.update_work((4, 4), (8, 4)).moments == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*KINDS[1:4], ("adamw", "bfloat16")])
def test_resumed_run_equals_the_uninterrupted_one(name, dtype, tmp_path):
    def train(folder: str, steps: int) -> Any:
        config = settings(name, dtype, schedule="constant")
        learner = make(max_steps=steps, output_dir=str(tmp_path / folder), actor_optimizer=config)
        learner.train(ROWS, batch_size=4)
        return jax.tree.map(np.asarray, learner.state)

    whole = train("whole", 4)
    train("halves", 2)
    assert_same(train("halves", 4), whole)
    other = OptimizerConfig(learning_rate=0.02)
    with pytest.raises(UserError, match=r"optimizer\.(name|moments_dtype)"):
        collect(make(max_steps=5, output_dir=str(tmp_path / "halves"), actor_optimizer=other))


@pytest.mark.parametrize(("name", "dtype"), _MOST_SLOW)
def test_loss_of_fine_tuning_falls(name, dtype):
    rate = {"lion": 3e-3}.get(name, 1e-2)
    config = SFTConfig(max_steps=12, batch_size=8, optimizer=OptimizerConfig(rate, name=name, moments_dtype=dtype))
    lengths = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4)
    trainer = SFTTrainer(model=make_small(), tokenizer=TOKENIZER, sft_config=config, rollout_config=lengths)
    losses = []
    trainer.train(ROWS, callbacks=[OnRow(lambda row: losses.append(row["sft/loss"]))])
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    assert trainer.planner.update_work((8, 1), (8, 8)).moments == sum(
        x.nbytes for x in jax.tree.leaves(trainer.state.opt_state)
    )


def test_moments_are_rounded_only_when_they_are_stored():
    """The second update in bfloat16 by hand: the old moments are widened, and multiplied in float32."""
    config = OptimizerConfig(1.0, moments_dtype="bfloat16", max_grad_norm=None, eps=1e-12)
    optimizer = build_optimizer(config, None)
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((8, 8))}
    state = optimizer.init(params)
    m = v = np.zeros((8, 8), np.float32)
    narrow = lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))  # noqa: E731
    for update in (1, 2):
        gradient = rng.normal(size=(8, 8)).astype(np.float32)
        found, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        m = np.float32(0.9) * m + np.float32(0.1) * gradient
        v = np.float32(0.99) * v + np.float32(0.01) * gradient**2
        expected = -(m / (1 - 0.9**update)) / np.sqrt(v / (1 - 0.99**update))
        np.testing.assert_allclose(found["w"], expected, rtol=1e-5)
        m, v = narrow(m), narrow(v)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(name="adafactor", b2=0.9), "optimizer.b2: the optimizer 'adafactor' does not read it"),
        (dict(name="adafactor", moments_dtype="bfloat16"), "optimizer.moments_dtype: the optimizer 'adafactor'"),
        (dict(name="lion", eps=1e-6), "optimizer.eps: the optimizer 'lion' does not read it"),
        (dict(b2=0.999, moments_dtype="bfloat16"), "optimizer.b2: got 0.999; with moments_dtype=bfloat16 it must be"),
        (dict(name="sgd"), "optimizer.name: unknown value 'sgd'"),
    ],
)
def test_refused_settings(changes, words):
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**changes)
    assert words in str(caught.value)


def test_muon_refuses_adapters():
    """Also lion trains adapters."""
    model = add_lora(make_small(), LoraConfig(rank=2))
    with pytest.raises(UserError, match=r"optimizer\.name: muon is for matrices of the model, but only adapters"):
        make(model=model, actor_optimizer=OptimizerConfig(name="muon"))
    learner = make(model=model, actor_optimizer=OptimizerConfig(0.1, name="lion"))
    before = jax.tree.map(np.array, learner.state.params)
    learner.train(ROWS, batch_size=4)
    assert differ(learner.state.params, before)
