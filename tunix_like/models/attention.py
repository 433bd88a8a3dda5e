"""Computes softmax attention over one or several parts of the keys, with grouped query heads. Scores and softmax are
float32.

A part (`attention_parts.Part`) is a set of keys and values with a mask. All completions of a prompt share the part of
the prompt. A sink is a learned logit per query head that takes part in every softmax without a key (GPT-OSS); it is
counted once, whatever the number of parts. This module contains the plain implementation, which materialises the
scores, and selects between it, the blocked implementation and the library kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix_like.config.schema import ATTENTIONS
from tunix_like.errors import UserError, nearest
from tunix_like.models.attention_blocked import capped, joined_attention
from tunix_like.models.attention_kernels import cudnn_attention, splash_attention
from tunix_like.models.attention_parts import Part, dense_mask
from tunix_like.models.attention_sequence import over_sequence

MASKED = -1e30
"""Score of a masked key. The score is finite, so a query whose keys are all masked has a finite (unused) output and a
gradient without NaN."""

SCORES = 2**24
"""Maximum number of scores (batch x heads x queries x keys) up to which the attention "auto" uses the plain
implementation if no library kernel is used. With more scores, it uses the blocked implementation. In training, `SCORES`
scores take 64 MB per layer. Batches for which the blocked implementation is faster usually have more scores."""


def resolve_attention(
    name: str, dtype: Any, head_dim: int | None, devices: Sequence[Any] | None = None, sinks: bool = False
) -> str:
    """Returns the attention implementation for `name`. "auto" becomes the attention kernel of the device (cuDNN or
    splash attention), if there is one that supports `dtype` and `head_dim` (None: layers have different ones).

    If the result is "auto", each call of `attention` or `group_attention` selects the plain or the blocked
    implementation by the number of scores. So does a call with sinks on cuDNN, which only the kernel of decoding then
    replaces.
    """
    if name not in ATTENTIONS:
        raise UserError(f"model.attention: unknown value '{name}'. {nearest(name, ATTENTIONS)}")
    devices = jax.devices() if devices is None else devices
    splash = None if devices[0].platform == "tpu" else f"a TPU, but this is {devices[0].device_kind}"
    if head_dim is None:  # not tried with a kernel
        splash = "heads of one width in all layers"
    missing = {"cudnn": _cudnn_lacks(devices[0], dtype, head_dim), "splash": splash}
    if sinks and name == "cudnn":
        raise UserError(
            "model.attention: cudnn does not support the attention sinks of this model. They are applied by the"
            " log-sum-exp, which jax returns rounded to bfloat16 and without a gradient. Set auto or blocked."
        )
    if name == "auto":
        return next((kernel for kernel, lack in missing.items() if lack is None), "auto")
    if (lack := missing.get(name)) is not None:
        raise UserError(f"model.attention: {name} needs {lack}. Set auto, which selects a supported implementation.")
    return name


def _cudnn_lacks(device: Any, dtype: Any, head_dim: int | None) -> str | None:
    if head_dim is None:
        return "heads of one width in all layers"
    if "NVIDIA" not in device.device_kind or float(device.compute_capability) < 8:
        return f"an NVIDIA GPU of compute capability 8.0 or later, but this is {device.device_kind}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"model.dtype bfloat16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"head_dim to be at most 128 and a multiple of 8, but it is {head_dim}"
    return None


def _implementation(
    kind: str, q: Float[Array, "*B H h"], parts: tuple[Part, ...], cap: float | None, sinks: Float[Array, "H"] | None
) -> Any:
    """Selects the attention implementation of one call. Returns None for the plain implementation.

    If the mask of one of `parts` is an array, the result is None. (Decoding uses such masks, with one query per
    completion.) Kernels do not support a cap of the scores, splash attention does not support windows, and cuDNN does
    not support sinks. If `kind` is a kernel that does not support the call, the number of scores selects the
    implementation, as for "auto".
    """
    if kind == "plain" or not all(part.described for part in parts):
        return None
    if cap is not None:
        kind = "blocked" if kind == "blocked" else "auto"
    elif (kind == "splash" and any(part.windowed for part in parts)) or (kind == "cudnn" and sinks is not None):
        kind = "auto"
    if kind == "splash":
        return functools.partial(splash_attention, sinks=sinks)
    if kind == "cudnn":
        return cudnn_attention
    scores = sum(q.size // q.shape[-1] * part.k.shape[-1] for part in parts)
    return functools.partial(joined_attention, cap=cap, sinks=sinks) if kind == "blocked" or scores > SCORES else None


def attention(
    q: Float[Array, "B N H h"],
    part: Part,
    kind: str = "auto",
    cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B N H h"]:
    """Computes `softmax(q k^T / sqrt(h)) v` with the keys, values and mask of `part`, and head width `h`. Of H query
    heads, head `i` uses key head `i // (H // K)` of K key heads.

    `kind` names the implementation, as `resolve_attention` returns it. With `cap`, scores become
    `cap tanh(scores / cap)` (Gemma 2, arXiv 2408.00118). With `sinks`, `exp(sink)` of the head is added to the sum of
    the exponentials.
    """

    def on_device(q: Array, parts: tuple[Part, ...], sinks: Array | None) -> Array:
        return _attention(q, parts[0], kind, cap, sinks)

    return over_sequence(on_device, q, (part,), sinks)


def _attention(
    q: Float[Array, "B N H h"], part: Part, kind: str, cap: float | None, sinks: Float[Array, "H"] | None
) -> Float[Array, "B N H h"]:
    if (implementation := _implementation(kind, q, (part,), cap, sinks)) is not None:
        return implementation(q, (part,))
    scores = _scores(q, part, cap)
    top = _top([scores.max(-1, keepdims=True)], sinks)
    weights = jnp.exp(scores - top)
    total = _unfold(_with_sinks(weights.sum(-1, keepdims=True), top, sinks), q.shape[2])
    return (_unfold(_values(weights, part), q.shape[2]) / total).astype(q.dtype)


def group_attention(
    q: Float[Array, "P G T H h"],
    prompt: Part,
    *own: Part,
    kind: str = "auto",
    cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "P G T H h"]:
    """Computes attention of completions over the keys of their prompt and over their own keys, in one softmax.

    Args:
      q: T queries for each of G completions of each of P prompts.
      prompt: keys and values of the P prompts. The mask has `G * T` queries per prompt, or is broadcast over the
        queries.
      own: keys and values of the `P * G` completions.

    The plain implementation combines the keys of the prompt and the own keys through the common maximum of their scores
    and the common sum of exponentials, so their scores are not concatenated. The log-sum-exp that
    `jax.nn.dot_product_attention` returns is not used for this, because it has no gradient. Gradients flow through all
    keys and values.
    """

    def on_device(q: Array, parts: tuple[Part, ...], sinks: Array | None) -> Array:
        return _group_attention(q, *parts, kind=kind, cap=cap, sinks=sinks)

    return over_sequence(on_device, q, (prompt, *own), sinks)


def _group_attention(
    q: Float[Array, "P G T H h"],
    prompt: Part,
    *own: Part,
    kind: str,
    cap: float | None,
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "P G T H h"]:
    if (implementation := _implementation(kind, q, (prompt, *own), cap, sinks)) is not None:
        return implementation(q, (prompt, *own))
    groups, size, steps, heads, width = q.shape
    by_prompt = q.reshape(groups, size * steps, heads, width)
    by_row = q.reshape(groups * size, steps, heads, width)

    def to_rows(x: Array) -> Array:  # [P K R (G T) 1] -> [(P G) K R T 1]
        x = x.reshape(*x.shape[:3], size, steps, 1)
        return jnp.moveaxis(x, 3, 1).reshape(groups * size, *x.shape[1:3], steps, 1)

    def to_prompts(x: Array) -> Array:  # [(P G) K R T 1] -> [P K R (G T) 1]
        x = x.reshape(groups, size, *x.shape[1:])
        return jnp.moveaxis(x, 1, 3).reshape(groups, *x.shape[2:4], size * steps, 1)

    prompt_scores = _scores(by_prompt, prompt, cap)
    own_scores = [_scores(by_row, part, cap) for part in own]
    tops = [to_rows(prompt_scores.max(-1, keepdims=True)), *(scores.max(-1, keepdims=True) for scores in own_scores)]
    top = _top(tops, sinks)
    prompt_exp = jnp.exp(prompt_scores - to_prompts(top))
    total = _with_sinks(to_rows(prompt_exp.sum(-1, keepdims=True)), top, sinks)
    out = _unfold(_values(prompt_exp, prompt), heads).reshape(q.shape)
    for scores, part in zip(own_scores, own, strict=True):
        own_exp = jnp.exp(scores - top)
        total += own_exp.sum(-1, keepdims=True)
        out += _unfold(_values(own_exp, part), heads).reshape(q.shape)
    # The division comes last. It then divides `h` instead of `S + T` values per query, which saves a third of the
    # backward pass on the CPU.
    return (out / _unfold(total, heads).reshape(*q.shape[:4], 1)).astype(q.dtype)


def _top(tops: Sequence[Float[Array, "B K R N 1"]], sinks: Float[Array, "H"] | None) -> Float[Array, "B K R N 1"]:
    """Returns the maximum of scores and sinks, without a gradient. Without the sink in it, `exp(sink - top)` could
    overflow."""
    top = functools.reduce(jnp.maximum, tops)
    if sinks is not None:
        top = jnp.maximum(top, sinks.reshape(1, *top.shape[1:3], 1, 1))
    return jax.lax.stop_gradient(top)


def _with_sinks(
    total: Float[Array, "B K R N 1"], top: Float[Array, "B K R N 1"], sinks: Float[Array, "H"] | None
) -> Float[Array, "B K R N 1"]:
    return total if sinks is None else total + jnp.exp(sinks.reshape(1, *top.shape[1:3], 1, 1) - top)


def _scores(q: Float[Array, "B N H h"], part: Part, cap: float | None) -> Float[Array, "B K R N U"]:
    """Computes scaled, capped and masked attention scores. In the result, each of K key heads has R query heads.

    Heads precede positions, so one plain batched matrix product computes the scores. If batch axes were between other
    axes, the gradient of the product would take twice as long on the CPU.
    """
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
