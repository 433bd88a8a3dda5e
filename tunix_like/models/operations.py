"""Arithmetic that a forward pass cannot do without. It knows numbers and lengths, no device."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from tunix_like.models.config import DecoderConfig


def forward_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> float:
    """Multiplications and additions of one forward pass over groups, each prompt once: matrix products and attention
    over the tokens that are seen, logits where a completion token is predicted. A backward pass takes twice as many.

    A completion of length 0 is not there, nor is a prompt without completions.
    """
    n = lengths.astype(np.float64)
    s = np.where(n.any(axis=1), prompt_lengths, 0).astype(np.float64)
    inputs = np.maximum(n - 1, 0)  # the last token is never an input
    width, head = config.hidden_size, config.head_dim
    attention = width * head * (2 * config.num_heads + 2 * config.num_kv_heads)
    matrices = config.num_layers * (attention + 3 * width * config.intermediate_size)
    pairs = (s * (s + 1) / 2).sum() + (inputs * s[:, None] + inputs * (inputs + 1) / 2).sum()
    scores = 4 * config.num_layers * config.num_heads * head * pairs
    return float(2 * matrices * (s.sum() + inputs.sum()) + scores + 2 * width * config.vocab_size * n.sum())
