"""What one learner optimises: its estimator, loss, aggregation and KL, resolved from a config and checked once.

Everything that can be wrong about an algorithm is found here, before any compile. This module knows no model and no
data.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.config import AlgorithmConfig
from tunix_like.errors import UserError
from tunix_like.rl.advantages import (
    ZERO_WHEN_CONSTANT,
    check_parameters,
    estimator_parameters,
    find_estimator,
    least_scored,
)
from tunix_like.rl.losses import (
    Rows,
    Tokens,
    aggregation_weights,
    find_policy_loss,
    kl_estimate,
    loss_parameters,
)

_ESTIMATOR_KEYS = ("k", "truncation_order", "ddof")
_LOSS_KEYS = ("epsilon", "epsilon_high", "epsilon_c")


@dataclasses.dataclass(frozen=True)
class Objective:
    """The resolved objective. `estimator_params` and `loss_params` hold only what the functions read."""

    config: AlgorithmConfig
    estimator_params: dict[str, Any]
    loss_params: dict[str, Any]
    max_tokens: int

    def parameters(self) -> dict[str, Any]:
        """Every parameter that the estimator and the loss read, with the value it has."""
        estimator = estimator_parameters(find_estimator(str(self.config.advantage_estimator)))
        loss = loss_parameters(find_policy_loss(str(self.config.policy_loss_fn)))
        return {**estimator, **loss, **self.estimator_params, **self.loss_params}

    @property
    def reference_in_loss(self) -> bool:
        return self.config.beta > 0 and not self.config.kl_in_reward

    @property
    def needs_signal(self) -> bool:
        """True when a group of equal rewards adds nothing to the gradient and can be left out of the compute."""
        return not self.reference_in_loss and self.config.advantage_estimator in ZERO_WHEN_CONSTANT

    def advantages(
        self, rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], lengths: Int[Array, "P G"]
    ) -> Float[Array, "P G"]:
        """The estimator's advantages, 0 where unscored; traced inside the training step."""
        estimator = find_estimator(str(self.config.advantage_estimator))
        out = estimator(rewards, scored=scored, lengths=lengths, **self.estimator_params)
        if out.shape != rewards.shape:
            raise UserError(
                f"advantage estimator '{self.config.advantage_estimator}' returned shape {list(out.shape)} for rewards "
                f"of shape {list(rewards.shape)}; it must return one advantage per completion."
            )
        return jnp.where(scored, out, 0.0).astype(jnp.float32)

    def weights(
        self, scored: Bool[Array, "P G"], lengths: Int[Array, "P G"], in_update: Bool[Array, "P"]
    ) -> Float[Array, "P G"]:
        """Token weight of each completion over one optimizer update; unscored completions and groups with too few
        scored ones weigh nothing and are not counted."""
        kept = scored.sum(axis=-1, keepdims=True) >= least_scored(self.estimator_params)
        counted = scored & kept & in_update[:, None]
        return aggregation_weights(str(self.config.loss_agg_mode), lengths, counted, self.max_tokens)

    def token_loss(
        self, logprobs: Tokens, old: Tokens, reference: Tokens | None, advantages: Rows, mask: Array
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """Loss per token, 0 where masked, and per-token metrics."""
        function = find_policy_loss(str(self.config.policy_loss_fn))
        loss, metrics = function(logprobs, old, advantages, mask, **self.loss_params)
        if reference is not None:
            kl = kl_estimate(str(self.config.kl_loss_mode), logprobs, reference, mask)
            loss, metrics = loss + self.config.beta * kl, metrics | {"kl": kl}
        return jnp.where(mask, loss, 0.0), metrics


def resolve(config: AlgorithmConfig, defaults: type[AlgorithmConfig]) -> AlgorithmConfig:
    """Fills unset keys from a learner's config class."""
    plain = defaults()
    values = {
        field.name: getattr(plain, field.name) if getattr(config, field.name) is None else getattr(config, field.name)
        for field in dataclasses.fields(AlgorithmConfig)
    }
    return dataclasses.replace(plain, **values)


def build_objective(config: AlgorithmConfig, max_tokens: int, updates_per_batch: int) -> Objective:
    """Checks a resolved config against what its estimator and its loss read.

    Raises:
      UserError: a key set that nothing reads, a required one unset, one out of range, or a combination that is wrong
        (REINFORCE with several updates per rollout, KL in a reward that must not be negative).
    """
    name, loss_name = str(config.advantage_estimator), str(config.policy_loss_fn)
    find_estimator(name)
    estimator_params = check_parameters(
        name, {key: getattr(config, key) for key in _ESTIMATOR_KEYS}, config.num_generations
    )
    declared = loss_parameters(find_policy_loss(loss_name))
    loss_params = {key: value for key in _LOSS_KEYS if (value := getattr(config, key)) is not None}
    for key in loss_params:
        if key not in declared:
            raise UserError(f"algorithm.{key}: the loss '{loss_name}' does not read it. Unset it.")
    for key, default in declared.items():
        if default is inspect.Parameter.empty and key not in loss_params:
            raise UserError(f"algorithm.{key}: the loss '{loss_name}' needs it.")
    if loss_name == "reinforce" and updates_per_batch > 1:
        raise UserError(
            f"algorithm.policy_loss_fn: 'reinforce' has no ratio and allows one update per rollout batch, but "
            f"num_iterations and mini_batch_size make {updates_per_batch}. Use ppo_clip."
        )
    if name == "maxrl" and config.truncation_order is None and config.kl_in_reward and config.beta > 0:
        raise UserError(
            "algorithm.kl_in_reward: it makes negative rewards, which maxrl without truncation_order does not take. "
            "Set algorithm.truncation_order, or algorithm.kl_in_reward=false."
        )
    return Objective(config, estimator_params, loss_params, max_tokens)
