"""Computes importance weights for completions that were sampled with a policy other than the trained policy.

`mu` is the policy of the sampler, and `pi` is the policy of the trainer. They differ because of rounding, and because
of the updates since the sampler received its weights. Every mode of `algorithm.sampler_is` multiplies the policy loss
by a function of the ratio `pi / mu`. No gradient flows through this function. `tests/algorithms/test_off_policy.py`
shows the bias of every mode for a policy whose completions are all enumerated.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from tunix_like.algorithms.losses import MAX_LOG_RATIO, Rows, Tokens, log_ratio
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.errors import UserError

DEFAULT_UPPER = {"token": 2.0, "sequence": 2.0, "token_mask": 3.0, "sequence_mask": 3.0}
"""The upper bound of each mode if `sampler_is_threshold` is unset. The truncating modes have the default of Tunix, the
masking modes the default of TRL."""


@dataclasses.dataclass(frozen=True)
class SamplerCorrection:
    """A mode of `algorithm.sampler_is` with its bounds. The loss is multiplied by the ratio `pi / mu`, within bounds.

    `pi` is the policy of the trainer, and `mu` is the policy of the sampler. `p(y)` and `m(y)` are the probabilities of
    a completion `y` under `pi` and `mu`. `g(y)` is the gradient of `log p(y)`, times the advantage of `y`. The unbiased
    gradient is `sum_y p(y) g(y)`. Without a correction, the expected gradient is `sum_y m(y) g(y)`. The modes have
    these biases:

    - `sequence` truncates the ratio `p(y) / m(y)` of the completion to the bounds. The expected gradient is
      `sum_y clip(p, lower m, upper m) g(y)`. It is unbiased if all ratios are within the bounds. Otherwise completions
      with a ratio above `upper` get too little weight, and completions with a ratio below `lower` get too much.
    - `sequence_mask` gives weight 0 to completions whose ratio is outside the bounds. The expected gradient is the sum
      of `p(y) g(y)` over the other completions. With the same upper bound, masking removes at least as much probability
      as truncation does.
    - `token` truncates the ratio of each token by itself. If all ratios are within the bounds, the expected gradient is
      `sum_s m(s) sum_a grad pi(a | s) Q_mu(s, a)`. The sum is over prefixes `s`, which the sampler reaches with
      probability `m(s)`, and next tokens `a`. `Q_mu` is the expected advantage if the sampler continues after `a`. This
      gradient is unbiased for completions of one token. For longer completions its bias is of the order of `pi - mu`,
      even without bounds.
    - `token_mask` gives weight 0 to tokens whose ratio is outside the bounds. Its bias is the bias of `token` without
      bounds; in addition, the gradient of the masked tokens is missing.

    Attributes:
      mode: `token`, `sequence`, `token_mask` or `sequence_mask`.
      lower: lower bound of the ratio; 0 means no bound.
      upper: upper bound of the ratio. Ratios are at most `exp(20)`, about 4.9e8.
    """

    mode: str
    lower: float
    upper: float

    @property
    def by_sequence(self) -> bool:
        return self.mode.startswith("sequence")

    @property
    def masks(self) -> bool:
        return self.mode.endswith("_mask")

    def ratios(self, logprobs: Tokens, rollout_logprobs: Tokens, mask: Array) -> Tokens:
        """Computes, for each token, the trainer's probability divided by the sampler's probability. In the `sequence`
        modes, all tokens of a completion get the product of these ratios over the completion.

        Masked tokens (padding and tokens of an environment) get 1 and are not part of the product. No gradient flows
        through the result.
        """
        if self.by_sequence:
            total = jnp.where(mask, logprobs - rollout_logprobs, 0.0).sum(axis=-1, keepdims=True)
            difference = jnp.where(mask, jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
        else:
            difference = log_ratio(logprobs, rollout_logprobs, mask)
        return jax.lax.stop_gradient(jnp.exp(difference))

    def weights(self, ratios: Tokens) -> Tokens:
        """Truncates the importance ratios to the bounds `lower` and `upper`. The `_mask` modes instead replace ratios
        outside the bounds by 0. A ratio equal to a bound is kept."""
        if self.masks:
            return jnp.where((ratios < self.lower) | (ratios > self.upper), 0.0, ratios)
        upper = jnp.minimum(ratios, self.upper)
        return jnp.maximum(upper, self.lower) if self.lower else upper

    def metrics(self, ratios: Tokens, weights: Tokens, mask: Array) -> dict[str, Tokens]:
        """Returns, for each metric of the importance weights, one value per token. `finish_metrics` computes the
        metrics from the means of these values over the tokens.

        The metrics are means over tokens. In the `sequence` modes, they are means over completions: the value of a
        token is divided by the number of tokens of its completion, so that every completion counts once.
        """
        length = jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
        unit = jnp.broadcast_to(1.0 / length if self.by_sequence else jnp.ones_like(length, ratios.dtype), ratios.shape)
        outside = (ratios < self.lower) | (ratios > self.upper)
        values = {"mean": weights, "square": weights**2, "ratio_mean": ratios, "outside_frac": outside}
        return {"sampler_is/unit": unit} | {f"sampler_is/{name}": unit * value for name, value in values.items()}


def finish_metrics(metrics: dict[str, Array]) -> dict[str, Array]:
    """Computes the metrics `sampler_is/...` from the means of the values of `SamplerCorrection.metrics` over the tokens
    of an update. Other metrics are unchanged.

    Let `w` be the importance weights of `n` tokens, or of `n` completions in the `sequence` modes. `sampler_is/mean` is
    the mean weight. `sampler_is/ratio_mean` is the mean ratio before truncation or masking; its expectation is 1.
    `sampler_is/outside_frac` is the fraction of ratios outside the bounds. `sampler_is/ess` is the effective sample
    size as a fraction of `n`, `(sum w)^2 / (n sum w^2)`.
    """
    if "sampler_is/unit" not in metrics:
        return metrics
    out = dict(metrics)
    unit = out.pop("sampler_is/unit")
    out |= {name: value / unit for name, value in out.items() if name.startswith("sampler_is/")}
    square = out.pop("sampler_is/square")
    return out | {"sampler_is/ess": jnp.where(square == 0, 0.0, out["sampler_is/mean"] ** 2 / square)}


def kept_by_mask(
    threshold: float, logprobs: Tokens, rollout_logprobs: Tokens, advantages: Rows, mask: Array
) -> Bool[Array, "*batch T"]:
    """Computes the off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556). It is False for tokens with a negative
    advantage in a completion whose mean of `log mu - log pi` over the sampled tokens is above `threshold` nats. Without
    advantages per token, these are all tokens of the completion.

    `logprobs` are the log-probabilities `log pi` under the current weights, `rollout_logprobs` those of the sampler,
    `log mu`.
    """
    total = jnp.where(mask, rollout_logprobs - logprobs, 0.0).sum(axis=-1, keepdims=True)
    mean = total / jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
    return jnp.broadcast_to((advantages >= 0) | (mean <= threshold), logprobs.shape)


def sampler_correction(config: AlgorithmConfig) -> SamplerCorrection | None:
    """Returns the importance weighting that `algorithm.sampler_is` selects, with defaults for unset bounds; None if the
    key is unset."""
    if config.sampler_is is None:
        return None
    upper = DEFAULT_UPPER[config.sampler_is] if config.sampler_is_threshold is None else config.sampler_is_threshold
    return SamplerCorrection(config.sampler_is, config.sampler_is_min or 0.0, upper)


def check_correction(config: AlgorithmConfig, behaviour: str) -> None:
    """Checks that the keys `sampler_is*` do not conflict with each other, with the policy loss or with the keys of
    the KL.

    Args:
      behaviour: `"rollout"` if the `old_logprobs` of the policy loss come from the sampler, else `"trainer"`.

    Raises:
      UserError: keys conflict. The message names the key and the remedy.
    """
    correction = sampler_correction(config)
    if correction is None:
        return
    if behaviour == "rollout":
        raise UserError(
            f"algorithm.sampler_is: '{config.policy_loss_fn}' already uses the sampler's log-probabilities. Unset it."
        )
    if correction.lower >= correction.upper:
        raise UserError(
            f"algorithm.sampler_is_min: got {correction.lower:g}; it must be below algorithm.sampler_is_threshold "
            f"({correction.upper:g})."
        )
    if correction.masks and correction.upper <= 1:
        raise UserError(
            f"algorithm.sampler_is_threshold: got {correction.upper:g}; {correction.mode} would mask tokens on which "
            "sampler and trainer agree (ratio 1). Set it above 1."
        )
    if config.sampler_is_kl and (config.beta == 0 or config.kl_in_reward):
        cause = "algorithm.beta is 0" if config.beta == 0 else "algorithm.kl_in_reward puts the KL into the advantage"
        raise UserError(f"algorithm.sampler_is_kl: the loss has no KL, since {cause}. Unset it.")
