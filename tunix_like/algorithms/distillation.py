"""Defines what a teacher adds to an objective: an estimator that reads no rewards, and advantages per token."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.losses import Tokens, log_ratio
from tunix_like.algorithms.registry import register_advantage_estimator

DISTILLATION = "distillation"
"""Name of the estimator that reads no rewards. Only the teacher trains the policy."""


@register_advantage_estimator(DISTILLATION, zero_when_constant=True, least_scored=1)
def distillation(
    rewards: Float[Array, "P G"], *, scored: Bool[Array, "P G"], lengths: Int[Array, "P G"]
) -> Float[Array, "P G"]:
    """Returns zeros: the advantages of tokens come from the teacher alone (`teacher_advantages`)."""
    return jnp.zeros_like(rewards)


def teacher_advantages(teacher: Tokens, policy: Tokens, mask: Bool[Array, "*batch T"]) -> Tokens:
    """Returns `log p_teacher - log p_policy` of each sampled token, clamped to +-20; 0 at masked positions.

    Both arguments are log-probabilities of the tokens; `policy` are those under the weights before the first update.
    With on-policy completions, the expected gradient of `sum_t -A_t log p_policy(y_t)` is that of the sum of the
    next-token divergences `KL(policy || teacher)` at the sampled prefixes. The effect of a token on the divergences of
    later tokens is left out, as in Thinking Machines' on-policy distillation (discount 0).
    """
    return log_ratio(teacher, policy, mask)
