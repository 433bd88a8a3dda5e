"""Softmax attention over one or several parts of the keys, with grouped heads; scores and softmax in float32.

A part is a set of keys and values with a mask. Completions of one prompt share the prompt's part, which therefore
exists once per group. Here stands the plain way, which makes the scores, and the choice between it and the ways that
do not: blocks, and the kernels of a device. This module knows no weights, no cache and no positions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix_like.config.schema import ATTENTIONS
from tunix_like.errors import UserError, nearest
from tunix_like.models.attention_blocked import capped, joined_attention
from tunix_like.models.attention_kernels import cudnn_attention, splash_attention
from tunix_like.models.attention_parts import Part, dense_mask

MASKED = -1e30
"""Score of a masked key: finite, so that a row whose every key is masked yields finite garbage and no NaN gradient."""

SCORES = 2**24
"""Most scores `B H N U` that `auto` makes at once where the device has no kernel: 64 MB, kept for every layer in
training. Sequences so long that blocks are quicker have more than that in a batch of any use."""

_ROADS = {"blocked": joined_attention, "cudnn": cudnn_attention, "splash": splash_attention}


def resolve_attention(name: str, dtype: Any, head_dim: int) -> str:
    """The way to attend on this machine: `name`, or for "auto" the device's kernel if it has one for this model.

    Returns:
      one of `ATTENTIONS`; "auto" where the size of each call decides between the plain way and blocks.

    Raises:
      UserError: the name is unknown, or this machine or model cannot go that way.
    """
    if name not in ATTENTIONS:
        raise UserError(f"model.attention: unknown value '{name}'. {nearest(name, ATTENTIONS)}")
    missing = {"cudnn": _cudnn_lacks(dtype, head_dim), "splash": _splash_lacks()}
    if name == "auto":
        return next((kernel for kernel, lack in missing.items() if lack is None), "auto")
    if (lack := missing.get(name)) is not None:
        raise UserError(f"model.attention: {name} needs {lack}. Set auto, which takes what this machine can do.")
    return name


def _cudnn_lacks(dtype: Any, head_dim: int) -> str | None:
    device = jax.devices()[0]
    if "NVIDIA" not in device.device_kind or float(device.compute_capability) < 8:
        return f"an NVIDIA GPU of compute capability 8.0 or later, and this is {device.device_kind}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype bfloat16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"heads of at most 128 numbers, a multiple of 8, and this model's have {head_dim}"
    return None


def _splash_lacks() -> str | None:
    if jax.default_backend() != "tpu":
        return f"a TPU, and this is {jax.devices()[0].device_kind}"
    if jax.device_count() > 1:  # the compiler cannot split a kernel over a mesh
        return f"a single device, and there are {jax.device_count()}"
    return None


def _road(kind: str, q: Float[Array, "*B H h"], parts: tuple[Part, ...], cap: float | None) -> Any:
    """How to attend without making the scores, or None: make them. Masks that are arrays (decoding, one query a row)
    always go the plain way. No kernel knows caps, and splash attention no windows: there the size decides, as under
    "auto"."""
    if kind == "plain" or not all(part.described for part in parts):
        return None
    if cap is not None:
        kind = "blocked" if kind == "blocked" else "auto"
    elif kind == "splash" and any(part.windowed for part in parts):
        kind = "auto"
    if kind != "auto":
        return _ROADS[kind]
    scores = sum(q.size // q.shape[-1] * part.k.shape[-1] for part in parts)
    return joined_attention if scores > SCORES else None


def attention(
    q: Float[Array, "B N H h"], part: Part, kind: str = "auto", cap: float | None = None
) -> Float[Array, "B N H h"]:
    """`softmax(q k^T / sqrt(h)) v` over one part; query head `i` uses key head `i // (H // K)`.

    `kind` is what `resolve_attention` returned. With `cap`, scores become `cap tanh(scores / cap)` (Gemma 2,
    arXiv 2408.00118).
    """
    if (road := _road(kind, q, (part,), cap)) is not None:
        return road(q, (part,)) if cap is None else road(q, (part,), cap=cap)
    scores = _scores(q, part, cap)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = _unfold(weights.sum(-1, keepdims=True), q.shape[2])
    return (_unfold(_values(weights, part), q.shape[2]) / total).astype(q.dtype)


def group_attention(
    q: Float[Array, "P G T H h"], prompt: Part, *own: Part, kind: str = "auto", cap: float | None = None
) -> Float[Array, "P G T H h"]:
    """Attention of completions over their prompt's keys (stored once per group) and their own, under ONE softmax.

    Args:
      q: queries of every completion of every prompt.
      prompt: part with `B = P`; its mask is for the `G * T` queries of a prompt, or for all alike.
      own: parts with `B = P * G`: each completion's own keys.
      kind: what `resolve_attention` returned.
      cap: as in `attention`.

    The parts are joined by their common maximum and the sum of their exponentials, so no `[T, S + T]` array is
    assembled, and the gradient flows through all (unlike the residual of `jax.nn.dot_product_attention`).
    """
    if (road := _road(kind, q, (prompt, *own), cap)) is not None:
        return road(q, (prompt, *own)) if cap is None else road(q, (prompt, *own), cap=cap)
    groups, size, steps, heads, width = q.shape
    by_prompt = q.reshape(groups, size * steps, heads, width)
    by_row = q.reshape(groups * size, steps, heads, width)

    def to_rows(x: Array) -> Array:  # [P K R (G T) 1] -> [(P G) K R T 1]
        x = x.reshape(*x.shape[:3], size, steps, 1)
        return jnp.moveaxis(x, 3, 1).reshape(groups * size, *x.shape[1:3], steps, 1)

    def to_prompts(x: Array) -> Array:  # [(P G) K R T 1] -> [P K R (G T) 1]
        x = x.reshape(groups, size, *x.shape[1:])
        return jnp.moveaxis(x, 1, 3).reshape(groups, *x.shape[2:4], size * steps, 1)

    prompt_scores, own_scores = _scores(by_prompt, prompt, cap), [_scores(by_row, part, cap) for part in own]
    tops = [to_rows(prompt_scores.max(-1, keepdims=True)), *(scores.max(-1, keepdims=True) for scores in own_scores)]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    prompt_exp = jnp.exp(prompt_scores - to_prompts(top))
    total = to_rows(prompt_exp.sum(-1, keepdims=True))
    out = _unfold(_values(prompt_exp, prompt), heads).reshape(q.shape)
    for scores, part in zip(own_scores, own, strict=True):
        own_exp = jnp.exp(scores - top)
        total += own_exp.sum(-1, keepdims=True)
        out += _unfold(_values(own_exp, part), heads).reshape(q.shape)
    # Normalised last: dividing `h` numbers a query instead of `S + T` saves a third of the backward pass on the CPU.
    return (out / _unfold(total, heads).reshape(*q.shape[:4], 1)).astype(q.dtype)


def _scores(q: Float[Array, "B N H h"], part: Part, cap: float | None) -> Float[Array, "B K R N U"]:
    """Scaled, capped and masked scores. Heads stand before positions, so that the product is a plain batched one: on
    the CPU its gradient takes half the time of one whose batch axes lie in between."""
    batch, count, heads, width = q.shape
    key_heads = part.k.shape[1]
    split = (q * width**-0.5).reshape(batch, count, key_heads, heads // key_heads, width)
    folded = split.transpose(0, 2, 3, 1, 4).reshape(batch, key_heads, -1, width)
    scores = capped(jnp.matmul(folded, part.k, preferred_element_type=jnp.float32), cap)
    scores = scores.reshape(batch, key_heads, heads // key_heads, count, -1)
    return jnp.where(dense_mask(part, count)[:, None, None], scores, MASKED)


def _values(weights: Float[Array, "B K R N U"], part: Part) -> Float[Array, "B K R N h"]:
    folded = weights.astype(part.v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.matmul(folded, part.v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:4], -1)


def _unfold(x: Float[Array, "B K R N h"], heads: int) -> Float[Array, "B N H h"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], heads, -1)
