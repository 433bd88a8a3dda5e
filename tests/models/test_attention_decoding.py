"""Tests the attention kernel of decoding, in Pallas' interpret mode, against a softmax in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.attention_oracle import oracle, seen_of
from tunix_like.config.schema import MeshConfig
from tunix_like.models import attention_decoding, attention_kernels
from tunix_like.models.attention_decoding import decoding_attention, decoding_kernel
from tunix_like.models.attention_parts import Lengths, Positions, part_of
from tunix_like.models.sharding import build_mesh, place_slots, scope

P, G, H, K, WIDTH = 2, 3, 4, 2, 16
LENGTHS = np.array([70, 3], np.int32)
SINKS = jnp.asarray([-0.5, 1.5, 0.3, 30.0], jnp.float32)


@pytest.fixture(params=["tpu", "gpu"])
def device(request, monkeypatch):
    """The device of the kernel, with several blocks of queries and of keys, and partial last ones. On a GPU, two
    programs share the keys of an entry."""
    monkeypatch.setattr(attention_kernels, "INTERPRET", True)
    monkeypatch.setattr(attention_decoding, "_LANES", 32)
    monkeypatch.setattr(attention_decoding, "BLOCK_BYTES", 32 * WIDTH * 4 * 5)
    monkeypatch.setattr(attention_decoding, "GPU_PROGRAMS", 16)
    monkeypatch.setattr(attention_decoding, "_GPU_QUERIES", 4)
    monkeypatch.setattr(attention_decoding, "_GPU_COLUMNS", 16)
    return request.param


def columns_of(room: int) -> np.ndarray:
    """Positions of the keys: a whole ring that has wrapped, its end and beginning alone, a few columns with gaps, one
    column, none, and a middle."""
    out = np.full((P * G, room), -1, np.int32)
    out[0] = np.roll(np.arange(room), 5)
    out[1, -3:], out[1, :4] = [70, 71, 72], [73, 74, 75, 76]
    out[2, 1::7] = np.arange(len(out[2, 1::7]))
    out[3, room // 2] = 3
    out[5, room // 3 : 2 * room // 3] = 3 + np.arange(2 * room // 3 - room // 3)
    return out


def made(room: int, prompt: int, dtype=np.float32):
    random = np.random.default_rng(room)
    shapes = (P, G, 1, H, WIDTH), *[(P, prompt, K, WIDTH)] * 2, *[(P * G, room, K, WIDTH)] * 2
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def run(device, q, prompt_k, prompt_v, k, v, lengths, columns, starts=None, cap=None, sinks=None):
    lengths, columns = jnp.asarray(lengths), jnp.asarray(columns)
    of_prompt, of_own = Lengths(lengths), Positions(columns)
    if starts is not None:
        starts = jnp.asarray(starts)
        of_prompt, of_own = Lengths(lengths, starts), Positions(columns, starts.reshape(-1, 1))
    return decoding_attention(q, part_of(prompt_k, prompt_v, of_prompt), part_of(k, v, of_own), device, cap, sinks)


def expected(arrays, prompt_mask, own_mask, cap, sinks=None):
    q, *keys = (np.asarray(x, np.float32) for x in arrays)
    prompt_k, prompt_v, own_k, own_v = keys
    wide = [np.repeat(x, G, axis=0) for x in (prompt_k, prompt_v)]
    of_prompt = seen_of(prompt_mask, P, G, prompt_k.shape[1]).reshape(P * G, 1, -1)
    seen = np.concatenate([of_prompt, seen_of(own_mask, P * G, 1, own_k.shape[1])], axis=-1)
    k, v = (np.concatenate(pair, axis=1) for pair in zip(wide, (own_k, own_v), strict=True))
    rows = q.reshape(P * G, 1, H, WIDTH)
    return oracle(rows, k, v, seen, np.zeros_like(rows), cap, sinks)[0].reshape(q.shape)


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "sinks"), [(None, None), (2.0, None), (None, SINKS)], ids=["", "cap", "sinks"])
@pytest.mark.parametrize("windows", [False, True], ids=["", "windows"])
@pytest.mark.parametrize(("room", "prompt"), [(96, 75), (70, 96), (20, 20), (40, 33)])
def test_kernel_equals_a_softmax_in_float64(device, room, prompt, windows, cap, sinks):
    columns, lengths = columns_of(room), np.minimum(LENGTHS, prompt)
    starts = np.maximum(columns.max(1).reshape(P, G) - 9, 0) if windows else None
    prompt_mask = Lengths(lengths, starts)
    own_mask = Positions(columns, None if starts is None else starts.reshape(-1, 1))
    arrays = made(room, prompt)
    found = run(device, *arrays, lengths, columns, starts, cap, sinks)
    np.testing.assert_allclose(found, expected(arrays, prompt_mask, own_mask, cap, sinks), rtol=0, atol=2e-6)


def test_query_that_sees_nothing_gives_zeros(device):
    columns, lengths = columns_of(40), np.array([20, 0], np.int32)
    arrays = made(40, 20)
    found = run(device, *arrays, lengths, columns)
    assert (np.asarray(found[1, 1]) == 0).all()
    np.testing.assert_allclose(found, expected(arrays, Lengths(lengths), Positions(columns), None), rtol=0, atol=2e-6)


def test_columns_that_no_query_sees_may_hold_any_values(device):
    columns, lengths = columns_of(40), np.minimum(LENGTHS, 33)
    q, *arrays = made(40, 33)
    found = run(device, q, *arrays, lengths, columns)
    prompt_k, prompt_v, k, v = (np.array(x) for x in arrays)
    for row, positions in enumerate(columns.reshape(-1, 40)):
        empty = positions < 0
        k[row, empty] = 1e30
        v[row, empty] = -1e30
    for row, length in enumerate(lengths):
        prompt_k[row, length:], prompt_v[row, length:] = -1e30, 1e30
    other = run(device, q, *map(jnp.asarray, (prompt_k, prompt_v, k, v)), lengths, columns)
    np.testing.assert_array_equal(other, found)


def test_blocks_without_visible_keys_are_not_read():
    """Blocks of 2 rows and 4 columns. After the last block with a visible key, this block is repeated."""
    seen = np.zeros((3, 10), bool)
    seen[0, 5], seen[1, 9], seen[2, 0] = True, True, True
    order, number = attention_decoding._blocks_seen(jnp.asarray(seen), 2, 4)
    assert order.tolist() == [1, 2, 2, 0, 0, 0] and number.tolist() == [2, 1]
    assert attention_decoding._blocks_seen(jnp.zeros((2, 4), bool), 2, 4)[1].tolist() == [0]


@pytest.mark.slow
def test_bfloat16_and_a_mesh(device):
    arrays, columns, lengths = made(40, 33, jnp.bfloat16), columns_of(40), np.minimum(LENGTHS, 33)
    alone = run(device, *arrays, lengths, columns)
    assert alone.dtype == jnp.bfloat16
    wanted = expected(arrays, Lengths(lengths), Positions(columns), None)
    np.testing.assert_allclose(np.asarray(alone, np.float32), wanted, rtol=0, atol=0.02)
    mesh = build_mesh(MeshConfig(shape=[2, 1, 2], axis_names=["data", "fsdp", "tp"]), jax.devices()[:4])
    for sinks in (None, SINKS):
        alone = run(device, *arrays, lengths, columns, sinks=sinks)
        with scope(mesh):
            placed = place_slots((*arrays, lengths, columns), mesh)
            split = jax.jit(run, static_argnums=0)(device, *placed, sinks=sinks)
        np.testing.assert_allclose(np.asarray(split, np.float32), np.asarray(alone, np.float32), rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("kind", "width", "device"),
    [("splash", 128, "tpu"), ("splash", 256, "tpu"), ("splash", 64, None), ("cudnn", 128, "gpu"), ("cudnn", 64, "gpu"),
     ("cudnn", 96, None), ("plain", 128, None)],
)  # fmt: skip
def test_the_kernel_is_used_where_it_supports_the_heads(kind, width, device):
    assert decoding_kernel(kind, width) == device
