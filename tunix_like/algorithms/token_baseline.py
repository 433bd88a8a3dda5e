"""Defines the estimator whose baseline differs between the tokens of a completion."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.registry import register_advantage_estimator

TOKEN_BASELINE = "otb"
"""Name of the estimator whose advantages are per token and come from the group's rewards and score norms."""


@register_advantage_estimator(TOKEN_BASELINE, zero_when_constant=True, offset_free=True)
def otb(rewards: Float[Array, "P G"], *, scored: Bool[Array, "P G"], lengths: Int[Array, "P G"]) -> Float[Array, "P G"]:
    """Returns zeros: the advantages of tokens come from `token_baseline_advantages`."""
    return jnp.zeros_like(rewards)


def token_baseline_advantages(
    rewards: Float[np.ndarray, "P G"],
    counted: Bool[np.ndarray, "P G"],
    norms: Float[np.ndarray, "P G T"],
    sampled: Bool[np.ndarray, "P G T"],
) -> Float[np.ndarray, "P G T"]:
    """Returns `A_i,n = r_i - sum_j W_j,n r_j / sum_j W_j,n`, the sums over the other completions `j` of the group that
    have an n-th sampled token, in float64; 0 for tokens that were not sampled.

    `W_j,n` is the sum of the score norms of the first n sampled tokens of j: the optimal baseline of arXiv 2602.07078,
    without the completion itself, so the gradient estimate is unbiased. Where no other completion has an n-th token (or
    all `W_j,n` are 0), the baseline is the mean of the others.

    Args:
      counted: completions that take part; those of other groups have no advantages.
      norms: squared norm of the gradient of each token's log-probability with respect to its logits.
    """
    mask = sampled & counted[..., None]
    number = mask.cumsum(-1)  # of the token among the sampled ones, from 1
    # the sampled tokens of each completion first, so that index n - 1 of each row belongs to the n-th one
    order = np.argsort(~mask, axis=-1, kind="stable")
    has = np.take_along_axis(mask, order, axis=-1)
    energy = np.where(has, np.take_along_axis(norms.astype(np.float64), order, axis=-1), 0.0).cumsum(-1)
    weights = np.where(has, energy, 0.0)
    count = counted.sum(-1, keepdims=True)
    # relative to the mean, so that a group of equal rewards gets exactly 0
    known = np.where(counted, rewards.astype(np.float64), 0.0)
    centred = np.where(counted, known - known.sum(-1, keepdims=True) / np.maximum(count, 1), 0.0)
    weighted = weights * centred[..., None]
    total, sums = (x.sum(1, keepdims=True) - x for x in (weights, weighted))
    others = (centred.sum(-1, keepdims=True) - centred) / np.maximum(count - 1, 1)
    usable = total > 1e-12 * weights.sum(1, keepdims=True)  # the rest of a difference is rounding
    baseline = np.where(usable, sums / np.where(usable, total, 1.0), others[..., None])
    own = np.take_along_axis(baseline, np.maximum(number - 1, 0), axis=-1)
    return np.where(mask, centred[..., None] - own, 0.0)
