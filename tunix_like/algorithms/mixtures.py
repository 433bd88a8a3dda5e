"""Computes the coefficients of the estimator `maxk_mix` and the rank weights of `order_statistic`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tunix_like.errors import UserError, nearest


def power_coefficients(alpha: float, count: int) -> tuple[float, ...]:
    """Returns the first coefficients of the series `p^-alpha = sum_k c_k (1-p)^(k-1)`, `k = 1..count`:
    `c_k = Gamma(alpha + k - 1) / (Gamma(alpha) Gamma(k))`, computed as a product, which is defined for alpha 0 too."""
    k = np.arange(1, count)
    with np.errstate(over="ignore"):
        return tuple(np.concatenate([[1.0], np.cumprod((alpha + k - 1) / k)])[:count].tolist())


class WeightFit(NamedTuple):
    """The result of `fit_weight`.

    Attributes:
      coefficients: `c_k` of `sum_k c_k (1-p)^(k-1)`, for `algorithm.coefficients`.
      residual: root of the mean squared difference to the given weight over the pass rates.
    """

    coefficients: list[float]
    residual: float


def fit_weight(
    weight: Callable[[float], float], group_size: int, pass_rates: Float[np.ndarray, "N"] | None = None
) -> WeightFit:
    """Fits `sum_k c_k (1-p)^(k-1)`, `k = 1..G-1`, to a population weight `w(p)` by least squares.

    `maxk_mix` with these coefficients is unbiased for the objective `F` with `F'(p) = sum_k c_k (1-p)^(k-1)`. The fit
    has the smallest coefficients if several are equally good (singular values below 1e-10 of the largest are ignored).
    Fewer coefficients (a smaller `group_size` here than in the run) give a rougher fit and less variance.

    Args:
      weight: `w(p)`, finite at every pass rate, e.g. `lambda p: min(1 / p, 8)`.
      group_size: G, at least 2.
      pass_rates: numbers in `[0, 1]` at which `w` is fitted, with equal weights; defaults to 512 evenly spaced ones.

    Raises:
      UserError: the group size is below 2, a pass rate is outside `[0, 1]`, or the weight is not a finite number.
    """
    if group_size < 2:
        raise UserError(f"group_size: got {group_size}; it must be at least 2.")
    rates = (np.arange(512) + 0.5) / 512 if pass_rates is None else np.asarray(pass_rates, np.float64).ravel()
    if not rates.size or not np.all((rates >= 0) & (rates <= 1)):
        raise UserError("pass_rates: give numbers from 0 to 1, at least one.")
    wanted = np.array([float(weight(float(rate))) for rate in rates])
    if not np.isfinite(wanted).all():
        rate = rates[~np.isfinite(wanted)][0]
        raise UserError(f"weight: it is {wanted[~np.isfinite(wanted)][0]} at pass rate {rate:g}; it must be finite.")
    basis = (1 - rates[:, None]) ** np.arange(group_size - 1)
    coefficients = np.linalg.lstsq(basis, wanted, rcond=1e-10)[0]
    residual = float(np.sqrt(np.mean((basis @ coefficients - wanted) ** 2)))
    return WeightFit(coefficients.tolist(), residual)


STATISTICS = ("top_mean:M", "upper_tail_mean:Q", "lower_tail_mean:Q", "median", "quantile:Q", "trimmed_mean:Q")
"""The names of order statistics, with their numbers."""


def rank_weights(statistic: str, k: int) -> tuple[float, ...]:
    """Returns the weights of the largest, second largest, ... of `k` rewards in a statistic.

    - `top_mean:m`: the mean of the `m` largest; `m` from 1 to `k`.
    - `upper_tail_mean:q`, `lower_tail_mean:q`: the mean of the largest or smallest `ceil(q k)`; `0 < q <= 1`.
    - `quantile:q`: linear between neighbours, as `numpy.quantile`; `0 <= q <= 1`, 1 is the maximum. `median`: q = 1/2.
    - `trimmed_mean:q`: the mean without the `floor(q k)` largest and as many smallest; `0 <= q < 1/2`.

    Raises:
      UserError: the name is unknown or the number is out of range. The message begins with `statistic`.
    """
    name, colon, word = statistic.partition(":")
    forms = {form.partition(":")[0]: form for form in STATISTICS}
    if name not in forms:
        raise UserError(f"statistic: unknown value '{statistic}'. {nearest(name, STATISTICS)}")
    number = 0.5 if name == "median" else _number(word)
    ranges = {"top_mean": number in range(1, k + 1), "trimmed_mean": 0 <= number < 0.5, "quantile": 0 <= number <= 1}
    if (name == "median" and colon) or not ranges.get(name, 0 < number <= 1):
        limits = {
            "top_mean": f"M from 1 to k ({k})",
            "trimmed_mean": "0 <= Q < 0.5",
            "quantile": "0 <= Q <= 1",
        }
        raise UserError(
            f"statistic: got '{statistic}'; write {forms[name]}"
            + ("." if name == "median" else f" with {limits.get(name, '0 < Q <= 1')}.")
        )
    weights = np.zeros(k)
    if name in ("median", "quantile"):
        place = (1 - number) * (k - 1)
        lower = min(int(place), max(k - 2, 0))
        weights[lower] += 1 - (place - lower)
        weights[min(lower + 1, k - 1)] += place - lower
    elif name == "trimmed_mean":
        cut = math.floor(number * k + 1e-9)
        weights[cut : k - cut] = 1 / (k - 2 * cut)
    else:
        count = int(number) if name == "top_mean" else max(1, math.ceil(number * k - 1e-9))
        weights[slice(k - count, k) if name == "lower_tail_mean" else slice(count)] = 1 / count
    return tuple(weights.tolist())


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
