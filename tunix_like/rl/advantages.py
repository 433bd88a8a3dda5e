"""Advantage estimators: the rewards of whole groups to one advantage per completion.

Pure functions of arrays, traced inside the training step. All are meant for a loss that takes the mean over the group,
`-(1/G) sum_i A_i log pi(y_i | x)`. `r_i` are the rewards of a group's `n` scored completions, `m` their mean. Unscored
completions get 0 and take no part; a group with too few scored completions gets zeros, and so does a constant group,
exactly, whatever the rounding of its mean. This module knows no model, no loss and no host.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix_like.errors import UserError, nearest
from tunix_like.types import AdvantageEstimator

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
"""Name to estimator: what `algorithm.advantage_estimator` may say."""

ZERO_WHEN_CONSTANT: set[str] = set()
"""Estimators that give a constant group zeros: it can be left out of the compute without changing the gradient."""

LARGEST_REWARD = 1e15
"""Rewards beyond this are refused on the host: their squares would leave float32."""

Rewards = Float[Array, "P G"]
Scored = Bool[Array, "P G"]
Lengths = Int[Array, "P G"]


def register_advantage_estimator(
    name: str, *, zero_when_constant: bool = False
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Makes an estimator known under `name`; it is traced into the same compiled step as the built-in ones.

    Its keyword-only parameters beyond `scored` and `lengths` are read from the config's keys of the same name. With
    `zero_when_constant` it promises zeros for a group whose scored rewards are all equal, so that such groups need not
    go through the model.

    Raises:
      UserError: the name is taken.
    """

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        if name in ADVANTAGE_ESTIMATORS:
            raise UserError(f"advantage estimator '{name}' is already registered; choose another name.")
        ADVANTAGE_ESTIMATORS[name] = function
        if zero_when_constant:
            ZERO_WHEN_CONSTANT.add(name)
        return function

    return register


def find_estimator(name: str) -> AdvantageEstimator:
    """The registered estimator. Raises UserError with the list of names."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise UserError(
            f"algorithm.advantage_estimator: unknown estimator '{name}'. {nearest(name, ADVANTAGE_ESTIMATORS)}"
        )
    return ADVANTAGE_ESTIMATORS[name]


def own_parameters(function: Callable[..., Any], given: frozenset[str]) -> dict[str, Any]:
    """The keyword-only parameters a function declares beyond those `given` by its caller, with their defaults
    (`inspect.Parameter.empty` where one is required)."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}


def estimator_parameters(function: AdvantageEstimator) -> dict[str, Any]:
    return own_parameters(function, frozenset({"scored", "lengths"}))


def least_scored(params: dict[str, Any]) -> int:
    """Scored completions below which a group has no signal and is dropped: 2, or `k + 1` for an estimator of max@k."""
    return max(2, (params.get("k") or 0) + 1)


def _centred(rewards: Rewards, scored: Scored) -> tuple[Array, Array, Array, Array]:
    """`r_i - m` (0 where unscored), `m`, the group's scored count `n`, and whether the group has any signal.

    The largest reward is subtracted before the mean that centres is taken: rewards near 1000 would lose 1e-4 otherwise.
    `m` itself is the plain mean: adding the largest back would cost one rare success among 1000 its last digits.
    """
    count = scored.sum(axis=-1, keepdims=True)
    top = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=-1, keepdims=True)
    bottom = jnp.min(jnp.where(scored, rewards, jnp.inf), axis=-1, keepdims=True)
    signal = (count >= 2) & (top > bottom)
    divisor = jnp.maximum(count, 1)
    shifted = jnp.where(scored, rewards - jnp.where(count > 0, top, 0.0), 0.0)
    centred = jnp.where(scored & signal, shifted - shifted.sum(axis=-1, keepdims=True) / divisor, 0.0)
    mean = jnp.where(scored, rewards, 0.0).sum(axis=-1, keepdims=True) / divisor
    return centred, mean, count, signal


@register_advantage_estimator("grpo", zero_when_constant=True)
def grpo(rewards: Rewards, *, scored: Scored, lengths: Lengths, ddof: int = 1) -> Rewards:
    """Group-standardised rewards, `(r_i - m) / (std + 1e-6)` (GRPO, arXiv 2402.03300).

    `ddof` 1 divides the variance by `n - 1`, 0 by `n`. Not unbiased for the pass rate: on binary rewards the expected
    gradient is `w(p) grad p` with `w` tending to `1 / sqrt(p (1 - p))` for large groups.
    """
    centred, _, count, signal = _centred(rewards, scored)
    variance = (centred**2).sum(axis=-1, keepdims=True) / jnp.maximum(count - ddof, 1)
    deviation = jnp.sqrt(jnp.where(signal, variance, 1.0))
    return jnp.where(signal, centred / (deviation + 1e-6), 0.0)


@register_advantage_estimator("drgrpo", zero_when_constant=True)
def drgrpo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Centred rewards, `r_i - m` (Dr. GRPO, arXiv 2503.20783): `(G-1)/G` times the gradient of the expected reward."""
    return _centred(rewards, scored)[0]


@register_advantage_estimator("rloo", zero_when_constant=True)
def rloo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Leave-one-out, `r_i - mean_{j != i} r_j` (RLOO, arXiv 2402.14740): unbiased for the expected reward."""
    centred, _, count, _ = _centred(rewards, scored)
    return centred * (count / jnp.maximum(count - 1, 1))


@register_advantage_estimator("maxrl", zero_when_constant=True)
def maxrl(rewards: Rewards, *, scored: Scored, lengths: Lengths, truncation_order: int | None = None) -> Rewards:
    """`(r_i - m) / m` where `m > 0`, else zeros (MaxRL, arXiv 2602.02710, Algorithm 1).

    For 0/1 rewards it is unbiased for the likelihood `log p = -sum_k (1-p)^k / k` truncated after order `G - 1`: the
    expected gradient is `w(p) grad p`, `w(p) = (1 - (1-p)^(G-1)) / p`. (Not order `G`: Algorithm 1 drops the control
    variate too when nothing succeeds.) `G = 2` is plain REINFORCE with a baseline. It assumes non-negative rewards;
    shaped ones (say 0.1 for the format) have `m > 0` without a success.

    With `truncation_order = T` in `1..G-1`: `sum_{k<=T} L_k`, `L_k` the Leave-Two-Out advantage of max@k (`maxpo`
    without its factor k): unbiased for order `T` exactly, and for any real rewards it ascends `sum_{k<=T} max@k / k`.
    """
    if truncation_order is not None:
        return _order_statistics(rewards, scored, tuple((k, 1.0) for k in range(1, truncation_order + 1)))
    centred, mean, _, signal = _centred(rewards, scored)
    positive = signal & (mean > 0)
    return jnp.where(positive, centred / jnp.where(positive, mean, 1.0), 0.0)


@register_advantage_estimator("maxpo", zero_when_constant=True)
def maxpo(rewards: Rewards, *, scored: Scored, lengths: Lengths, k: int) -> Rewards:
    """`k L_k,i` with the Leave-Two-Out advantage `L_k,i = q_i - V_k(-i)` (MaxPO, arXiv 2606.06080): unbiased for max@k.

    `q_i` is the mean maximum over the k-subsets of the group that hold `i`, `V_k(-i)` over those of the group without
    `i`. Sums to zero over every group. On 0/1 rewards the expected gradient is `k (1-p)^(k-1) grad p`, that of pass@k.
    `1 <= k <= G - 1`; `k = 1` is RLOO.
    """
    return _order_statistics(rewards, scored, ((k, float(k)),))


def _order_statistics(rewards: Rewards, scored: Scored, mixture: tuple[tuple[int, float], ...]) -> Rewards:
    """`sum over (K, c) in mixture of c L_K,i`, linear in the sorted rewards with weights known before the run.

    `A_(i) = t_i x_(i) + sum_{m > i} u_m x_(m) - sum_m w_m x_(m)`, `x` ascending with the largest subtracted.
    """
    size = rewards.shape[-1]
    _, _, count, signal = _centred(rewards, scored)
    top = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=-1, keepdims=True)
    order = jnp.argsort(jnp.where(scored, rewards, jnp.inf), axis=-1)
    in_group = jnp.arange(size)[None] < count
    ordered = jnp.where(in_group, jnp.take_along_axis(rewards, order, axis=-1) - jnp.where(count > 0, top, 0.0), 0.0)
    own, above, common = (jnp.asarray(_order_weights(size, mixture), rewards.dtype)[count[:, 0], i] for i in range(3))
    lifted = above * ordered
    later = jnp.cumsum(lifted[:, ::-1], axis=-1)[:, ::-1] - lifted
    advantages = own * ordered + later - (common * ordered).sum(axis=-1, keepdims=True)
    back = jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(scored & signal, back, 0.0)


@functools.lru_cache(maxsize=8)
def _order_weights(size: int, mixture: tuple[tuple[int, float], ...]) -> Float[np.ndarray, "N 3 G"]:
    """Rows `t, u, w` of the sorted form for every scored count `n = 0..G`; a `K > n - 1` adds nothing.

    For one K: `t_i = C(i-1,K-1)/C(n-1,K-1)`, `u_m = C(m-2,K-2)/C(n-1,K-1)`, `w_m = C(m-1,K-1)/C(n,K)`, all times
    `n/(n-K)`; products, in float64, so that nothing overflows at large groups.
    """
    table = np.zeros((size + 1, 3, size))
    for n in range(2, size + 1):
        for order, factor in mixture:
            if order > n - 1:
                continue
            scale = factor * n / (n - order)
            falling = np.arange(n, order, -1, dtype=np.float64)  # m = n .. K + 1
            t = np.concatenate([[1.0], np.cumprod((falling - order) / (falling - 1))])  # m = n .. K
            place = slice(order - 1, n)
            table[n, 0, place] += scale * t[::-1]
            table[n, 2, place] += scale * order / n * t[::-1]
            if order > 1:
                above = (order - 1) / (n - 1) * np.cumprod((falling - order) / (falling - 2))
                u = np.concatenate([[(order - 1) / (n - 1)], above])
                table[n, 1, place] += scale * u[::-1]
    return table


def compute_advantages(rewards: Any, advantage_estimator: str, *, lengths: Any = None, **params: Any) -> np.ndarray:
    """Advantages of reward groups, outside any training: the function that the training step traces.

    Args:
      rewards: `[G]` or `[groups, G]` numbers; NaN (or None) is a completion that could not be scored.
      advantage_estimator: a registered name.
      lengths: completion lengths in tokens, same shape; ones when not given.
      **params: the estimator's own, e.g. `k=4`, `truncation_order=3`, `ddof=0`.

    Returns:
      float32, the shape of `rewards`.

    Raises:
      UserError: an unknown estimator or parameter, a missing one, one out of range, rewards of another shape, or
        rewards that the estimator does not take.
    """
    estimator = find_estimator(advantage_estimator)
    try:
        values = np.asarray(rewards, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards: expected numbers of shape [G] or [groups, G], got {rewards!r}.") from error
    if values.ndim not in (1, 2) or values.size == 0:
        raise UserError(f"rewards: expected shape [G] or [groups, G], got {list(values.shape)}.")
    groups = np.atleast_2d(values)
    checked = check_parameters(advantage_estimator, params, groups.shape[1])
    scored = ~np.isnan(groups)
    check_rewards(advantage_estimator, checked, groups, scored)
    sizes = np.ones(values.shape, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if sizes.shape != values.shape:
        raise UserError(f"lengths: expected the shape of rewards, {list(values.shape)}, got {list(sizes.shape)}.")
    out = jax.jit(functools.partial(estimator, **checked))(
        jnp.asarray(np.where(scored, groups, 0.0), jnp.float32),
        scored=jnp.asarray(scored),
        lengths=jnp.asarray(np.atleast_2d(sizes)),
    )
    return np.asarray(out).reshape(values.shape)


def check_parameters(name: str, params: dict[str, Any], group_size: int) -> dict[str, Any]:
    """The estimator's parameters that are set, checked against what it declares and against the group's size."""
    declared = estimator_parameters(find_estimator(name))
    params = {key: value for key, value in params.items() if value is not None}
    for key in params:
        if key not in declared:
            reads = f"it reads {', '.join(sorted(declared))}" if declared else "it has no parameters of its own"
            raise UserError(f"algorithm.{key}: the estimator '{name}' does not read it ({reads}). Unset it.")
    for key, default in declared.items():
        if default is inspect.Parameter.empty and key not in params:
            raise UserError(f"algorithm.{key}: the estimator '{name}' needs it. Set algorithm.{key}=<value>.")
    for key in ("k", "truncation_order"):
        if key in params and name in ("maxpo", "maxrl") and not 1 <= params[key] <= group_size - 1:
            raise UserError(
                f"algorithm.{key}: got {params[key]}; '{name}' needs 1 <= {key} <= {group_size - 1}, one less than "
                f"algorithm.num_generations ({group_size}), since each subset leaves one completion out."
            )
    return params


def check_rewards(name: str, params: dict[str, Any], rewards: Float[np.ndarray, "P G"], scored: np.ndarray) -> None:
    """Value checks on the host, before the step. Raises UserError naming the first group that breaks one."""
    large = scored & (np.abs(np.where(scored, rewards, 0.0)) > LARGEST_REWARD)
    if large.any():
        group, sample = np.argwhere(large)[0]
        raise UserError(f"reward {rewards[group, sample]} (group {group}, completion {sample}) is beyond 1e15.")
    if name == "maxrl" and params.get("truncation_order") is None:
        negative = scored & (np.where(scored, rewards, 0.0) < 0)
        if negative.any():
            group, sample = np.argwhere(negative)[0]
            raise UserError(
                f"maxrl divides by the group's mean reward and takes non-negative rewards only; group {group}, "
                f"completion {sample} has {rewards[group, sample]:g}. "
                "Set algorithm.truncation_order, or give rewards >= 0."
            )
