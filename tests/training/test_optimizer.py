"""Tests the schedule at values computed by hand, one AdamW update computed by hand, and that the state does not depend
on the run's length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError
from tunix_like.step.optimizer import build_optimizer, build_schedule


def rates(config: OptimizerConfig, total: int | None, updates: list[int]) -> np.ndarray:
    return np.array([float(build_schedule(config, total)(n)) for n in updates])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]),
    ],
)
def test_schedule_by_hand(schedule, expected):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=2, end_fraction=0.2)
    np.testing.assert_allclose(rates(config, 10, [0, 1, 2, 6, 10, 99]), 2 * np.array(expected), rtol=1e-6)


def test_cosine_is_not_linear():
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", end_fraction=0.0)
    np.testing.assert_allclose(rates(config, 4, [1]), [0.5 + 0.5 * np.sqrt(0.5)], rtol=1e-6)


def test_warm_up_longer_than_the_run_only_rises():
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=10)
    np.testing.assert_allclose(rates(config, 5, [0, 4]), [0.1, 0.5], rtol=1e-6)
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4)
    np.testing.assert_allclose(rates(config, 4, [0, 3]), [0.25, 1.0], rtol=1e-6)


def test_no_update_has_rate_zero():
    for schedule in ("constant", "linear", "cosine"):
        config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=3, end_fraction=0.0)
        assert (rates(config, 6, list(range(6))) > 0).all()


def test_schedule_can_be_traced():
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=3)
    schedule = build_schedule(config, 9)
    assert float(jax.jit(schedule)(jnp.int32(5))) == pytest.approx(float(schedule(5)))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decaying_schedule_without_max_steps_is_rejected(schedule):
    with pytest.raises(UserError, match=r"optimizer\.schedule: .*max_steps"):
        build_optimizer(OptimizerConfig(schedule=schedule), None)


def test_first_update_by_hand():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, max_grad_norm=None, eps=1e-12)
    params = {"w": jnp.full((1, 2), 2.0), "norm": jnp.full((2,), 2.0)}
    optimizer = build_optimizer(config, None)
    grads = {"w": jnp.array([[3.0, -4.0]]), "norm": jnp.array([1.0, 1.0])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first step is the sign of the gradient; decay adds 0.5 * 2 to the matrix and nothing to the vector.
    np.testing.assert_allclose(updates["w"], [[-0.1 * (1 + 1), -0.1 * (-1 + 1)]], atol=1e-6)
    np.testing.assert_allclose(updates["norm"], [-0.1, -0.1], rtol=1e-5)


def test_gradient_is_clipped_by_its_global_norm():
    # Adam ignores a common scale unless eps dominates: with a huge eps the update is proportional to the gradient.
    config = OptimizerConfig(learning_rate=1e6, eps=1e6, max_grad_norm=1.0)
    params = {"a": jnp.zeros((1, 1)), "b": jnp.zeros((1,))}
    optimizer = build_optimizer(config, None)
    grads = {"a": jnp.array([[30.0]]), "b": jnp.array([-40.0])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose([updates["a"][0, 0], updates["b"][0]], [-0.6, 0.8], rtol=1e-4)


def test_state_does_not_depend_on_the_length_of_the_run():
    params = {"layers": {0: jnp.ones((2, 2)), 1: jnp.ones((2,))}}
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    short, long = (build_optimizer(config, total).init(params) for total in (3, 1000))
    assert jax.tree.structure(short) == jax.tree.structure(long)
    updates, _ = build_optimizer(config, 1000).update(params, short, params)
    assert jax.tree.structure(optax.apply_updates(params, updates)) == jax.tree.structure(params)
