"""Tests stacked layers and prepared weights against the plain ones: gradients, log-probabilities, dtypes and
patterns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.layer_kinds import EXPERTS_BESIDE, SHARED_KEYS
from tunix_like.config.schema import LoraConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import DeltaRule, Experts, YarnScaling
from tunix_like.models.layer_stack import Segment, segments_of, stack_layers, unstack_layers
from tunix_like.models.log_probabilities import token_logprobs
from tunix_like.models.lora import add_lora, split_params
from tunix_like.step.forward import batch_logprobs
from tunix_like.step.train_step import StepSpec, gradient
from tunix_like.step.working_weights import working_weights

from .repeated_prompts import BATCH, LAYOUTS, PLAIN, VOCABULARY, WHOLE, data_of, make_model, make_objective, packed_as

EXPERTS = Experts(number=4, per_token=2, intermediate_size=6, normalised=True)
MODELS = {
    "equal layers": dict(num_layers=3),
    "windows in a pattern": dict(num_layers=5, windows=(3, None, 3, None, 3), local_rope_theta=100.0),
    "experts after a plain layer": dict(num_layers=3, experts=EXPERTS, expert_layers=(False, True, True)),
    "norms of outputs, scaled queries": dict(
        num_layers=5,
        windows=(3, None, 3, None, 3),
        local_rope_theta=100.0,
        rope_scaling=YarnScaling(2.0, 4),
        query_scaling=0.5,
        qk_norm=True,
        joint_qk_norm=True,
        input_norms=False,
        post_norms=True,
    ),
    "sinks, experts with biases": dict(
        num_layers=4,
        windows=(3, None, 3, None),
        o_bias=True,
        sinks=True,
        activation="clamped_swiglu",
        experts=dataclasses.replace(EXPERTS, biases=True),
    ),
    "tied embeddings": dict(num_layers=2, tie_embeddings=True),
    "recurrent layers": dict(
        num_layers=4, delta_rule=DeltaRule(1, 2, 8, 8, 4), recurrent_layers=(True, False) * 2, output_gate=True
    ),
    "keys of the last layers of a stack": SHARED_KEYS | dict(num_layers=8, windows=(3, None) * 4, shared_kv_layers=4),
    "experts beside an MLP": EXPERTS_BESIDE,
}


def gradients(graphdef, params, stacked: bool, remat: bool, layout, frozen=None):
    options = PLAIN._replace(stacked=stacked, remat=remat)
    spec = StepSpec(graphdef, make_objective(), None, options)
    data = data_of(layout)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=BATCH.scored.shape), jnp.float32)
    sets = jnp.asarray(data.packed.sets)
    return jax.jit(lambda params: gradient(spec, params, data, weights[..., None], weights, sets, frozen)[0])(params)


def assert_equal_trees(found, expected, tolerance=2e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(other).max())))


@functools.cache
def plain_gradients(name: str, layout):
    """Returns the gradients of one of `MODELS` with layers that are neither stacked nor recomputed."""
    return gradients(*make_model(**MODELS[name]), False, False, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, remat, layout",
    [(name, True, LAYOUTS[2]) for name in MODELS] + [("equal layers", remat, WHOLE) for remat in (False, True)],
    ids=str,
)
def test_stacked_layers_have_the_same_gradient(name, remat, layout):
    """Compares the gradient of every parameter, for lanes with their own prompts (`WHOLE`) and for lanes that select a
    prompt of a set."""
    plain = plain_gradients(name, layout)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain)) > 0.1
    assert_equal_trees(gradients(*make_model(**MODELS[name]), True, remat, layout), plain)


@pytest.mark.slow
def test_stacked_layers_have_the_same_logprobs():
    graphdef, params = make_model(**MODELS["windows in a pattern"])
    values = [
        jax.jit(functools.partial(batch_logprobs, graphdef, options=PLAIN._replace(stacked=stacked)))(
            params, BATCH, packed_as(LAYOUTS[2])
        )
        for stacked in (False, True)
    ]
    np.testing.assert_allclose(*values, atol=1e-5)


@pytest.mark.slow
def test_adapters_on_stacked_layers_have_the_same_gradient():
    graphdef, params = make_model(num_layers=3)
    adapted = add_lora(nnx.merge(graphdef, params), LoraConfig(rank=2, targets=["q_proj", "down_proj"]))
    graphdef, state = nnx.split(adapted)
    shake = lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)  # noqa: E731
    trained, frozen = split_params(nnx.to_pure_dict(state))
    trained = jax.tree.map(shake, trained)
    plain, stacked = (gradients(graphdef, trained, flag, flag, WHOLE, frozen) for flag in (False, True))
    assert_equal_trees(stacked, plain)


def test_compiled_program_contains_equal_layers_once():
    """The number of matrix products does not depend on the number of layers."""

    def products(layers: int) -> int:
        graphdef, params = make_model(num_layers=layers)
        run = functools.partial(batch_logprobs, graphdef, options=PLAIN._replace(stacked=True))
        return jax.jit(run).lower(params, BATCH, packed_as(WHOLE)).as_text().count("stablehlo.dot_general")

    assert products(2) == products(6)


def test_prepared_weights_have_the_compute_dtype():
    """Matrices are cast once. Norms are not cast, nor is the embedding, of which few rows are read, nor the output
    matrix, whose gradient is summed in its dtype."""
    graphdef, params = make_model(dtype=jnp.bfloat16, tie_embeddings=True)
    trained = working_weights(graphdef, params, {}, stacked=True).trained
    dtypes = {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(trained)}
    kept = {name for name, dtype in dtypes.items() if dtype == jnp.float32}
    parts = ("norm", "embedding", "bias", "output_matrix")
    assert all(any(part in name for part in parts) for name in kept) and len(kept) < len(dtypes)
    assert trained["output_matrix"].shape == (16, VOCABULARY) and trained["output_matrix"].dtype == jnp.float32
    assert trained["layers"][0]["mlp"]["up_proj"]["kernel"].shape == (2, 16, 24)


@pytest.mark.parametrize("chunk", [512, 8])
def test_the_gradient_of_the_output_matrix_does_not_depend_on_the_pieces(chunk):
    """With bfloat16 products, 64 pieces give the same gradient as one, because the sum over them is float32."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 512, 32)), jnp.bfloat16)
    graphdef, params = make_model(dtype=jnp.bfloat16, tie_embeddings=True, hidden_size=32, vocab_size=64)
    head = working_weights(graphdef, params, {}, stacked=False).trained["output_matrix"]
    targets = jnp.asarray(rng.integers(0, 64, (1, 512)))

    def loss(head, hidden, chunk):
        return token_logprobs(hidden, head, targets, 1.0, chunk)[0].sum()

    found = jax.jit(jax.grad(loss), static_argnums=2)(head, hidden, chunk)
    exact = jax.grad(loss)(head.astype(jnp.float32), hidden.astype(jnp.float32), 512)
    assert float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < 4e-3


PATTERNS = {
    "equal": ([None] * 4, [Segment(0, 1, 4)]),
    "Gemma 3": ([8, 8, 8, 8, 8, None] * 2 + [8, 8], [Segment(0, 6, 2), Segment(12, 1, 2)]),
    "alternating": ([4, None] * 3, [Segment(0, 2, 3)]),
    "no pattern": ([1, 2, 3], [Segment(0, 1, 1), Segment(1, 1, 1), Segment(2, 1, 1)]),
    "the end of a pattern": ([4, None, 4, None, 4], [Segment(0, 2, 2), Segment(4, 1, 1)]),
    "keys of other layers": ([4, None] * 4, [Segment(0, 2, 2), Segment(4, 2, 2)]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_segments_of_layer_patterns(name):
    windows, expected = PATTERNS[name]
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=len(windows), num_heads=1, num_kv_heads=1,
        head_dim=8, windows=tuple(windows), shared_kv_layers=4 if name == "keys of other layers" else 0,
    )  # fmt: skip
    segments = segments_of(config)
    assert list(segments) == expected
    layers = {index: {"kernel": jnp.full(3, float(index))} for index in range(len(windows))}
    stacked = stack_layers(layers, segments)
    assert len(stacked) == sum(segment.period for segment in segments)
    restored = unstack_layers(stacked, segments)
    assert list(restored) == list(layers)
    assert all(float(restored[index]["kernel"][0]) == index for index in layers)


def test_working_weights_do_not_change_the_model():
    """Preparing the weights of a step does not change the model."""
    graphdef, params = make_model()
    before = nnx.merge(graphdef, params)
    working_weights(graphdef, params, {}, stacked=True)
    assert isinstance(before, Decoder) and before.segments is None and len(before.layers) == 2
