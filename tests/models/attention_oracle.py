"""An oracle of attention: float64, with explicit gradient formulas, and masks built position by position."""

from __future__ import annotations

import numpy as np

from tunix_like.models.attention_parts import Lengths, Positions


def oracle(q, k, v, mask, cotangent, cap=None, sinks=None):
    """Returns output and gradients for q, k, v `[B N H h]`, `[B U K h]` in float64, by the derivative of the softmax;
    with sinks `[H]`, keys that are 0 except for their score, also their gradient.

    A query without a key gives zeros. With a cap, `d (cap tanh(s / cap)) / d s = 1 - tanh(s / cap)^2`.
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    width, repeats = q.shape[-1], q.shape[2] // k.shape[2]
    wide = [np.repeat(x, repeats, axis=2) for x in (k, v)]
    scores = np.einsum("bnxh,buxh->bxnu", q, wide[0]) / width**0.5
    bent = 1.0
    if cap is not None:
        bent = 1 - np.tanh(scores / cap) ** 2
        scores = cap * np.tanh(scores / cap)
    seen = np.broadcast_to(mask[:, None], scores.shape)
    top = max(scores.max(), -np.inf if sinks is None else np.max(sinks))
    weights = np.where(seen, np.exp(scores - top), 0)
    of_sink = 0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64) - top)[:, None, None]
    total = np.maximum(weights.sum(-1, keepdims=True) + of_sink, 1e-300)
    weights = weights / total
    out = np.einsum("bxnu,buxh->bnxh", weights, wide[1])
    of_weights = np.einsum("bnxh,buxh->bxnu", cotangent, wide[1])
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - mean) * bent / width**0.5
    of_k = np.einsum("bxnu,bnxh->buxh", of_scores, q)
    of_v = np.einsum("bxnu,bnxh->buxh", weights, cotangent)
    shared = [x.reshape(*k.shape[:3], repeats, -1).sum(3) for x in (of_k, of_v)]
    of_sinks = () if sinks is None else (-(of_sink / total * mean).sum((0, 2, 3)),)
    return out, np.einsum("bxnu,buxh->bnxh", of_scores, wide[0]), *shared, *of_sinks


def seen_of(mask, batch: int, count: int, width: int) -> np.ndarray:
    """Returns which query sees which key, position by position."""
    out = np.zeros((batch, count, width), bool)
    starts = np.asarray(mask.starts) if getattr(mask, "starts", None) is not None else None
    for b, n, u in np.ndindex(*out.shape):
        if isinstance(mask, Lengths):
            out[b, n, u] = u < mask.lengths[b] and (starts is None or starts[b, n] <= u)
            continue
        if isinstance(mask, Positions):
            out[b, n, u] = mask.positions[b, u] >= max(0, 0 if starts is None else starts[b, n])
            continue
        out[b, n, u] = u <= n and (mask.window is None or n - u < mask.window)
        if mask.segments is not None:
            out[b, n, u] &= mask.segments[b, u] == mask.segments[b, n] >= 0
    return out
