"""Counts the arithmetic operations (FLOPs) of forward and backward passes from the model configuration and the sequence
lengths."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from tunix_like.models.config import DecoderConfig


def forward_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> float:
    """Returns the number of multiplications and additions of one forward pass over `P` prompts with `G` completions
    each. Each prompt is computed once.

    The number includes matrix products, attention over the visible tokens, and logits at completion tokens. For a
    mixture of experts, the number includes the router, and for each token the experts that process this token. Adapters
    are not counted; adapters take about one percent of the operations. Completions of length 0 and prompts without
    completions are ignored.
    """
    return sum(_operations(config, prompt_lengths, lengths))


def update_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"], frozen: bool
) -> float:
    """Returns the number of operations of a forward and a backward pass together. The backward pass takes twice the
    operations of the forward pass. If the weight matrices are `frozen`, products with them take as many operations in
    the backward pass as in the forward pass, because no weight gradient is computed."""
    matrices, scores = _operations(config, prompt_lengths, lengths)
    return (2 if frozen else 3) * matrices + 3 * scores


def _operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> tuple[float, float]:
    """Returns the number of operations of a forward pass for products with weights, and the number for attention."""
    n = lengths.astype(np.float64)
    s = np.where(n.any(axis=1), prompt_lengths, 0).astype(np.float64)
    inputs = np.maximum(n - 1, 0)  # the last token is never an input
    width, head = config.hidden_size, config.head_dim
    attention = width * head * (2 * config.num_heads + 2 * config.num_kv_heads)
    layers = range(config.num_layers)
    matrices = sum(attention + 3 * width * config.active_width(layer) for layer in layers)
    if config.experts is not None:
        matrices += width * config.experts.number * sum(config.has_experts(layer) for layer in layers)
    scores = 0.0
    for layer in layers:
        window = config.window(layer)
        whole = _pairs(s[:, None] + inputs, window) - _pairs(s, window)[:, None]
        scores += 4 * config.num_heads * head * (_pairs(s, window).sum() + whole.sum())
    return float(2 * matrices * (s.sum() + inputs.sum()) + 2 * width * config.vocab_size * n.sum()), float(scores)


def _pairs(count: Float[np.ndarray, "..."], window: int | None) -> Float[np.ndarray, "..."]:
    """Returns the number of attention scores of the first `count` positions. A position has one score with itself and
    one with each earlier position in its window."""
    full = count if window is None else np.minimum(count, window)
    return full * (full + 1) / 2 + (count - full) * full
