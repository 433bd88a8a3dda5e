"""Tests the step with bfloat16 compute and float32 weights: its error is that of the plain model for every layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.models.log_probabilities import token_logprobs
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import step_inputs
from tunix_like.types import GroupBatch

from .repeated_prompts import (
    EVERYONE,
    LAYOUTS,
    OBJECTIVES,
    PARAMS,
    PLAIN,
    WHOLE,
    Reinforce,
    data_of,
    difference,
    keep_gradient,
    make_model,
    plain_step,
    repeated,
)

pytestmark = pytest.mark.slow


def rounded_gradient(objective, data, **model):
    graphdef, params = make_model(dtype=jnp.bfloat16, **model)
    run = plain_step(graphdef, objective, keep_gradient, PLAIN)
    return jax.jit(run)(params, params, data)[1]


@pytest.mark.parametrize("layout", [WHOLE, LAYOUTS[1]], ids=str)
def test_error_is_as_small_as_that_of_the_plain_model(layout):
    """The plain model in bfloat16 has an error of 6%. The step has the same size of error, and differs from the plain
    model in bfloat16 by about 1%."""
    _, exact = repeated()(PARAMS, EVERYONE, None, None)
    _, plain = repeated(graphdef=make_model(dtype=jnp.bfloat16)[0])(PARAMS, EVERYONE, None, None)
    found = rounded_gradient(OBJECTIVES["on-policy"], data_of(layout))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    assert 0.01 < difference(found, exact) < 1.2 * difference(plain, exact) < 0.1
    assert difference(found, plain) < 0.02


def test_log_probabilities_of_hidden_states_are_float32():
    """Hidden states and output matrix are rounded, later operations are not. The oracle is float64 with the same
    rounded numbers."""
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((12, 16), (16, 19)))
    targets = rng.integers(0, 19, 12)
    run = jax.jit(token_logprobs, static_argnums=(3, 4))
    found, entropy = (x[0] for x in run(hidden[None], head, jnp.asarray(targets)[None], 0.7, 5))
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / 0.7
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, table[np.arange(12), targets], rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(table) * table).sum(axis=1), rtol=0, atol=1e-5)


def test_gradient_of_the_output_matrix_is_summed_in_float32():
    """With more than 600 equal pieces of one token, a sum of gradients in bfloat16 would stop at 256 times the
    first."""
    hidden, head = jnp.ones((1, 600, 4), jnp.bfloat16), jnp.zeros((4, 2), jnp.float32)
    total = lambda head: token_logprobs(hidden, head, jnp.zeros((1, 600), jnp.int32), 1.0, 1)[0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(total)(head), 300 * np.array([[1.0, -1.0]] * 4))


def test_gradient_of_a_prompt_over_chunks_is_summed_in_float32():
    """512 completions have equal gradients and a chunk each. A sum in bfloat16 would stop at 256 times the first. The
    check uses the embeddings of the prompt's tokens, which have no other gradient."""
    shape = (1, 512)
    batch = GroupBatch(
        prompt_tokens=np.array([[3, 4, 5, 6]], np.int32),
        prompt_lengths=np.array([4], np.int32),
        completion_tokens=np.broadcast_to(np.array([7, 8], np.int32), (*shape, 2)),
        completion_lengths=np.full(shape, 2, np.int32),
        rollout_logprobs=None,
        rewards=np.ones(shape, np.float32),
        scored=np.ones(shape, bool),
    )

    def moved(bins: int):
        packed = pack(batch.completion_lengths, batch.scored, 2, Layout(1, 1, bins, False))
        assert packed.chunks.tolist() == [shape[1] // bins]
        found = rounded_gradient(Reinforce(), step_inputs(batch, np.ones(1, bool), packed), num_layers=1)
        return found["embed_tokens"]["embedding"][3:7]

    assert difference(moved(1), moved(shape[1])) < 0.05
