"""Tests attention over two parts of the keys against one softmax over the concatenated keys, in values and
gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.models import attention_blocked
from tunix_like.models.attention import attention, group_attention
from tunix_like.models.attention_parts import Causal, Lengths, part_of

P, G, T, S, H, K, WIDTH = 2, 3, 4, 5, 4, 2, 6
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def naive(q, k, v, mask):
    """Computes `softmax(q k^T / sqrt(h)) v`, one query head at a time. A query sees key u where `mask[..., u]`."""
    heads = []
    for head in range(q.shape[-2]):
        of = head // (q.shape[-2] // k.shape[-2])
        scores = q[..., head, :] @ k[..., of, :].swapaxes(-1, -2) / WIDTH**0.5
        heads.append(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1) @ v[..., of, :])
    return jnp.stack(heads, axis=-2)


def by_group(q, prompt_k, prompt_v, own_k, own_v, prompt_mask, own_mask):
    """The oracle: every completion has its own copy of the keys of the prompt, followed by its own keys."""
    repeat = lambda x: jnp.broadcast_to(x[:, None], (P, G, *x.shape[1:]))  # noqa: E731
    k = jnp.concatenate([repeat(prompt_k), own_k], axis=2)
    v = jnp.concatenate([repeat(prompt_v), own_v], axis=2)
    prompt_mask = jnp.broadcast_to(prompt_mask[:, None, None], (P, G, T, S))
    mask = jnp.concatenate([prompt_mask, jnp.broadcast_to(own_mask, (P, G, T, own_k.shape[2]))], axis=-1)
    return naive(q, k, v, mask)


def rows(x):
    return x.reshape(P * G, *x.shape[2:])


def ours(q, prompt_k, prompt_v, own_k, own_v, prompt_mask, own_mask):
    own = part_of(rows(own_k), rows(own_v), own_mask[None])
    return group_attention(q, part_of(prompt_k, prompt_v, prompt_mask[:, None]), own)


def in_blocks(q, prompt_k, prompt_v, own_k, own_v, prompt_mask, own_mask):
    """Returns descriptions of the same masks. It is called only with `RAGGED` and `CAUSAL`."""
    prompt = part_of(prompt_k, prompt_v, Lengths(jnp.asarray([S, 2])))
    return group_attention(q, prompt, part_of(rows(own_k), rows(own_v), Causal()), kind="blocked")


CAUSAL = jnp.tril(jnp.ones((T, T), bool))
RAGGED = jnp.arange(S)[None] < jnp.asarray([[S], [2]])
COTANGENT = normal(P, G, T, H, WIDTH)


@pytest.mark.parametrize(("scale", "far"), [(1.0, 0.0), (30.0, 0.0), (1.0, 50.0)], ids=["mild", "peaked", "far apart"])
@pytest.mark.parametrize("way", [ours, in_blocks])
def test_two_parts_equal_one_softmax(way, scale, far, monkeypatch):
    """Covers ragged prompts and causal completions, scores so large that one key gets all weight, and two parts so
    different that the exponentials of one of them underflow."""
    monkeypatch.setattr(attention_blocked, "BLOCK", 3)
    q = scale * normal(P, G, T, H, WIDTH)
    prompt_k, prompt_v = normal(P, S, K, WIDTH) - far, normal(P, S, K, WIDTH)
    own_k, own_v = normal(P, G, T, K, WIDTH) + far, normal(P, G, T, K, WIDTH)

    def loss(function, *arrays):
        out = function(*arrays, RAGGED, CAUSAL)
        return (out * COTANGENT).sum(), out

    both = [
        jax.jit(jax.value_and_grad(lambda *arrays, f=f: loss(f, *arrays), argnums=range(5), has_aux=True))(
            q, prompt_k, prompt_v, own_k, own_v
        )
        for f in (way, by_group)
    ]
    ((_, out), gradients), ((_, expected), expected_gradients) = both
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * max(1.0, np.abs(wanted).max()))


def test_one_part_equals_the_oracle():
    """Covers `attention` with a mask per batch entry, and four query heads on two key heads."""
    q, k, v = normal(3, T, H, WIDTH), normal(3, S, K, WIDTH), normal(3, S, K, WIDTH)
    mask = jnp.asarray(RNG.uniform(size=(3, T, S)) < 0.6).at[:, :, 0].set(True)
    np.testing.assert_allclose(attention(q, part_of(k, v, mask)), naive(q, k, v, mask), rtol=0, atol=1e-5)


def test_masked_keys_have_no_gradient_and_rows_without_a_key_are_finite():
    """Covers a padded prompt, a completion whose own keys are all masked, and a row without any key."""
    nobody, own_mask = jnp.zeros((P, S), bool), CAUSAL.at[1].set(False)
    q, cotangent = normal(P, G, T, H, WIDTH), COTANGENT
    keys = [normal(P, S, K, WIDTH), normal(P, S, K, WIDTH), normal(P, G, T, K, WIDTH), normal(P, G, T, K, WIDTH)]

    def loss(q, keys, prompt_mask):
        return (ours(q, *keys, prompt_mask, own_mask) * cotangent).sum()

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for prompt_mask in (RAGGED, nobody):
        value, leaves = gradient(q, keys, prompt_mask)
        assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(leaves))
    _, (_, (prompt_k, prompt_v, *_)) = gradient(q, keys, RAGGED)
    for leaf in (prompt_k, prompt_v):
        assert (np.asarray(leaf)[~np.asarray(RAGGED)] == 0).all() and np.abs(leaf).max() > 0.01


def test_scores_and_softmax_are_float32():
    """bfloat16 inputs add only the rounding of weights and output. In bfloat16, scores near 50 would have an error of a
    tenth."""
    arrays = [10 * normal(P, G, T, H, WIDTH), normal(P, S, K, WIDTH), normal(P, S, K, WIDTH)]
    arrays += [normal(P, G, T, K, WIDTH), normal(P, G, T, K, WIDTH)]
    short = [x.astype(jnp.bfloat16) for x in arrays]
    out = ours(*short, RAGGED, CAUSAL)
    assert out.dtype == jnp.bfloat16
    expected = by_group(*(x.astype(jnp.float32) for x in short), RAGGED, CAUSAL)
    assert np.abs(out.astype(jnp.float32) - expected).max() < 0.03
