"""Arithmetic that a forward pass cannot do without. It knows numbers and lengths, no device."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from tunix_like.models.config import DecoderConfig


def forward_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> float:
    """Multiplications and additions of one forward pass over groups, each prompt once: matrix products and attention
    over the tokens that are seen, logits where a completion token is predicted. Of experts, those that a token goes
    through, and the router. Adapters, about a percent of it, are not counted.

    A completion of length 0 is not there, nor is a prompt without completions.
    """
    return sum(_operations(config, prompt_lengths, lengths))


def update_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"], frozen: bool
) -> float:
    """Of a forward and a backward pass, which takes twice as many; of `frozen` matrices as many, since they have no
    gradient of their own."""
    matrices, scores = _operations(config, prompt_lengths, lengths)
    return (2 if frozen else 3) * matrices + 3 * scores


def _operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> tuple[float, float]:
    """Of products with weights, and of attention."""
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
    """Scores of the first `count` positions: of each with itself and those before it, as far as the window reaches."""
    full = count if window is None else np.minimum(count, window)
    return full * (full + 1) / 2 + (count - full) * full
