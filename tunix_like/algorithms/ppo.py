"""Defines what a critic adds to an objective: generalised advantage estimates per token, and the loss of the values.

The state of a token is the text before it, and its value is the expected sum of later rewards. An action is a token
that the policy sampled. Tokens of an environment between two actions are part of the next state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.losses import Rows, TokenInputs, Tokens, aggregation_weights
from tunix_like.algorithms.registry import register_advantage_estimator

PPO = "ppo"
"""Name of the estimator whose advantages are per token and come from a critic."""


@register_advantage_estimator(PPO, least_scored=1)
def ppo(rewards: Float[Array, "P G"], *, scored: Bool[Array, "P G"], lengths: Int[Array, "P G"]) -> Float[Array, "P G"]:
    """Returns zeros: the advantages of tokens come from the critic (`estimate`)."""
    return jnp.zeros_like(rewards)


class Estimates(NamedTuple):
    """What a critic gives for the tokens of a rollout batch; 0 for tokens that are no actions.

    Attributes:
      values: of the states, before the first update of the batch.
      returns: the targets of the values: advantages, before they are whitened, plus values.
      advantages: whitened.
    """

    values: Float[np.ndarray, "P G T"]
    returns: Float[np.ndarray, "P G T"]
    advantages: Float[np.ndarray, "P G T"]

    def metrics(self, mask: Bool[np.ndarray, "P G T"]) -> dict[str, float]:
        """Returns the means of values and returns over the actions `mask`, and which part of the variance of the
        returns the values explain: `1 - Var(returns - values) / Var(returns)`. All are NaN without actions; the last
        one also if all returns are equal."""
        values, returns = (x[mask].astype(np.float64) for x in (self.values, self.returns))
        variance = returns.var() if mask.any() else 0.0
        return {
            "critic/value": float(values.mean()) if mask.any() else np.nan,
            "critic/return": float(returns.mean()) if mask.any() else np.nan,
            "critic/explained_variance": float(1 - (returns - values).var() / variance) if variance else np.nan,
        }


def estimate(
    rewards: Float[np.ndarray, "P G T"],
    values: Float[np.ndarray, "P G T"],
    mask: Bool[np.ndarray, "P G T"],
    gamma: float,
    gae_lambda: float,
) -> Estimates:
    """Returns the estimates for the rewards of the actions `mask`."""
    advantages = gae(rewards, values, mask, gamma, gae_lambda)
    returns = np.where(mask, advantages + values, 0.0)
    parts = np.where(mask, values, 0.0), returns, whitened(advantages, mask)
    return Estimates(*(part.astype(np.float32) for part in parts))


def at_last_action(rewards: Float[np.ndarray, "P G"], mask: Bool[np.ndarray, "P G T"]) -> Float[np.ndarray, "P G T"]:
    """Returns rewards of actions, in float64, for completions whose reward comes at their last action."""
    mask_after = np.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return np.where(mask & (mask_after == 1), rewards[..., None].astype(np.float64), 0.0)


def gae(
    rewards: Float[np.ndarray, "*batch T"],
    values: Float[np.ndarray, "*batch T"],
    mask: Bool[np.ndarray, "*batch T"],
    gamma: float,
    gae_lambda: float,
) -> Float[np.ndarray, "*batch T"]:
    """Returns generalised advantage estimates (arXiv 1506.02438) of the actions `mask`, in float64; 0 elsewhere.

    `A_t = delta_t + gamma lambda A_u` with `delta_t = r_t + gamma V_u - V_t`, where `u` is the next action after `t`.
    After the last action, `V_u` and `A_u` are 0, also if the token limit has cut the completion.
    """
    advantages = np.zeros(values.shape)
    value = after = np.zeros(values.shape[:-1])
    for t in range(values.shape[-1])[::-1]:
        acts = mask[..., t]
        own = rewards[..., t] + gamma * value - values[..., t] + gamma * gae_lambda * after
        advantages[..., t] = np.where(acts, own, 0.0)
        value = np.where(acts, values[..., t], value)
        after = np.where(acts, own, after)
    return advantages


def whitened(
    advantages: Float[np.ndarray, "*batch T"], mask: Bool[np.ndarray, "*batch T"]
) -> Float[np.ndarray, "*batch T"]:
    """Shifts and scales the advantages at `mask` to mean 0 and variance 1, with 1e-8 added to the (unbiased) variance,
    as in verl, TRL and Tunix; 0 elsewhere."""
    if not mask.any():
        return np.zeros_like(advantages)
    chosen = advantages[mask]
    variance = chosen.var(ddof=1) if chosen.size > 1 else 0.0
    return np.where(mask, (advantages - chosen.mean()) / np.sqrt(variance + 1e-8), 0.0)


@dataclasses.dataclass(frozen=True)
class ValueObjective:
    """The objective of a critic's compiled step: the mean over the actions of an update of
    `max((V - R)^2, (V_clip - R)^2) / 2` with `V_clip = clip(V, V_old - value_clip, V_old + value_clip)`.

    `V` are the values under the current weights, `V_old` those before the first update of the batch, and `R` the
    returns. In the step, `V` and `V_old` have the place of log-probabilities, and `R` that of advantages.
    """

    value_clip: float | None

    built_in = True

    def key(self) -> Hashable:
        return self

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Returns zeros, to which the step adds the returns (`StepInputs.token_advantages`)."""
        return jnp.zeros_like(rewards)

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        return aggregation_weights("token-mean", lengths, scored & trained & in_update[:, None], 1)

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        values = tokens.logprobs
        old = tokens.old_logprobs
        returns = advantages
        loss = (values - returns) ** 2
        metrics = dict[str, Any]()
        if self.value_clip is not None:
            clipped = (jnp.clip(values, old - self.value_clip, old + self.value_clip) - returns) ** 2
            metrics = {"clipfrac": (clipped > loss).astype(jnp.float32)}
            loss = jnp.maximum(loss, clipped)
        return jnp.where(tokens.mask, 0.5 * loss, 0.0), metrics
