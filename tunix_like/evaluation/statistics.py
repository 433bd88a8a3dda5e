"""Computes pass@k, majority votes and confidence intervals of evaluations.

Axes: `N` problems, `n` completions, `M` metrics.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

SUBSETS = 1000
"""Maximum number of subsets of k completions over which maj@k is averaged. If a problem has more subsets, `SUBSETS`
random subsets are used."""

DRAWS = 10_000
"""Number of random weight vectors per confidence interval. With this number, the probability of 2.5 % beyond each end
of an interval has a standard error of 0.16 percentage points."""

_TAIL = 0.025
_CELLS = 1 << 22  # maximum number of weights per block (32 MB)


def pass_at_k(samples: Int[np.ndarray, "N"], successes: Int[np.ndarray, "N"], k: int) -> Float[np.ndarray, "N"]:
    """Computes the unbiased pass@k estimate `1 - C(n-c, k) / C(n, k)` of each problem (Chen et al., arXiv 2107.03374).

    `c` of the `n` completions succeed. The result is NaN if `n < k`.
    """
    failing = np.ones(len(samples))
    left = samples - successes
    for i in range(k):
        failing = failing * np.maximum(left - i, 0) / np.maximum(samples - i, 1)
    return np.where(samples >= k, 1.0 - failing, np.nan)


def maj_at_k(votes: Sequence[Hashable], successes: Float[np.ndarray, "n"], k: int) -> float:
    """Computes the expected success of a majority vote among `k` of a problem's completions.

    The most frequent answer wins. The success of an answer is the fraction of successful completions among all
    completions with this answer. Tied answers win with equal probability. A completion without an answer has no vote. A
    subset without votes has success 0. The expectation is over all subsets of `k` completions. If there are more than
    `SUBSETS` subsets, `SUBSETS` random subsets are used, which are the same in every call. The result is NaN for fewer
    than `k` completions.
    """
    if len(votes) < k:
        return math.nan
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    if not answers:
        return 0.0
    one_hot = np.array([[vote == answer for answer in answers] for vote in votes], np.float32)
    right = successes @ one_hot / one_hot.sum(axis=0)
    counts = _subsets(len(votes), k) @ one_hot
    most = counts.max(axis=1, keepdims=True)
    tied = (counts == most) & (most > 0)
    return float(((tied @ right) / np.maximum(tied.sum(axis=1), 1)).mean())


@functools.lru_cache(maxsize=64)
def _subsets(samples: int, k: int) -> Float[np.ndarray, "subsets n"]:
    """Returns one row per subset of `k` of the `samples` completions: 1 for completions in the subset, otherwise 0."""
    if math.comb(samples, k) <= SUBSETS:
        rows = np.array(list(itertools.combinations(range(samples), k)))
    else:
        rows = np.random.default_rng(0).random((SUBSETS, samples)).argsort(axis=1)[:, :k]
    members = np.zeros((len(rows), samples), np.float32)
    np.put_along_axis(members, rows, 1.0, axis=1)
    return members


def problem_values(
    rewards: Float[np.ndarray, "N n"],
    successes: Bool[np.ndarray, "N n"],
    votes: Sequence[Sequence[Hashable] | None],
    ks: Sequence[int],
) -> dict[str, Float[np.ndarray, "N"]]:
    """Computes `pass@k` and `maj@k` for each k of `ks`, and `avg@n` (the mean reward), of each problem.

    Unscored completions (reward NaN) are excluded. pass@k and maj@k are NaN if fewer than k completions of a problem
    are scored. avg@n is NaN if no completion is scored.

    Args:
      votes: the answers of the completions of each problem. If they are None for a problem, its maj@k is NaN. If they
        are None for all problems, the result has no maj@k.
    """
    known = ~np.isnan(rewards)
    scored = known.sum(axis=1)
    hits = (known & successes).sum(axis=1)
    values = {f"pass@{k}": pass_at_k(scored, hits, k) for k in ks}
    total = np.where(known, rewards, 0.0).sum(axis=1)
    values[f"avg@{rewards.shape[1]}"] = np.where(scored > 0, total / np.maximum(scored, 1), np.nan)
    if all(answers is None for answers in votes):
        return values

    def vote(row: int, k: int) -> float:
        answers = votes[row]
        if answers is None:
            return math.nan
        counted = [answer for answer, is_scored in zip(answers, known[row], strict=True) if is_scored]
        return maj_at_k(counted, successes[row, known[row]].astype(np.float64), k)

    return values | {f"maj@{k}": np.array([vote(row, k) for row in range(len(rewards))]) for k in ks}


def mean_known(values: Float[np.ndarray, "N"]) -> float:
    """Returns the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def value_ranges(names: Iterable[str], rewards: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Returns for each metric the smallest and the largest possible value of a problem: 0 and 1 for pass@k and maj@k;
    for avg@n (the mean reward), the smallest and the largest number among 0 and `rewards` (arrays of any shape; NaN is
    ignored), to which the caller adds `rewards.success_threshold`, a possible reward."""
    flat = np.concatenate([[0.0], *(np.ravel(array) for array in rewards)])
    seen = float(np.nanmin(flat)), float(np.nanmax(flat))
    return {name: seen if name.startswith("avg@") else (0.0, 1.0) for name in names}


def intervals(
    values: Mapping[str, Float[np.ndarray, "N"]], ranges: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Computes 95 % confidence intervals of means over problems. The intervals are also valid for rare events.

    For the low end, the lowest possible value is appended to the list of values. The weighted mean of this list is
    computed with random weights from the Dirichlet distribution whose parameters are all 1. The low end is the 2.5 %
    quantile of this mean. For the high end, the highest possible value is appended instead, and the quantile is 97.5 %
    (Gaffke, Mathematical Methods of Statistics 14, 2005; Learned-Miller and Thomas, arXiv 1905.06208). The random
    weights are the same for all metrics and calls.

    If every value is the lowest or the highest possible value, the Clopper-Pearson interval is computed instead. Its
    coverage is proven to be at least 95 %. For other values, a coverage of at least 95 % is a conjecture of the authors
    above. The tests check the coverage by simulation.

    Args:
      values: for each metric, the value of each problem; NaN is ignored.
      ranges: for each metric, the smallest and the largest possible value of a problem.

    Returns:
      for each metric, both ends; NaN if fewer than two problems have a value.
    """
    out: dict[str, tuple[float, float]] = {}
    for name, per_problem in values.items():
        known = per_problem[~np.isnan(per_problem)]
        low, high = ranges[name]
        if known.size < 2:
            out[name] = math.nan, math.nan
        elif low < high and np.isin(known, (low, high)).all():
            exact = _clopper_pearson(int((known == high).sum()), known.size)
            out[name] = low + (high - low) * exact[0], low + (high - low) * exact[1]
    others = [name for name in values if name not in out]
    if others:
        table = np.stack([values[name] for name in others], axis=1)
        ends = _weighted_quantiles(table, np.array([ranges[name] for name in others], np.float64).T)
        out |= {name: (float(low), float(high)) for name, (low, high) in zip(others, ends.T, strict=True)}
    return {name: out[name] for name in values}


def _weighted_quantiles(table: Float[np.ndarray, "N M"], ends: Float[np.ndarray, "2 M"]) -> Float[np.ndarray, "2 M"]:
    """Computes the ends of the confidence intervals of `M` metrics (see `intervals`) with `DRAWS` random vectors of
    problem weights. `ends` has the lowest and the highest possible value of each metric."""
    known = ~np.isnan(table)
    values = np.where(known, table, 0.0)
    size = len(table)
    rng = np.random.default_rng(0)
    means: list[Float[np.ndarray, "2 rows M"]] = []
    block = max(1, _CELLS // (size + 1))
    for start in range(0, DRAWS, block):
        weights = rng.standard_exponential((min(block, DRAWS - start), size + 1))  # Dirichlet after normalisation
        inner = weights[:, :-1]
        extra = weights[:, -1:]
        means.append((inner @ values + extra * ends[:, None]) / (inner @ known.astype(np.float64) + extra))
    low, high = np.concatenate(means, axis=1)
    return np.stack([np.quantile(low, _TAIL, axis=0), np.quantile(high, 1 - _TAIL, axis=0)])


def _clopper_pearson(ones: int, number: int) -> tuple[float, float]:
    """Returns the exact (Clopper-Pearson) 95 % interval of a proportion, given `ones` successes in `number` trials."""
    from scipy.special import betaincinv  # imported here, because the import takes 0.15 s

    low = betaincinv(ones, number - ones + 1, _TAIL) if ones else 0.0
    high = betaincinv(ones + 1, number - ones, 1 - _TAIL) if ones < number else 1.0
    return float(low), float(high)
