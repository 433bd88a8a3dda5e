"""Tests moments of stacked layers: updates and checkpoints equal those with moments per layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like.config.schema import LoraConfig, MeshConfig, OptimizerConfig
from tunix_like.models.layer_stack import segments_of
from tunix_like.models.lora import add_lora, split_params
from tunix_like.models.sharding import build_mesh, place_params, scope, shardings_of
from tunix_like.step.optimizer import (
    build_optimizer,
    init_optimizer,
    stack_moments,
    state_shapes,
    unstack_moments,
)
from tunix_like.step.train_step import StepSpec, TrainState, jit_train_step
from tunix_like.training import arguments

from .repeated_prompts import PLAIN, WHOLE, data_of, make_model, make_objective
from .small_learner import ROWS, make
from .test_working_weights import MODELS, assert_equal_trees

LAYOUTS_OF_MOMENTS = "windows in a pattern", "experts after a plain layer", "keys of the last layers of a stack"
"""Layers in a pattern with a rest, layers of unequal parameters in different segments, and in one."""

CONFIG = OptimizerConfig(learning_rate=0.01, weight_decay=0.5, max_grad_norm=0.1, warmup_steps=0)


def state_after(graphdef, params, frozen, segments, steps=2, mesh=None):
    """Returns the state after some updates, with moments per layer, and the metrics of each update."""
    optimizer = build_optimizer(CONFIG, None, segments is not None)
    state = TrainState(jax.tree.map(jnp.copy, params), init_optimizer(optimizer, params, segments))
    options = PLAIN._replace(stacked=True)
    shardings, metrics = shardings_of(state, mesh), []
    step = jit_train_step(StepSpec(graphdef, make_objective(), optimizer, options, shardings, segments))
    with scope(mesh):
        for _ in range(steps):
            state, row, _ = step(state, data_of(WHOLE), frozen)
            metrics.append(row)
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
    moments = unstack_moments(optimizer, state.opt_state, state.params, segments)
    return TrainState(state.params, moments), metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS_OF_MOMENTS)
def test_updates_equal_those_with_moments_per_layer(name):
    """Compares weights, moments and metrics after updates with clipping and weight decay. Decay would also apply to the
    norms' weights if the first axis of a stack counted as an axis of the weights."""
    graphdef, params = make_model(**MODELS[name])
    segments = segments_of(nnx.merge(graphdef, params).config)
    (expected, metrics), (found, others) = (state_after(graphdef, params, {}, value) for value in (None, segments))
    assert_equal_trees(found, expected)
    assert all(float(row["update/skipped"]) == 0 for row in metrics)
    # The second norm is of weights that differ by the rounding of the first update; the state has that gradient too.
    assert float(others[0]["grad_norm"]) == pytest.approx(metrics[0]["grad_norm"])


@pytest.mark.slow
def test_updates_of_adapters_equal_those_with_moments_per_layer():
    graphdef, params = make_model(num_layers=3)
    model = add_lora(nnx.merge(graphdef, params), LoraConfig(rank=2, targets=["q_proj", "down_proj"]))
    graphdef, state = nnx.split(model)
    mesh = build_mesh(MeshConfig())
    trained, frozen = split_params(place_params(nnx.to_pure_dict(state), mesh))
    choices = None, segments_of(model.config)
    assert_equal_trees(*(state_after(graphdef, trained, frozen, segments, mesh=mesh)[0] for segments in choices))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS_OF_MOMENTS)
def test_stacks_are_sharded_like_their_layers(name):
    """On a mesh, updated weights and moments keep their shardings."""
    mesh = build_mesh(MeshConfig(shape=[4, 2]))
    graphdef, params = make_model(**MODELS[name] | {"vocab_size": 20})
    segments = segments_of(nnx.merge(graphdef, params).config)
    placed = place_params(params, mesh)
    found, expected = (state_after(graphdef, placed, {}, value, mesh=mesh)[0] for value in (segments, None))
    assert_equal_trees(found, expected)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_of_the_state_have_its_shardings(name):
    graphdef, params = make_model(**MODELS[name] | {"vocab_size": 20})
    segments = segments_of(nnx.merge(graphdef, params).config)
    placed = place_params(params, build_mesh(MeshConfig(shape=[4, 2])))
    optimizer = build_optimizer(CONFIG, None, True)
    shapes = state_shapes(optimizer, placed, segments)
    state = init_optimizer(optimizer, placed, segments)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert shape.shape == array.shape and shape.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_stacking_inverts_unstacking():
    graphdef, params = make_model(**MODELS["experts after a plain layer"])
    segments = segments_of(nnx.merge(graphdef, params).config)
    optimizer = build_optimizer(CONFIG, None, True)
    state = init_optimizer(optimizer, params, segments)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    single = unstack_moments(optimizer, state, params, segments)
    assert jax.tree.structure(single) == jax.tree.structure(build_optimizer(CONFIG, None).init(params))
    jax.tree.map(np.testing.assert_array_equal, stack_moments(optimizer, single, params, segments), state)


@pytest.mark.slow
def test_run_is_resumed_with_the_other_layout(tmp_path, monkeypatch):
    """A checkpoint does not depend on the layout: a run with stacked moments is resumed without them, and the
    reverse."""
    chosen = arguments.likelihood_options

    def train(folder, steps: int, stacked: bool):
        options = functools.partial(lambda *given: chosen(*given)._replace(stacked=stacked))
        monkeypatch.setattr(arguments, "likelihood_options", options)
        learner = make(max_steps=steps, output_dir=str(tmp_path / folder), checkpoint_every_n_steps=1)
        learner.train(ROWS, batch_size=2)
        return learner.params

    plain = train("plain", 4, False)
    for folder, order in (("first", (True, False)), ("then", (False, True)), ("stacked", (True, True))):
        train(folder, 2, order[0])
        assert_equal_trees(train(folder, 4, order[1]), plain)
    jax.tree.map(np.testing.assert_array_equal, train("whole", 4, True), train("stacked", 4, True))
