"""Compares attention whose tokens are split over the mesh axis `cp` with attention on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from tunix_like import RolloutConfig, UserError
from tunix_like.models import attention_kernels
from tunix_like.models.attention import attention, group_attention
from tunix_like.models.attention_parts import Causal, Lengths, part_of
from tunix_like.models.attention_sequence import query_order
from tunix_like.models.sharding import check_lengths

P, G, S, T, H, K, WIDTH = 2, 2, 32, 64, 4, 2, 16
LENGTHS = jnp.array([20, 32])
SEGMENTS = jnp.asarray(np.repeat([[0] * 30 + [1] * 20 + [-1] * 14], P * G, 0))


def mesh(**sizes):
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape(list(sizes.values()))
    return Mesh(devices, list(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def both(kind, window, sinks):
    """Returns a function of queries, keys and values, with causal attention over a prompt and attention of bins."""

    def run(q, k, v, rows, own_k, own_v, sinks):
        causal = attention(q, part_of(k, v, Causal(None, window)), kind, None, sinks)
        starts = None
        if window is not None:
            starts = jnp.broadcast_to(
                LENGTHS[:, None, None] + jnp.arange(T)[None, None] - window + 1, (P, G, T)
            ).reshape(P, -1)
        parts = part_of(k, v, Lengths(LENGTHS, starts)), part_of(own_k, own_v, Causal(SEGMENTS, window))
        grouped = group_attention(rows, *parts, kind=kind, sinks=sinks)
        real = (SEGMENTS >= 0).reshape(P, G, T, 1, 1)
        results = causal, jnp.where(real, grouped, 0.0)
        return sum(jnp.sin(x).sum() for x in results), results

    rng = np.random.default_rng(0)
    shapes = (P, S, H), (P, S, K), (P, S, K), (P, G, T, H), (P * G, T, K), (P * G, T, K)
    arrays = [jnp.asarray(rng.normal(size=(*shape, WIDTH)), jnp.float32) for shape in shapes]
    given = [*arrays, jnp.asarray(rng.normal(size=H), jnp.float32) if sinks else None]
    return jax.value_and_grad(run, argnums=tuple(range(6 + sinks)), has_aux=True), given


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 8}, {"fsdp": 2, "cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("kind", "window", "sinks"),
    [
        ("plain", None, False),
        ("plain", 7, True),
        ("blocked", None, True),
        ("blocked", 7, False),
        ("splash", None, True),
    ],
)
def test_split_sequences_have_the_outputs_and_gradients_of_whole_ones(monkeypatch, kind, window, sinks, sizes):
    monkeypatch.setattr(attention_kernels, "INTERPRET", True)
    function, given = both(kind, window, sinks)
    expected = jax.jit(lambda *given: function(*given))(*given)
    with jax.set_mesh(mesh(**sizes)):
        program = jax.jit(lambda *given: function(*given)).lower(*given).compile()
        found = program(*given)
    assert "collective-permute" in program.as_text() and "all-gather" in program.as_text()
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_every_device_has_the_same_number_of_visible_keys(parts):
    order = query_order(10, parts)
    assert sorted(order.reshape(-1)) == list(range(10 * parts))
    assert len(set((order + 1).sum(axis=1))) == 1


def test_lengths_that_cannot_be_split_are_refused():
    check_lengths(mesh(cp=4), RolloutConfig(max_prompt_length=24, max_tokens_to_generate=64))
    with pytest.raises(UserError, match=r"rollout\.max_tokens_to_generate: 60 tokens .* 4 devices along cp .* 64\."):
        check_lengths(mesh(cp=4), RolloutConfig(max_prompt_length=24, max_tokens_to_generate=60))
