"""Compares the prefill in pieces with the prefill of whole prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.layer_kinds import SHARED_KEYS
from tunix_like.config.schema import MeshConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import DeltaRule, Experts
from tunix_like.models.sharding import build_mesh, place_params, place_prompts, scope
from tunix_like.rollout import decoding, shapes

PLAIN = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIGS = {
    "plain": PLAIN,
    "windows and sinks": dataclasses.replace(PLAIN, windows=(6, None), local_rope_theta=1e4, sinks=True),
    "experts": dataclasses.replace(
        PLAIN, experts=Experts(number=4, per_token=2, intermediate_size=24, normalised=True)
    ),
    "keys of earlier layers": dataclasses.replace(PLAIN, **SHARED_KEYS),
    "recurrent": dataclasses.replace(
        PLAIN,
        delta_rule=DeltaRule(key_heads=2, value_heads=4, key_width=8, value_width=8, taps=4),
        recurrent_layers=(True, False),
        output_gate=True,
    ),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 30)), jnp.int32)
LENGTHS = jnp.array([30, 1, 17, 8])


def assert_equal_prompts(found, expected, atol=2e-5):
    """The keys and values of padding may differ."""
    np.testing.assert_allclose(found[0], expected[0], atol=atol)
    real = np.arange(TOKENS.shape[1])[None] < LENGTHS[:, None]
    for kept, wanted in zip(found[1], expected[1], strict=True):
        for one, other in zip(kept, wanted, strict=True):
            assert one.shape == other.shape
            axis = [axis for axis, size in enumerate(other.shape) if size == TOKENS.shape[1]]
            mask = np.expand_dims(real, [i for i in range(1, other.ndim) if i not in axis]) if axis else True
            np.testing.assert_allclose(np.where(mask, one, 0), np.where(mask, other, 0), atol=atol)
    if expected[2] is not None:
        np.testing.assert_array_equal(np.asarray(found[2])[real], np.asarray(expected[2])[real])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("piece", [8, pytest.param(10, marks=pytest.mark.slow)])
def test_pieces_equal_whole_prompts(name, piece):
    model = Decoder(CONFIGS[name], rngs=nnx.Rngs(0))
    for layer in model.layers:
        if layer.self_attn is not None and layer.self_attn.sinks is not None:
            layer.self_attn.sinks[...] = jnp.arange(4.0)
    whole = nnx.jit(lambda model: model.prefill(TOKENS, LENGTHS))(model)
    assert_equal_prompts(nnx.jit(lambda model: model.prefill_in_pieces(TOKENS, LENGTHS, piece))(model), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tokens"), [(None, 40), ([2, 2, 2], 10)], ids=str)
def test_long_prompts_are_prefilled_in_pieces(monkeypatch, shape, tokens):
    """A device has four prompts, or one of them on the mesh."""
    pieces, prefill = [], Decoder.prefill_in_pieces
    monkeypatch.setattr(shapes, "PREFILL_TOKENS", tokens)
    monkeypatch.setattr(shapes, "FEWEST_PREFILLED", 4)
    monkeypatch.setattr(
        Decoder, "prefill_in_pieces", lambda self, *given, piece: pieces.append(piece) or prefill(self, *given, piece)
    )
    model = Decoder(PLAIN, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    mesh = None if shape is None else build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"]))
    with scope(mesh):
        inputs = place_prompts((TOKENS, LENGTHS), mesh, axis=0)
        found = decoding.prefill(graphdef, params if mesh is None else place_params(params, mesh), *inputs)
    assert pieces == [8]
    assert_equal_prompts(jax.device_get((found.hidden, found.cache, None)), model.prefill(TOKENS, LENGTHS))


def test_pieces_of_any_number_of_prompts():
    for prompts in (1, 65_535, 65_536, 65_537, 10**9):
        assert 1 <= shapes.prefill_piece(prompts, 100) <= 100
