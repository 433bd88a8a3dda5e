"""Tests the gated delta rule in chunks against one token at a time and against transformers: values, gradients,
sequences that share a block, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.models.delta_rule import chunked_delta_rule, convolve, delta_rule_step, tail_after

BATCH, KEY_HEADS, HEADS, WIDTH, VALUE = 3, 2, 4, 8, 6
OFFSETS = {  # per row: lengths of the sequences that share a block of 40; a negative number is padding
    "packed": ((11, 3, 1, 20, -5), (40,), (-9, 16, 15)),
    "right": ((40,), (17, -23), (1, -39)),
    "left": ((-40,), (-33, 7), (-1, 39)),
}


def offsets_of(name):
    return np.array([[i for n in row for i in (range(n) if n > 0 else [-1] * -n)] for row in OFFSETS[name]])


def inputs(count, seed=0, alike=0.0):
    """Returns q, k, v, decay, beta and state. With `alike` near 1, all keys are nearly equal."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    k = (1 - alike) * draw(BATCH, count, KEY_HEADS, WIDTH) + alike * draw(BATCH, 1, KEY_HEADS, WIDTH)
    q, v, state = (
        draw(BATCH, count, KEY_HEADS, WIDTH),
        draw(BATCH, count, HEADS, VALUE),
        draw(BATCH, HEADS, WIDTH, VALUE),
    )
    decay = -np.exp(draw(BATCH, count, HEADS) - 2)
    return tuple(map(jnp.asarray, (q, k, v, decay, 1 / (1 + np.exp(-draw(BATCH, count, HEADS))), state)))


def one_at_a_time(*given):
    *by_token, state, offsets = given

    def step(carry, token):
        *token, here = token
        here = here[:, None, None, None]
        out, after = delta_rule_step(*token, jnp.where(here == 0, state, carry))
        return jnp.where(here < 0, carry, after), out

    final, out = jax.lax.scan(step, state, tuple(x.swapaxes(0, 1) for x in (*by_token, offsets)))
    return out.swapaxes(0, 1), final


@pytest.mark.parametrize("name", OFFSETS)
def test_chunks_equal_single_tokens(name):
    offsets, given = jnp.asarray(offsets_of(name)), inputs(40)
    rng = np.random.default_rng(1)
    of_out = jnp.where(offsets[..., None, None] >= 0, rng.normal(size=given[2].shape), 0).astype(jnp.float32)
    of_state = jnp.asarray(rng.normal(size=given[-1].shape), jnp.float32)

    def loss(rule, *given):
        out, state = rule(*given, offsets)
        return (out * of_out).sum() + (state * of_state).sum(), (jnp.where(of_out != 0, out, 0), state)

    rules = (lambda *given: chunked_delta_rule(*given, chunk=16)), one_at_a_time
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *given, rule=rule: loss(rule, *given), tuple(range(6)), has_aux=True))(*given)
        for rule in rules
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), found[0][1], expected[0][1])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert np.abs(theirs).max() > 1e-2
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_agrees_with_transformers(alike):
    """Also with equal keys, whose triangular matrix has inverses that a series of powers cannot compute in float32."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    given = inputs(130, alike=alike)
    q, k, v, decay, beta, state = (torch.tensor(np.asarray(x)) for x in given)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    offsets = jnp.broadcast_to(jnp.arange(130)[None], (BATCH, 130))
    mine = jax.jit(chunked_delta_rule)(*given, offsets)
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        theirs = rule(q, k, v, g=decay, beta=beta, **options)
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", OFFSETS)
def test_convolution(name):
    """Each sequence alone, after its tail, as `np.convolve` computes it; the tail after a block ends its last one."""
    rng, offsets, channels = np.random.default_rng(2), offsets_of(name), 3
    x, tail = rng.normal(size=(BATCH, 40, channels)), rng.normal(size=(BATCH, 3, channels))
    weight = rng.normal(size=(channels, 1, 4))
    given = (jnp.asarray(a, jnp.float32) for a in (x, weight, tail))
    x_, weight_, tail_ = given
    out = np.asarray(convolve(x_, weight_, tail_, jnp.asarray(offsets)))
    after = np.asarray(tail_after(x_, tail_, jnp.asarray(offsets)))
    for row in range(BATCH):
        inputs, start = tail[row], 0
        for length in OFFSETS[name][row]:
            if length > 0:
                inputs = np.concatenate([tail[row], x[row, start : start + length]])
                expected = [np.convolve(inputs[:, c], weight[c, 0, ::-1], "valid") for c in range(channels)]
                np.testing.assert_allclose(out[row, start : start + length], np.transpose(expected), atol=1e-5)
            start += abs(length)
        np.testing.assert_allclose(after[row], inputs[-3:], atol=1e-6)
