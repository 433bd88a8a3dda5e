"""Policy losses per token, KL estimates, and the aggregation that turns a mask into weights.

The loss of an update is `sum over tokens of weight * token_loss`. Weights are made once from the lengths of the whole
update, so chunks add up exactly. Every aggregation weighs the tokens of one completion alike, so a weight is one
number per completion. This module knows no model and no batch layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.registry import own_parameters
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import is_place, load_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`, so that neither value nor gradient can overflow."""

Tokens = Float[Array, "*batch T"]
Rows = Float[Array, "*batch #T"]
"""One value for each completion, or one for each of its tokens."""


class TokenInputs(NamedTuple):
    """Completion tokens of a chunk, as the objective sees them. Masked places may hold anything.

    `old_logprobs` are the trainer's before this batch's first update, `rollout_logprobs` the sampler's; `entropy` is
    the policy's, in nats.
    """

    logprobs: Tokens
    old_logprobs: Tokens
    rollout_logprobs: Tokens | None
    ref_logprobs: Tokens | None
    entropy: Tokens
    mask: Bool[Array, "*batch T"]


PolicyLossFunction = Callable[..., tuple[Tokens, dict[str, Tokens]]]
"""`f(logprobs, old_logprobs, advantages, mask, *, <its own>) -> (loss per token, metrics per token)`."""


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. With `behaviour="rollout"` it is given the sampler's log-probabilities as `old_logprobs`.
    `extra_term` says whether it has a term without the advantage, or names the parameter that weighs one."""

    function: PolicyLossFunction
    behaviour: str
    extra_term: str | bool


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Name to loss: what `algorithm.policy_loss_fn` may say."""


def register_policy_loss_fn(
    name: str, *, behaviour: str = "trainer", extra_term: str | bool = True
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Makes a per-token policy loss known under `name`: `f(logprobs, old_logprobs, advantages, mask, *, <its own>) ->
    (loss per token, metrics per token)`, all `[.., T]` but `advantages: [.., 1]`.

    Args:
      behaviour: whose log-probabilities `old_logprobs` are: the `trainer`'s before the batch's first update, or the
        `rollout`'s.
      extra_term: whether it has a term without the advantage, or the parameter that weighs one. Where it has none (or
        of weight 0), completions whose advantage is 0 have no gradient and are not computed.

    Raises:
      UserError: the name is taken or looks like a file or a module, or `behaviour` is neither of the two.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        if name in POLICY_LOSSES:
            raise UserError(f"policy loss '{name}' is already registered; choose another name.")
        if is_place(name):
            raise UserError(f"policy loss '{name}': '.' and ':' mean files and modules; choose a name without.")
        if behaviour not in ("trainer", "rollout"):
            raise UserError(f"policy loss '{name}': behaviour must be 'trainer' or 'rollout', got '{behaviour}'.")
        POLICY_LOSSES[name] = PolicyLoss(function, behaviour, extra_term)
        return function

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """The loss of a registered name, or of `FILE.py:function` or `package.module.function`.

    A function that its file registers under another name keeps what it was registered with.

    Raises:
      UserError: an unknown name (with the list), or a place where there is no such function.
    """
    if name not in POLICY_LOSSES and is_place(name):
        function = load_function(name, "algorithm.policy_loss_fn")
        found = [each for each in POLICY_LOSSES.values() if each.function is function]
        POLICY_LOSSES[name] = found[0] if found else PolicyLoss(function, "trainer", True)
    if name not in POLICY_LOSSES:
        known = [each for each in POLICY_LOSSES if not is_place(each)]
        raise UserError(
            f"algorithm.policy_loss_fn: unknown loss '{name}'. {nearest(name, known)} "
            "Your own is written as path/to/file.py:function."
        )
    return POLICY_LOSSES[name]


def loss_parameters(name: str) -> dict[str, Any]:
    """What the loss reads, with its defaults."""
    return own_parameters(find_policy_loss(name).function, frozenset())


def log_ratio(logprobs: Tokens, other: Tokens, mask: Array) -> Tokens:
    """`logprobs - other`, 0 where masked (before any `exp`) and clamped to +-20."""
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
    """`max(-rho A, -clip(rho, 1 - epsilon, 1 + epsilon_high) A)`, `rho = pi / pi_old` (PPO, arXiv 1707.06347).

    `epsilon_high` unset equals `epsilon`. `epsilon_c` set bounds the loss by `-epsilon_c A` where `A < 0` (dual clip,
    arXiv 1912.09729). With one update per rollout `rho` is 1 and the gradient is REINFORCE's.
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
    """`-A log pi`, no ratio: for rollouts of the current policy, one update each."""
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
    """`ppo_clip` of the completion's geometric mean ratio `s = exp(mean_t log rho_t)` (GSPO, arXiv 2507.18071), in the
    per-token form `s_t = sg(s) pi / sg(pi)`, so that every token's gradient carries the completion's ratio."""
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
    """`-sg(clip(rho, 1 - epsilon, 1 + epsilon_high)) A log pi` (CISPO, arXiv 2506.13585): the weight is clipped, the
    gradient of no token is lost."""
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
    """`-A rho` with `rho = pi / mu`, `mu` the sampler's probability; a token is dropped where `A > 0` and
    `pi - mu > dppo_mask_high`, or `A <= 0` and `pi - mu < -dppo_mask_low` (differences of probabilities). Plus
    `kl_tau (log pi - log mu)^2` on every token (DPPO, arXiv 2602.04879)."""
    difference = log_ratio(logprobs, rollout_logprobs, mask)
    ratio = jnp.exp(difference)
    moved = jax.lax.stop_gradient(
        jnp.exp(jnp.where(mask, logprobs, 0.0)) - jnp.exp(jnp.where(mask, rollout_logprobs, 0.0))
    )
    dropped = jnp.where(advantages > 0, moved > dppo_mask_high, moved < -dppo_mask_low)
    loss = jnp.where(dropped, 0.0, -ratio * advantages) + kl_tau * difference**2
    return loss, {"pg_clipfrac": dropped.astype(jnp.float32), "is_ratio/mean": ratio}


def sampler_correction(
    mode: str, old_logprobs: Tokens, rollout_logprobs: Tokens, mask: Array, threshold: float
) -> Tokens:
    """Truncated importance weights `min(pi_old / mu, threshold)` of the trainer's old probabilities over the sampler's,
    detached: of each `token`, or of the whole `sequence` (the product over its tokens) at each of its tokens."""
    if mode == "token":
        log_weight = log_ratio(old_logprobs, rollout_logprobs, mask)
    else:
        total = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0).sum(axis=-1, keepdims=True)
        log_weight = jnp.where(mask, jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_weight), threshold))


def kl_estimate(mode: str, logprobs: Tokens, ref_logprobs: Tokens, mask: Array) -> Tokens:
    """Estimates the KL per token, with `d = log pi - log pi_ref` (clamped to +-20): `kl` = k1 = `d`, `mse_kl` = k2 =
    `d^2/2`, `low_var_kl` = k3 = `exp(-d) + d - 1`.

    As an on-policy loss each has the expected gradient of a KL of the next-token distributions at the sampled prefixes:
    k1 none, k2 KL(pi || ref), k3 KL(ref || pi). None of them is the gradient of the KL of whole completions, because
    the loss ignores how a token changes later prefixes; k1 in the reward is.
    """
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
    hidden: Float[Array, "A N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "A N"],
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    cap: float | None = None,
) -> tuple[Float[Array, "A N"], Float[Array, "A N"]]:
    """`log_softmax(hidden @ head / temperature)` at the targets, and its entropy (detached unless `entropy_gradient`),
    both in nats. With `cap`, logits become `cap tanh(logits / cap)` before the temperature.

    Tokens go through in pieces of about `chunk` that are recomputed in the backward pass: `[A, N, V]` never exists
    whole, forward or backward. Every piece has as many tokens of each lane, so that devices which hold lanes each work
    on their own.
    """

    @jax.checkpoint
    def one(hidden: Array, targets: Array) -> tuple[Array, Array]:
        # Rounded here and not before: the gradients of the pieces are then added up in the dtype of the weights.
        logits = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) / temperature
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - normaliser
        seen, seen_normaliser = (
            (logits, normaliser) if entropy_gradient else jax.lax.stop_gradient((logits, normaliser))
        )
        return chosen, seen_normaliser - (jax.nn.softmax(seen, axis=-1) * seen).sum(axis=-1)

    lanes, count = targets.shape
    pieces = min(count, -(-lanes * count // chunk))
    if pieces == 1:
        return one(hidden, targets)
    even = -(-count // pieces)
    pad = pieces * even - count
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(lanes, pieces, even, -1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(lanes, pieces, even)
    found = jax.lax.map(lambda xs: one(*xs), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    chosen, entropy = (x.swapaxes(0, 1).reshape(lanes, -1)[:, :count] for x in found)
    return chosen, entropy
