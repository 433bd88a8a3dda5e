"""Defines per-token policy losses, KL estimates and loss aggregation weights.

The loss of an optimizer update is `sum over tokens of weight * token_loss`. The completions of an update are passed
through the model in several parts. The weights are computed once, from the lengths of all completions of the update, so
the losses of the parts add up to the loss of the update. Every aggregation mode gives the same weight to all tokens of
a completion, so there is one weight per completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.registry import find_registered, own_parameters
from tunix_like.errors import UserError
from tunix_like.runtime.user_code import check_new_name

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this value before `exp`, so that neither the value nor the gradient overflows."""

Tokens = Float[Array, "*batch T"]
Rows = Float[Array, "*batch #T"]
"""One value per completion, or one value per token."""


class TokenInputs(NamedTuple):
    """Per-token inputs of the loss, for some or all completions of an optimizer update. Masked positions can hold any
    value.

    `old_logprobs` are the log-probabilities under the trainer's weights before the first update on the rollout batch.
    `rollout_logprobs` are the log-probabilities of the sampler. `entropy` is the entropy of the policy, in nats.
    `teacher_divergence` is the divergence of the policy from a teacher, with a gradient, and `teacher_logprobs` are the
    teacher's log-probabilities; None without a teacher in the loss.
    """

    logprobs: Tokens
    old_logprobs: Tokens
    rollout_logprobs: Tokens | None
    ref_logprobs: Tokens | None
    entropy: Tokens
    mask: Bool[Array, "*batch T"]
    teacher_divergence: Tokens | None = None
    teacher_logprobs: Tokens | None = None


PolicyLossFunction = Callable[..., tuple[Tokens, dict[str, Tokens]]]
"""`f(logprobs, old_logprobs, advantages, mask, *, <parameters>) -> (loss per token, metrics per token)`."""


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss.

    Attributes:
      behaviour: source of the function's argument `old_logprobs`: `"rollout"` for log-probabilities of the sampler,
        `"trainer"` for log-probabilities of the trainer.
      extra_term: whether the loss has a term that does not contain the advantage, or the name of the parameter that is
        the coefficient of such a term.
    """

    function: PolicyLossFunction
    behaviour: str
    extra_term: str | bool


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Maps names to losses: the registered values of `algorithm.policy_loss_fn`."""


def register_policy_loss_fn(
    name: str, *, behaviour: str = "trainer", extra_term: str | bool = True
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Registers a per-token policy loss under `name`.

    The function has the form `f(logprobs, old_logprobs, advantages, mask, *, <parameters>) -> (loss per token, metrics
    per token)`. All arrays are `[.., T]`, except `advantages`: `[.., 1]`, or `[.., T]` if each token has its own
    advantage (with a critic, a teacher, `credit: turn` or `otb`).

    Args:
      behaviour: the source of `old_logprobs`: `"trainer"` (the trainer's weights before the first update on the rollout
        batch) or `"rollout"` (the sampler).
      extra_term: whether the loss has a term that does not contain the advantage, or the name of the parameter that is
        the coefficient of such a term. If there is no such term (or its coefficient is 0), completions with advantage
        0 have no gradient and are skipped.

    Raises:
      UserError: the name is taken or contains `.` or `:`, or `behaviour` has another value.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        check_new_name("policy loss", name, POLICY_LOSSES, reserved=".:")
        if behaviour not in ("trainer", "rollout"):
            raise UserError(f"policy loss '{name}': behaviour must be 'trainer' or 'rollout', got '{behaviour}'.")
        POLICY_LOSSES[name] = PolicyLoss(function, behaviour, extra_term)
        return function

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """Returns the policy loss for a registered name, `FILE.py:function` or `package.module.function`.

    If the file or module itself registers the function, the options of this registration apply.

    Raises:
      UserError: the name is unknown (the message lists the known names), or the file or module has no such function.
    """
    unknown = "algorithm.policy_loss_fn: unknown loss"
    return find_registered(name, POLICY_LOSSES, unknown, lambda function: PolicyLoss(function, "trainer", True))


def loss_parameters(name: str) -> dict[str, Any]:
    """Returns the keyword-only parameters of the policy loss `name`, with their defaults."""
    return own_parameters(find_policy_loss(name).function, frozenset())


def log_ratio(logprobs: Tokens, other: Tokens, mask: Array) -> Tokens:
    """Returns `logprobs - other`, clamped to +-20. The result is 0 at masked positions."""
    return jnp.clip(jnp.where(mask, logprobs - other, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


@register_policy_loss_fn("ppo_clip", extra_term=False)
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
    """Computes the clipped PPO loss `max(-rho A, -clip(rho, 1 - epsilon, 1 + epsilon_high) A)` (arXiv 1707.06347).

    `A` is the advantage and `rho = pi / pi_old` the ratio of the token's probabilities under the current weights and
    under the weights before the first update on the rollout batch. `epsilon_high` defaults to `epsilon`. If `epsilon_c`
    is set and `A < 0`, the loss is at most `-epsilon_c A` (dual clip, arXiv 1912.09729). With one update per rollout
    batch, `rho` is 1 and the gradient equals the gradient of REINFORCE.
    """
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs, mask))
    return _clipped(ratio, advantages, epsilon, epsilon if epsilon_high is None else epsilon_high, epsilon_c)


def _clipped(
    ratio: Tokens, advantages: Rows, low: float, high: float, dual: float | None
) -> tuple[Tokens, dict[str, Tokens]]:
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    loss = jnp.maximum(-ratio * advantages, -clipped * advantages)
    if dual is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)
    outside = (-clipped * advantages > -ratio * advantages).astype(jnp.float32)
    return loss, {"pg_clipfrac": outside, "is_ratio/mean": ratio}


@register_policy_loss_fn("reinforce", extra_term=False)
def reinforce(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Rows, mask: Array
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes the REINFORCE loss `-A log pi` with the advantage `A`. The loss has no importance ratio, so it allows
    only one update per rollout batch."""
    return -advantages * jnp.where(mask, logprobs, 0.0), {}


@register_policy_loss_fn("gspo", extra_term=False)
def gspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    epsilon_c: float | None = None,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes the clipped PPO loss with one ratio for each completion (GSPO, arXiv 2507.18071).

    The ratio of a completion is `s = exp(mean_t log rho_t)`, the geometric mean of the ratios `rho_t = pi_t / pi_old_t`
    of its tokens. The loss of token `t` uses `s_t = sg(s) pi_t / sg(pi_t)` (`sg`: stop gradient). The value of `s_t` is
    `s`, so the gradient of every token is multiplied by the ratio of its completion.
    """
    difference = jnp.where(mask, logprobs - old_logprobs, 0.0)
    mean = difference.sum(axis=-1, keepdims=True) / jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
    sequence = jax.lax.stop_gradient(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    own = jnp.where(mask, logprobs - jax.lax.stop_gradient(logprobs), 0.0)
    high = epsilon if epsilon_high is None else epsilon_high
    return _clipped(jnp.exp(sequence + own), advantages, epsilon, high, epsilon_c)


@register_policy_loss_fn("cispo", extra_term=False)
def cispo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes `-sg(clip(rho, 1 - epsilon, 1 + epsilon_high)) A log pi` (CISPO, arXiv 2506.13585).

    `A` is the advantage, and `rho = pi / pi_old` is the importance weight of a token. Only this weight is clipped
    (`sg`: stop gradient), so every token keeps a gradient.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logprobs, old_logprobs, mask)))
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    outside = (clipped != ratio).astype(jnp.float32)
    loss = -clipped * advantages * jnp.where(mask, logprobs, 0.0)
    return loss, {"pg_clipfrac": outside, "is_ratio/mean": ratio}


@register_policy_loss_fn("dppo", behaviour="rollout", extra_term="kl_tau")
def dppo(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    kl_tau: float = 1e-3,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes `-A rho + kl_tau (log pi - log mu)^2`, without the first term for some tokens (DPPO, arXiv 2602.04879).

    `A` is the advantage. `rho = pi / mu`, where `pi` is the trainer's and `mu` the sampler's probability of the token.
    The term `-A rho` of a token is dropped if `A > 0` and `pi - mu > dppo_mask_high`, or if `A <= 0` and
    `pi - mu < -dppo_mask_low`. These bounds are for the difference of probabilities, not of log-probabilities. The
    quadratic term applies to every token.
    """
    moved = _probability(logprobs, mask) - _probability(rollout_logprobs, mask)
    dropped = jnp.where(advantages > 0, moved > dppo_mask_high, moved < -dppo_mask_low)
    return _dppo(logprobs, rollout_logprobs, advantages, mask, dropped, kl_tau)


@register_policy_loss_fn("dppo_kl", behaviour="rollout", extra_term="kl_tau")
def dppo_kl(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    dppo_mask_high: float = 0.05,
    dppo_mask_low: float = 0.05,
    kl_tau: float = 1e-3,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes the loss of `dppo`, with another condition for dropping `-A rho` (DPPO-Binary-KL, arXiv 2602.04879).

    Let `d = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))` be the KL between the two policies if only the sampled
    token is distinguished from all others, in nats. The term of a token is dropped if `A > 0`, `pi > mu` and `d >
    dppo_mask_high`, or if `A <= 0`, `pi < mu` and `d > dppo_mask_low`.
    """
    pi, mu = _probability(logprobs, mask), _probability(rollout_logprobs, mask)
    # `1 - p` is computed as `-expm1(log p)`, which keeps the digits of probabilities near 1.
    others, own = (-jnp.expm1(jnp.where(mask, x, 0.0)) for x in (rollout_logprobs, logprobs))
    rest = jnp.where(others > 0, others * (jnp.log(jnp.where(others > 0, others, 1.0)) - jnp.log(own)), 0.0)
    divergence = -mu * log_ratio(logprobs, rollout_logprobs, mask) + rest
    dropped = jnp.where(
        advantages > 0, (pi > mu) & (divergence > dppo_mask_high), (pi < mu) & (divergence > dppo_mask_low)
    )
    return _dppo(logprobs, rollout_logprobs, advantages, mask, dropped, kl_tau)


def _probability(logprobs: Tokens, mask: Array) -> Tokens:
    return jnp.exp(jnp.where(mask, logprobs, 0.0))


def _dppo(
    logprobs: Tokens, rollout_logprobs: Tokens, advantages: Rows, mask: Array, dropped: Array, kl_tau: float
) -> tuple[Tokens, dict[str, Tokens]]:
    difference = log_ratio(logprobs, rollout_logprobs, mask)
    ratio = jnp.exp(difference)
    loss = jnp.where(dropped, 0.0, -ratio * advantages) + kl_tau * difference**2
    return loss, {"pg_clipfrac": dropped.astype(jnp.float32), "is_ratio/mean": ratio}


@register_policy_loss_fn("sapo", extra_term=False)
def sapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes `-A (4 / tau) sigmoid(tau (rho - 1))`, which bounds the ratio `rho` without clipping it (SAPO, arXiv
    2511.20347).

    `A` is the advantage and `rho = pi / pi_old`. `tau` is `sapo_tau_pos` if `A > 0`, else `sapo_tau_neg`. The gradient
    of the loss with respect to `rho` is `-A / cosh(tau (rho - 1) / 2)^2`: that of REINFORCE at `rho = 1`, and smaller
    the further `rho` is from 1, in both directions.
    """
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs, mask))
    tau = jnp.where(advantages > 0, sapo_tau_pos, sapo_tau_neg)
    return -advantages * (4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)), {"is_ratio/mean": ratio}


@register_policy_loss_fn("gmpo", extra_term=False)
def gmpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    epsilon: float = 0.4,
    epsilon_high: float | None = None,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes `-A` times the geometric mean of the clipped ratios of a completion (GMPO, arXiv 2507.20673).

    The log-ratio `l_t = log(pi_t / pi_old_t)` of a token becomes `c_t = min(l_t, epsilon_high)` if the advantage `A` is
    positive, else `c_t = max(l_t, -epsilon)`. The bounds are bounds of log-ratios; `epsilon_high` defaults to
    `epsilon`. The factor of the completion is `s = exp(mean_t c_t)`. The loss of token `t` uses `s_t = sg(s) exp(c_t -
    sg(c_t))` (`sg`: stop gradient), whose value is `s`. With the aggregation `sequence-mean-token-mean`, the loss of
    the completion and its gradient are those of `-A s`.
    """
    difference = log_ratio(logprobs, old_logprobs, mask)
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = jnp.where(advantages > 0, jnp.minimum(difference, high), jnp.maximum(difference, -epsilon))
    mean = clipped.sum(axis=-1, keepdims=True) / jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
    ratio = jnp.exp(jax.lax.stop_gradient(mean) + clipped - jax.lax.stop_gradient(clipped))
    outside = (clipped != difference).astype(jnp.float32)
    return -advantages * ratio, {"pg_clipfrac": outside, "is_ratio/mean": ratio}


@register_policy_loss_fn("vespo", behaviour="rollout", extra_term=False)
def vespo(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Rows,
    mask: Array,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Computes `-sg(phi(w)) A log pi` with `phi(w) = w^k exp(lambda (1 - w))` (VESPO, arXiv 2602.10693).

    `w = prod_t pi_t / mu_t` is the ratio of the whole completion, where `mu` are the probabilities of the sampler.
    `phi(1)` is 1; `phi` is largest at `w = k / lambda` and tends to 0 for small and for large `w`. `k` and `lambda` are
    the values for `pos` if the advantage `A` is at least 0, else those for `neg` (`sg`: stop gradient).
    """
    total = jnp.where(mask, logprobs - rollout_logprobs, 0.0).sum(axis=-1, keepdims=True)
    log_weight = jax.lax.stop_gradient(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    power = jnp.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    decay = jnp.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg)
    phi = jnp.exp(power * log_weight + decay * (1 - jnp.exp(log_weight)))
    ratio = jnp.broadcast_to(jnp.exp(log_weight), logprobs.shape)
    return -phi * advantages * jnp.where(mask, logprobs, 0.0), {"is_ratio/mean": ratio}


def kl_estimate(mode: str, logprobs: Tokens, ref_logprobs: Tokens, mask: Array) -> Tokens:
    """Estimates the KL to the reference policy per token, with `d = log pi - log pi_ref` clamped to +-20.

    Modes: `kl` = k1 = `d`, `mse_kl` = k2 = `d^2/2`, `low_var_kl` = k3 = `exp(-d) + d - 1`.

    As a term of an on-policy loss, k1 has an expected gradient of zero. The expected gradient of k2 is the gradient of
    KL(pi || ref), and the expected gradient of k3 is the gradient of KL(ref || pi). Both are KLs between next-token
    distributions, given the sampled prefixes. As a term of the loss, no mode gives the gradient of the KL between the
    distributions of whole completions, because the loss ignores how a token changes later prefixes. To get that
    gradient, subtract k1 from the reward.
    """
    d = log_ratio(logprobs, ref_logprobs, mask)
    return {"kl": d, "mse_kl": 0.5 * d**2, "low_var_kl": jnp.exp(-d) + d - 1}[mode]


def aggregation_weights(
    mode: str, lengths: Int[Array, "P G"], counted: Bool[Array, "P G"], max_tokens: int
) -> Float[Array, "P G"]:
    """Computes, for each completion of one optimizer update, the weight of its tokens in the loss.

    Args:
      mode: the aggregation. Let N be the number of counted completions with at least one token. The weight is
        1 / (number of tokens of these N completions) for `token-mean`, 1 / (N length) for `sequence-mean-token-mean`,
        1 / N for `seq-mean-token-sum`, and 1 / (N max_tokens) for `sequence-mean-token-scale`.
      counted: completions of this update that contribute to the loss.
      max_tokens: the constant in `sequence-mean-token-scale`: `rollout.max_tokens_to_generate`.
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
