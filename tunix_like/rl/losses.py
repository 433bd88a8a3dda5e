"""Policy losses per token, KL estimates, and the aggregation that turns a mask into weights.

The loss of an update is `sum over tokens of weight * token_loss`. Weights are made once from the lengths of the whole
update, so micro-batches add up exactly. Every aggregation weighs the tokens of one completion alike, so a weight is one
number per completion. This module knows no model and no batch layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.errors import UserError, nearest
from tunix_like.rl.advantages import own_parameters

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`, so that neither value nor gradient can overflow."""

Tokens = Float[Array, "*batch T"]
Rows = Float[Array, "*batch 1"]


PolicyLoss = Callable[..., tuple[Tokens, dict[str, Tokens]]]
"""`f(logprobs, old_logprobs, advantages, mask, *, <its own>) -> (loss per token, metrics per token)`."""


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Name to loss: what `algorithm.policy_loss_fn` may say."""


def register_policy_loss_fn(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Makes a per-token policy loss known under `name`. Raises UserError when the name is taken."""

    def register(function: PolicyLoss) -> PolicyLoss:
        if name in POLICY_LOSSES:
            raise UserError(f"policy loss '{name}' is already registered; choose another name.")
        POLICY_LOSSES[name] = function
        return function

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """The registered loss. Raises UserError with the list of names."""
    if name not in POLICY_LOSSES:
        raise UserError(f"algorithm.policy_loss_fn: unknown loss '{name}'. {nearest(name, POLICY_LOSSES)}")
    return POLICY_LOSSES[name]


def loss_parameters(function: PolicyLoss) -> dict[str, Any]:
    return own_parameters(function, frozenset())


def log_ratio(logprobs: Tokens, other: Tokens, mask: Array) -> Tokens:
    """`logprobs - other`, 0 where masked (before any `exp`) and clamped to +-20."""
    return jnp.clip(jnp.where(mask, logprobs - other, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


@register_policy_loss_fn("ppo_clip")
def ppo_clip(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
) -> tuple[Tokens, dict[str, Tokens]]:
    """`max(-rho A, -clip(rho, 1 - epsilon, 1 + epsilon_high) A)`, `rho = pi / pi_old` (PPO, arXiv 1707.06347).

    `epsilon_high` unset equals `epsilon`. `epsilon_c` set bounds the loss by `-epsilon_c A` where `A < 0` (dual clip,
    arXiv 1912.09729). With one update per rollout `rho` is 1 and the gradient is REINFORCE's.
    """
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs, mask))
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + high)
    loss = jnp.maximum(-ratio * advantages, -clipped * advantages)
    if epsilon_c is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -epsilon_c * advantages), loss)
    return loss, {
        "pg_clipfrac": (-clipped * advantages > -ratio * advantages).astype(jnp.float32),
        "is_ratio/mean": ratio,
    }


@register_policy_loss_fn("reinforce")
def reinforce(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Rows, mask: Array
) -> tuple[Tokens, dict[str, Tokens]]:
    """`-A log pi`, no ratio: for rollouts of the current policy, one update each."""
    return -advantages * jnp.where(mask, logprobs, 0.0), {}


def kl_estimate(mode: str, logprobs: Tokens, ref_logprobs: Tokens, mask: Array) -> Tokens:
    """Per-token KL estimates with `d = log pi - log pi_ref` (clamped to +-20): `kl` = k1 = `d`, `mse_kl` = k2 =
    `d^2/2`, `low_var_kl` = k3 = `exp(-d) + d - 1`. As losses on-policy: k1 has zero expected gradient, k2 that of
    KL(pi || ref), k3 that of KL(ref || pi)."""
    d = log_ratio(logprobs, ref_logprobs, mask)
    return {"kl": d, "mse_kl": 0.5 * d**2, "low_var_kl": jnp.exp(-d) + d - 1}[mode]


def aggregation_weights(
    mode: str, lengths: Int[Array, "P G"], counted: Bool[Array, "P G"], max_tokens: int
) -> Float[Array, "P G"]:
    """The weight of each token of each completion, over one optimizer update.

    Args:
      mode: with N the counted completions that have a token: `token-mean` 1 / all their tokens,
        `sequence-mean-token-mean` 1 / (N length), `seq-mean-token-sum` 1 / N,
        `sequence-mean-token-scale` 1 / (N max_tokens).
      counted: completions of this update that take part.
      max_tokens: the constant of `sequence-mean-token-scale`, `rollout.max_tokens_to_generate`.
    """
    counted = counted & (lengths > 0)
    completions = jnp.maximum(counted.sum(), 1).astype(jnp.float32)
    tokens = jnp.maximum(jnp.where(counted, lengths, 0).sum(), 1).astype(jnp.float32)
    weights = {
        "token-mean": 1.0 / tokens,
        "sequence-mean-token-mean": 1.0 / (completions * jnp.maximum(lengths, 1)),
        "seq-mean-token-sum": 1.0 / completions,
        "sequence-mean-token-scale": 1.0 / (completions * max_tokens),
    }[mode]
    return jnp.where(counted, weights, 0.0)


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "N"],
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """`log_softmax(hidden @ head / temperature)` at the targets, and its entropy (detached), both in nats.

    Tokens go through in chunks that are recomputed in the backward pass: `[N, V]` never exists whole, forward or
    backward.
    """

    @jax.checkpoint
    def one(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32) / temperature
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - normaliser
        detached = jax.lax.stop_gradient(logits)
        mean = (jax.nn.softmax(detached, axis=-1) * detached).sum(axis=-1)
        return chosen, jax.lax.stop_gradient(normaliser) - mean

    count = hidden.shape[0]
    if count <= chunk:
        return one(hidden, targets)
    pieces = -(-count // chunk)
    even = -(-count // pieces)
    pad = pieces * even - count
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(pieces, even, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(pieces, even)
    chosen, entropy = jax.lax.map(lambda xs: one(*xs), (hidden, targets))
    return chosen.reshape(-1)[:count], entropy.reshape(-1)[:count]
