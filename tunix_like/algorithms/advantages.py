"""Defines the advantage estimators. Each estimator maps the rewards of whole groups to one advantage per completion.

The estimators are pure functions of arrays and are traced inside the training step. They assume a loss that takes the
mean over a group of `G` completions, `-(1/G) sum_i A_i log pi(y_i | x)`.

Notation: `r_i` are the rewards of a group's `n` scored completions, and `m` is the mean of these rewards. `p` is the
pass rate of the prompt, and max@k is the expected maximum reward of `k` completions. Unscored completions get advantage
0 and do not affect the other completions. In a group with too few scored completions, all advantages are 0. In a group
of equal rewards, all advantages are exactly 0, even if `m` is rounded; only `reinforce_pp`, and `pkpo` with k = 1, give
such a group other advantages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.mixtures import power_coefficients, rank_weights
from tunix_like.algorithms.order_statistics import (
    GivenTable,
    Table,
    above_average,
    leave_two_out_table,
    marginal_table,
    order_statistic_table,
    spread,
    subset_table,
    weighted,
)
from tunix_like.algorithms.registry import (
    Params,
    check_parameters,
    check_rewards,
    find_estimator,
    float32_rewards,
    is_number,
    register_advantage_estimator,
)
from tunix_like.errors import UserError
from tunix_like.tasks.results import LARGEST_REWARD

Rewards = Float[Array, "P G"]
Scored = Bool[Array, "P G"]
Lengths = Int[Array, "P G"]


def _centred(rewards: Rewards, scored: Scored) -> tuple[Array, Array, Array, Array]:
    """Returns, for each group: the rewards minus their mean (0 for unscored completions), the mean, the number of
    scored rewards, and whether two scored rewards differ.

    Unscored rewards do not count in the mean. The largest reward of a group is subtracted from all its rewards before
    the rewards are centred. This does not change the result, but avoids rounding errors, which would be 1e-4 for
    rewards near 1000. The returned mean is computed from the original rewards, because a mean of 0.001 would lose
    digits if it were computed as 1 - 0.999.
    """
    group = spread(rewards, scored)
    divisor = jnp.maximum(group.scored, 1)
    shifted = jnp.where(scored, rewards - group.top, 0.0)
    centred = jnp.where(scored & group.signal, shifted - shifted.sum(axis=-1, keepdims=True) / divisor, 0.0)
    mean = jnp.where(scored, rewards, 0.0).sum(axis=-1, keepdims=True) / divisor
    return centred, mean, group.scored, group.signal


def _check_ddof(params: Params, size: int) -> None:
    if params.get("ddof", 1) not in (0, 1):
        raise UserError(f"ddof: got {params['ddof']!r}; 'grpo' needs 0 or 1.")


@register_advantage_estimator("grpo", zero_when_constant=True, check=_check_ddof, offset_free=True)
def grpo(rewards: Rewards, *, scored: Scored, lengths: Lengths, ddof: int = 1) -> Rewards:
    """Standardises rewards per group: `(r_i - m) / (std + 1e-6)` (GRPO, arXiv 2402.03300).

    `m` and `std` are the mean and the standard deviation of the group's `n` scored rewards `r_i`. With `ddof=1` the sum
    of squared deviations is divided by `n - 1`, with `ddof=0` by `n`. The expected gradient is not the gradient of the
    expected reward. For 0/1 rewards with pass rate `p` it is `w(p) grad p`, where `w(p)` tends to `1 / sqrt(p (1 - p))`
    for large groups.
    """
    centred, _, count, signal = _centred(rewards, scored)
    variance = (centred**2).sum(axis=-1, keepdims=True) / jnp.maximum(count - ddof, 1)
    deviation = jnp.sqrt(jnp.where(signal, variance, 1.0))
    return jnp.where(signal, centred / (deviation + 1e-6), 0.0)


@register_advantage_estimator("drgrpo", zero_when_constant=True, offset_free=True)
def drgrpo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Centres rewards per group: `r_i - m` (Dr. GRPO, arXiv 2503.20783).

    `m` is the mean of the rewards `r_i` of a group. With `G` completions per group, the expected gradient is `(G-1)/G`
    times the gradient of the expected reward.
    """
    return _centred(rewards, scored)[0]


@register_advantage_estimator("rloo", zero_when_constant=True, offset_free=True)
def rloo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Subtracts a leave-one-out baseline: `r_i - mean_{j != i} r_j` (RLOO, arXiv 2402.14740).

    `r_i` are the rewards of a group. The expected gradient is the gradient of the expected reward.
    """
    centred, _, count, _ = _centred(rewards, scored)
    return centred * (count / jnp.maximum(count - 1, 1))


def _maxrl_table(size: int, *, truncation_order: int) -> Table:
    return leave_two_out_table(size, (1.0,) * truncation_order)


@register_advantage_estimator(
    "maxrl",
    zero_when_constant=True,
    takes=lambda params: "non-negative" if params.get("truncation_order") is None else "any",
    headroom={"truncation_order": 1},
    table=_maxrl_table,
    offset_free=lambda params: params.get("truncation_order") is not None,
)
def maxrl(
    rewards: Rewards,
    *,
    scored: Scored,
    lengths: Lengths,
    truncation_order: int | None = None,
    table: GivenTable | None = None,
) -> Rewards:
    """Divides centred rewards by the mean reward: `(r_i - m) / m` if `m > 0`, else 0 (MaxRL, arXiv 2602.02710, Alg. 1).

    `m` is the mean of the rewards `r_i` of a group of `G` completions. Rewards must be non-negative. For 0/1 rewards
    with pass rate `p`, the expected gradient is `w(p) grad p` with `w(p) = (1 - (1-p)^(G-1)) / p`. This is the gradient
    of the series `log p = -sum_k (1-p)^k / k`, truncated after order `G - 1`. (The order would be `G` if the advantages
    of a group without a success were -1 instead of 0.) With `G = 2`, `w(p)` is 1, as for REINFORCE with a baseline.
    With shaped rewards (for example 0.1 for the format), `m > 0` can occur without a success.

    With `truncation_order = T` in `1..G-1` the advantage is `sum_{k<=T} L_k`. `L_k` is the mean of the maximum reward
    over the subsets of `k` completions that contain the completion, minus this mean over the subsets without it. The
    rewards can then be any real numbers. The expected gradient is the gradient of `sum_{k<=T} max@k / k`, where max@k
    is the expected maximum reward of `k` completions.
    """
    if table is None and truncation_order is not None:
        table = _maxrl_table(rewards.shape[-1], truncation_order=truncation_order)
    if table is not None:
        return weighted(rewards, scored, table)
    centred, mean, _, signal = _centred(rewards, scored)
    positive = signal & (mean > 0)
    return jnp.where(positive, centred / jnp.where(positive, mean, 1.0), 0.0)


def _maxpo_table(size: int, *, k: int) -> Table:
    return leave_two_out_table(size, (0.0,) * (k - 1) + (float(k),))


@register_advantage_estimator(
    "maxpo",
    zero_when_constant=True,
    headroom={"k": 1},
    scored_beyond_k=1,
    sparse=True,
    table=_maxpo_table,
    offset_free=True,
)
def maxpo(rewards: Rewards, *, scored: Scored, lengths: Lengths, k: int, table: GivenTable | None = None) -> Rewards:
    """Computes the Leave-Two-Out advantage times k: `k L_k,i` with `L_k,i = q_i - V_k(-i)` (MaxPO, arXiv 2606.06080).

    `q_i` is the mean of the maximum reward over the subsets of `k` completions that contain completion `i`; `V_k(-i)`
    is this mean over the subsets without `i`. The expected gradient is the gradient of max@k, the expected maximum
    reward of `k` completions. For 0/1 rewards with pass rate `p` it is `k (1-p)^(k-1) grad p`, the gradient of pass@k.
    The advantages of a group sum to zero. `1 <= k <= G - 1` for groups of `G` completions; `k = 1` is RLOO.
    """
    return weighted(rewards, scored, _maxpo_table(rewards.shape[-1], k=k) if table is None else table)


def _pkpo_table(size: int, *, k: int) -> Table:
    if k == 1:
        raise UserError("k: 'pkpo' with k = 1 is another function of the rewards. Start the schedule at 2 or above.")
    return marginal_table(size, k)


@register_advantage_estimator(
    "pkpo",
    zero_when_constant=lambda params: params["k"] > 1,
    headroom={"k": 0},
    sparse=True,
    table=_pkpo_table,
    offset_free=lambda params: params["k"] > 1,
)
def pkpo(rewards: Rewards, *, scored: Scored, lengths: Lengths, k: int, table: GivenTable | None = None) -> Rewards:
    """Computes the marginal contribution to max@k, `k (q_i - V_{k-1}(-i))` (PKPO, arXiv 2505.15201).

    `q_i` is the mean of the maximum reward over the subsets of `k` completions that contain completion `i`;
    `V_{k-1}(-i)` is the mean of the maximum reward over the subsets of `k - 1` completions without `i`. The expected
    gradient is the gradient of max@k, the expected maximum reward of `k` completions. For 0/1 rewards with pass rate
    `p` it is `k (1-p)^(k-1) grad p`, and a failed completion gets exactly 0 if `k >= 2`. The advantages of a group do
    not sum to zero. `1 <= k <= G` for groups of `G` completions; with `k = 1`, the advantage is the reward itself. The
    result is `G` times `s_loo_minus_one` of the paper.
    """
    if table is None and k == 1:
        return jnp.where(scored & (scored.sum(axis=-1, keepdims=True) >= 2), rewards, 0.0)
    return weighted(rewards, scored, _pkpo_table(rewards.shape[-1], k=k) if table is None else table)


@register_advantage_estimator(
    "passk", zero_when_constant=True, takes="binary", headroom={"k": 1}, sparse=True, table=subset_table
)
def passk(rewards: Rewards, *, scored: Scored, lengths: Lengths, k: int, table: GivenTable | None = None) -> Rewards:
    """Computes standardised pass@k: `(q_i - V_k) / (sqrt(V_k (1 - V_k)) + 1e-6)` (pass@k training, arXiv 2508.10751).

    Rewards must be 0 or 1. `V_k` is the mean of the maximum reward over all subsets of `k` completions of the group,
    which is the unbiased estimate of pass@k. `q_i` is this mean over the subsets that contain completion `i`. As in
    GRPO, the division by a standard deviation makes the estimator biased. `1 <= k <= G - 1` for groups of `G`
    completions; with `k = G`, all advantages would be zero.
    """
    table = subset_table(rewards.shape[-1], k) if table is None else table
    above, value, shortfall = above_average(rewards, scored, table)
    deviation = jnp.sqrt(jnp.maximum(value * shortfall, 0.0))
    return above / (deviation + 1e-6)


def _check_maxk_mix(params: Params, size: int) -> None:
    alpha, coefficients = params.get("alpha"), params.get("coefficients")
    if (alpha is None) == (coefficients is None):
        raise UserError("alpha, coefficients: 'maxk_mix' needs exactly one of them. Set alpha, or a list coefficients.")
    if alpha is not None and not (is_number(alpha) and alpha >= 0):
        raise UserError(f"alpha: got {alpha!r}; 'maxk_mix' needs a number of at least 0.")
    if alpha is not None and max(power_coefficients(alpha, size - 1), default=0.0) > LARGEST_REWARD:
        raise UserError(f"alpha: got {alpha}; a coefficient of a group of {size} exceeds {LARGEST_REWARD:g}. Lower it.")
    if coefficients is not None:
        _check_numbers("coefficients", coefficients)
        if len(coefficients) > size - 1:
            raise UserError(
                f"coefficients: got {len(coefficients)}; 'maxk_mix' takes at most {size - 1}, one less than "
                f"algorithm.num_generations ({size}), because each subset leaves out one completion."
            )


def _maxk_mix_table(size: int, *, alpha: float | None = None, coefficients: Sequence[float] | None = None) -> Table:
    if alpha is not None:
        return leave_two_out_table(size, power_coefficients(alpha, size - 1))
    table = leave_two_out_table(size, tuple(map(float, coefficients or ()))).copy()
    table[: _scored_by_coefficients({"coefficients": coefficients})] = 0.0
    return table


def _scored_by_coefficients(params: Params) -> int:
    """Returns one more than the number of coefficients up to the last one that is not 0. Without its last terms, a sum
    with terms of both signs can be far from the whole; the terms of `alpha` are positive."""
    return 2 + int(max(np.flatnonzero(params.get("coefficients") or ()), default=0))


@register_advantage_estimator(
    "maxk_mix",
    zero_when_constant=True,
    table=_maxk_mix_table,
    check=_check_maxk_mix,
    least_scored=_scored_by_coefficients,
    offset_free=True,
)
def maxk_mix(
    rewards: Rewards,
    *,
    scored: Scored,
    lengths: Lengths,
    alpha: float | None = None,
    coefficients: Sequence[float] | None = None,
    table: GivenTable | None = None,
) -> Rewards:
    """Mixes Leave-Two-Out advantages: `sum_k c_k L_k,i`, `k = 1..G-1`, with `L_k,i` as in `maxpo`.

    For 0/1 rewards with pass rate `p`, the expected gradient is `w(p) grad p` with `w(p) = sum_k c_k (1-p)^(k-1)`: the
    weight can be any polynomial of degree `G - 2`. For other rewards, it is the gradient of `sum_k c_k max@k / k`. The
    advantages of a group sum to zero. In a group of `n` scored completions, terms of `alpha` with k above `n - 1` are
    left out; with `coefficients`, a group with `n` at most their number is dropped.

    `coefficients` are `c_1, c_2, ...`; missing ones are 0. `alpha` sets them to those of the series of `p^-alpha`,
    `c_k = Gamma(alpha + k - 1) / (Gamma(alpha) Gamma(k))`: 0 is RLOO, 1 is MaxRL of order `G - 1`.
    """
    if table is None:
        table = _maxk_mix_table(rewards.shape[-1], alpha=alpha, coefficients=coefficients)
    return weighted(rewards, scored, table)


def _check_order_statistic(params: Params, size: int) -> None:
    k = params["k"]
    weights = params.get("weights")
    statistic = params.get("statistic")
    if (weights is None) == (statistic is None):
        raise UserError(
            "weights, statistic: 'order_statistic' needs exactly one of them. Set a list weights, or a statistic such "
            "as median."
        )
    if weights is not None:
        _check_numbers("weights", weights)
        if len(weights) != k:
            raise UserError(
                f"weights: got {len(weights)}; 'order_statistic' needs k ({k}), for the largest reward first."
            )
    elif not isinstance(statistic, str):
        raise UserError(f"statistic: got {statistic!r}; give a name such as median.")
    else:
        rank_weights(statistic, k)


def _order_statistic_table(
    size: int, *, k: int, weights: Sequence[float] | None = None, statistic: str | None = None
) -> Table:
    ranks = rank_weights(statistic, k) if statistic is not None else tuple(map(float, weights or ()))
    return order_statistic_table(size, ranks)


@register_advantage_estimator(
    "order_statistic",
    zero_when_constant=True,
    headroom={"k": 1},
    scored_beyond_k=1,
    sparse=True,
    table=_order_statistic_table,
    check=_check_order_statistic,
    offset_free=True,
)
def order_statistic(
    rewards: Rewards,
    *,
    scored: Scored,
    lengths: Lengths,
    k: int,
    weights: Sequence[float] | None = None,
    statistic: str | None = None,
    table: GivenTable | None = None,
) -> Rewards:
    """Computes the advantage of an order statistic of k rewards: `k (inc_i - loo_i)` (OrderGrad, arXiv 2606.06096).

    The statistic is `sum_j weights_j X_(j:k)`, where `X_(1:k) >= ... >= X_(k:k)` are k sorted rewards, or the one with
    the name `statistic` (see `rank_weights`). `inc_i` is the mean of the statistic over the subsets of `k` completions
    that contain completion `i`; `loo_i` is this mean over the subsets without `i`. The expected gradient is the
    gradient of the expected statistic of `k` completions. The advantages of a group sum to zero. `1 <= k <= G - 1` for
    groups of `G` completions; weights `1, 0, ..., 0` are MaxPO.
    """
    if table is None:
        table = _order_statistic_table(rewards.shape[-1], k=k, weights=weights, statistic=statistic)
    return weighted(rewards, scored, table)


def _check_numbers(name: str, values: Any) -> None:
    if not isinstance(values, list | tuple) or not values or not all(map(is_number, values)):
        raise UserError(f"{name}: got {values!r}; give a list of finite numbers, at least one.")
    if max(map(abs, values)) > LARGEST_REWARD:
        raise UserError(f"{name}: got {values!r}; the largest magnitude is {LARGEST_REWARD:g}.")


@register_advantage_estimator("opo", zero_when_constant=True, offset_free=True)
def opo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Subtracts a length-weighted baseline: `r_i - sum_j l_j r_j / sum_j l_j` (OPO, arXiv 2505.23585).

    OPO stands for On-Policy RL with Optimal reward baseline. `r_j` are the rewards of a group and `l_j` the lengths of
    its completions in tokens. If all completions of a group are empty, the baseline is the plain mean. The baseline
    includes `r_i`, so the expected gradient has a bias of order 1/G for groups of `G` completions. With equal lengths,
    the estimator equals `drgrpo`, and only the norm of the gradient is biased. With different lengths, its direction is
    biased too, and the advantages of a group do not sum to zero.
    """
    group = spread(rewards, scored)
    weights = jnp.where(scored, lengths, 0).astype(rewards.dtype)
    weights = jnp.where(weights.sum(axis=-1, keepdims=True) > 0, weights, scored.astype(rewards.dtype))
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1.0)
    shifted = jnp.where(scored, rewards - group.top, 0.0)
    baseline = (weights * shifted).sum(axis=-1, keepdims=True)
    return jnp.where(scored & group.signal, shifted - baseline, 0.0)


@register_advantage_estimator("reinforce_pp", offset_free=True)
def reinforce_pp(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Subtracts the group's mean reward, then whitens over the batch (REINFORCE++ with group baseline, arXiv
    2501.03262).

    Whitening subtracts the mean over all tokens of the batch and multiplies by `rsqrt(var + 1e-8)`; the variance is
    divided by `tokens - 1`. A completion counts as many times as it has tokens. Groups with fewer than two scored
    completions are excluded. If the batch has fewer than two tokens, all advantages are 0. A group of equal rewards
    usually gets a small non-zero advantage, because the mean over the tokens of the batch is subtracted.
    """
    centred = _centred(rewards, scored)[0]
    kept = scored & (scored.sum(axis=-1, keepdims=True) >= 2)
    weights = jnp.where(kept, lengths, 0).astype(rewards.dtype)
    tokens = weights.sum()
    scale = jnp.maximum(jnp.abs(centred).max(), 1.0)  # the sum of squares of large rewards would overflow float32
    unit = centred / scale
    unit = unit - (weights * unit).sum() / jnp.maximum(tokens, 1.0)
    variance = (weights * unit**2).sum() / jnp.maximum(tokens - 1.0, 1.0)
    # The lower bound 1e-37 avoids underflow of the scaled 1e-8 in float32 when every token has the same large reward.
    spread_out = variance + jnp.maximum(1e-8 / scale**2, 1e-37)
    return jnp.where(kept & (tokens >= 2), unit * jax.lax.rsqrt(spread_out), 0.0)


@register_advantage_estimator("gdpo", zero_when_constant=True, by_function=True)
def gdpo(rewards: Rewards, *, scored: Scored, lengths: Lengths) -> Rewards:
    """Divides `s_i`, a sum of normalised rewards, by its standard deviation over the batch: `s_i / (std + 1e-6)` (GDPO,
    arXiv 2601.05242).

    `rewards` are the sums `s_i` of `sum_of_normalised`. `std` is that of all scored completions of the batch (divided
    by their number minus 1), without those in groups with fewer than two scored completions. The mean of `s_i` over the
    batch, which the paper subtracts, is 0, because it is 0 in every group.
    """
    centred = _centred(rewards, scored)[0]
    count = (scored & (scored.sum(axis=-1, keepdims=True) >= 2)).sum()
    scale = jnp.maximum(jnp.abs(centred).max(), 1.0)  # the sum of squares of large values would overflow float32
    unit = centred / scale
    return unit / (jnp.sqrt((unit**2).sum() / jnp.maximum(count - 1, 1)) + 1e-6 / scale)


def sum_of_normalised(
    rewards: Float[np.ndarray, "R P G"], weights: Sequence[float], scored: Bool[np.ndarray, "P G"]
) -> Float[np.ndarray, "P G"]:
    """Standardises the rewards of each of `R` reward functions per group, `(r_i - m) / (std + 1e-6)`, and adds them up,
    multiplied by `weights` (GDPO, arXiv 2601.05242).

    `m` and `std` (divided by `n - 1`) are those of the `n` scored completions of the group to which the function
    applies. A function that does not apply to a scored completion (NaN) adds nothing to its sum. The sum of an unscored
    completion is NaN, and none of its rewards counts.
    """
    total = np.where(scored, 0.0, np.nan)
    for values, weight in zip(rewards.astype(np.float64), weights, strict=True):
        known = scored & ~np.isnan(values)
        count = known.sum(axis=-1, keepdims=True)
        top = np.where(known, values, -np.inf).max(axis=-1, keepdims=True)
        width = top - np.where(known, values, np.inf).min(axis=-1, keepdims=True)
        varied = known & (width > 0)
        # Values from -1 to 0: large rewards cannot overflow, and equal rewards of any size give exactly 0.
        unit = np.where(varied, values - np.where(varied, top, 0.0), 0.0) / np.where(width > 0, width, 1.0)
        unit = np.where(varied, unit - unit.sum(axis=-1, keepdims=True) / np.maximum(count, 1), 0.0)
        deviation = np.sqrt((unit**2).sum(axis=-1, keepdims=True) / np.maximum(count - 1, 1))
        total += weight * unit / (deviation + np.where(width > 0, 1e-6 / np.where(width > 0, width, 1.0), 1.0))
    return total


def compute_advantages(rewards: Any, advantage_estimator: str, *, lengths: Any = None, **params: Any) -> np.ndarray:
    """Computes the advantages of groups of rewards with the same function that the training step uses.

    Args:
      rewards: `[G]` or `[groups, G]` numbers; NaN (or None) marks a completion that could not be scored.
      advantage_estimator: a registered name, or `FILE.py:function`.
      lengths: completion lengths in tokens, in the shape of `rewards`; defaults to ones.
      **params: the estimator's parameters, e.g. `k=4`, `truncation_order=3`, `ddof=0`, `alpha=0.5`.

    Returns:
      float32 advantages of the shape of `rewards`.

    Raises:
      UserError: the estimator or a parameter is unknown; a required parameter is missing or out of range; rewards or
        lengths have a wrong shape or wrong values; or a function of the user returns a wrong shape or a non-finite
        number.
    """
    registered = find_estimator(advantage_estimator)
    estimator = registered.function
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
    sizes = _token_counts(values.shape, lengths)
    groups = sum_of_normalised(groups[None], [1.0], scored) if registered.by_function else groups
    out = jax.jit(functools.partial(estimator, **checked))(
        jnp.asarray(float32_rewards(groups, scored, registered.offset_free(checked))),
        scored=jnp.asarray(scored),
        lengths=jnp.asarray(np.atleast_2d(sizes)),
    )
    if getattr(out, "shape", None) != groups.shape:
        raise UserError(
            f"advantage estimator '{advantage_estimator}' returned {jax.tree.map(jnp.shape, out)} for rewards of shape "
            f"{list(groups.shape)} [groups, completions]; it must return one advantage per completion."
        )
    advantages = np.where(scored, np.asarray(out, np.float32), np.float32(0.0))
    for group, sample in np.argwhere(~np.isfinite(advantages)):
        raise UserError(
            f"group {group}, completion {sample}: the advantage estimator '{advantage_estimator}' returned "
            f"{advantages[group, sample]}; it must return finite numbers."
        )
    return advantages.reshape(values.shape)


def _token_counts(shape: tuple[int, ...], lengths: Any) -> Int[np.ndarray, "..."]:
    if lengths is None:
        return np.ones(shape, np.int32)
    try:
        sizes = np.asarray(lengths)
    except ValueError as error:
        raise UserError(f"lengths: expected the shape of rewards, {list(shape)}, got {lengths!r}.") from error
    if sizes.shape != shape:
        raise UserError(f"lengths: expected the shape of rewards, {list(shape)}, got {list(sizes.shape)}.")
    if not np.issubdtype(sizes.dtype, np.integer) or (sizes < 0).any():
        raise UserError(f"lengths: expected integers >= 0 (tokens), got {lengths!r}.")
    return sizes.astype(np.int32)
