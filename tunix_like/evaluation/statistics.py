"""What an evaluation's counts say: pass@k, majority votes, confidence intervals.

Axes: `N` problems, `n` completions, `M` metrics. It knows numbers alone: no model, no text, no file.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betaincinv

SUBSETS = 1000
"""A vote is taken over all subsets of k completions where there are no more than these, else over so many drawn."""

DRAWS = 10_000
"""Draws of weights behind an interval; they move the level of an end, 2.5 %, by a standard error of 0.16 %."""

_TAIL = 0.025
_CELLS = 1 << 22  # of one block of weights: 32 MB


def pass_at_k(samples: Int[np.ndarray, "N"], successes: Int[np.ndarray, "N"], k: int) -> Float[np.ndarray, "N"]:
    """Of each problem the unbiased estimate `1 - C(n-c, k) / C(n, k)` (Chen et al., arXiv 2107.03374), `c` of whose `n`
    completions succeed; NaN where `n < k`."""
    failing, left = np.ones(len(samples)), samples - successes
    for i in range(k):
        failing = failing * np.maximum(left - i, 0) / np.maximum(samples - i, 1)
    return np.where(samples >= k, 1.0 - failing, np.nan)


def maj_at_k(votes: Sequence[Hashable], successes: Float[np.ndarray, "n"], k: int) -> float:
    """The expected success of a majority vote among `k` of a problem's completions.

    The answer given most often wins, and counts as much as the share of the completions with that answer that succeed.
    Of answers that are tied each wins equally often, which is what taking the one that was drawn first comes to. None
    is no vote; where nobody votes the vote fails. The expectation is over all subsets of `k`, or over `SUBSETS` of
    them, which are the same at every call.

    Returns:
      between 0 and 1; NaN for fewer than `k` completions.
    """
    if len(votes) < k:
        return math.nan
    answers = list(dict.fromkeys(vote for vote in votes if vote is not None))
    if not answers:
        return 0.0
    gave = np.array([[vote == answer for answer in answers] for vote in votes], np.float32)
    right = successes @ gave / gave.sum(axis=0)
    counts = _subsets(len(votes), k) @ gave
    most = counts.max(axis=1, keepdims=True)
    tied = (counts == most) & (most > 0)
    return float(((tied @ right) / np.maximum(tied.sum(axis=1), 1)).mean())


@functools.lru_cache(maxsize=64)
def _subsets(samples: int, k: int) -> Float[np.ndarray, "subsets n"]:
    """Which completions are in which subset, as 0 and 1."""
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
    """`pass@k` and `maj@k` for each k, and `avg@n`, the mean reward, of each problem. Unscored completions (NaN) are
    left out; where none or fewer than k are left the value is NaN, as is maj@k of a problem without votes (None)."""
    known = ~np.isnan(rewards)
    scored, hits = known.sum(axis=1), (known & successes).sum(axis=1)
    values = {f"pass@{k}": pass_at_k(scored, hits, k) for k in ks}
    total = np.where(known, rewards, 0.0).sum(axis=1)
    values[f"avg@{rewards.shape[1]}"] = np.where(scored > 0, total / np.maximum(scored, 1), np.nan)
    if all(each is None for each in votes):
        return values

    def vote(row: int, k: int) -> float:
        given = votes[row]
        if given is None:
            return math.nan
        own = [answer for answer, counts in zip(given, known[row], strict=True) if counts]
        return maj_at_k(own, successes[row, known[row]].astype(np.float64), k)

    return values | {f"maj@{k}": np.array([vote(row, k) for row in range(len(rewards))]) for k in ks}


def mean_known(values: Float[np.ndarray, "N"]) -> float:
    """The mean of what is not NaN; NaN where nothing is left."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def value_ranges(names: Iterable[str], rewards: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest value that a problem can have, for each metric of `problem_values` by its name.

    Args:
      names: of the metrics. pass@k and maj@k lie between 0 and 1.
      rewards: arrays of any shape, NaN left out. avg@n lies between the smallest and the largest of them and of 0;
        `rewards.success_threshold` belongs among them, as it is a reward that can be had.
    """
    each = np.concatenate([[0.0], *(np.ravel(array) for array in rewards)])
    seen = float(np.nanmin(each)), float(np.nanmax(each))
    return {name: seen if name.startswith("avg@") else (0.0, 1.0) for name in names}


def intervals(
    values: Mapping[str, Float[np.ndarray, "N"]], ranges: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals of the means over problems, which hold for rare events and for few problems too.

    The low end is the 2.5 % quantile of the weighted mean of the values and of one more value at the low end of the
    range, over weights from the Dirichlet distribution whose parameters are all 1; the high end is the 97.5 % quantile
    with one more value at the high end of the range (Gaffke, Mathematical Methods of Statistics 14, 2005;
    Learned-Miller and Thomas, arXiv 1905.06208). For values at the ends of the range this is the interval of Clopper
    and Pearson, which is computed without draws and whose coverage is at least nominal. For other values that is a
    conjecture of these authors; the tests simulate it.

    Args:
      values: of each problem, by name; NaN left out. The weights are the same for all names and at every call.
      ranges: the smallest and the largest value that a problem can have, by name.

    Returns:
      low and high by name; NaN where fewer than two problems have a value.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, each in values.items():
        own, (low, high) = each[~np.isnan(each)], ranges[name]
        if own.size < 2:
            found[name] = math.nan, math.nan
        elif low < high and np.isin(own, (low, high)).all():
            exact = _clopper_pearson(int((own == high).sum()), own.size)
            found[name] = low + (high - low) * exact[0], low + (high - low) * exact[1]
    others = [name for name in values if name not in found]
    if others:
        table = np.stack([values[name] for name in others], axis=1)
        ends = _weighted_quantiles(table, np.array([ranges[name] for name in others], np.float64).T)
        found |= {name: (float(low), float(high)) for name, (low, high) in zip(others, ends.T, strict=True)}
    return {name: found[name] for name in values}


def _weighted_quantiles(table: Float[np.ndarray, "N M"], ends: Float[np.ndarray, "2 M"]) -> Float[np.ndarray, "2 M"]:
    """The ends of `M` intervals by `DRAWS` draws of weights; `ends` are the smallest and the largest values."""
    known = ~np.isnan(table)
    values, size, rng = np.where(known, table, 0.0), len(table), np.random.default_rng(0)
    means: list[Float[np.ndarray, "2 rows M"]] = []
    block = max(1, _CELLS // (size + 1))
    for start in range(0, DRAWS, block):
        weights = rng.standard_exponential((min(block, DRAWS - start), size + 1))  # over their sum: Dirichlet
        own, extra = weights[:, :-1], weights[:, -1:]
        means.append((own @ values + extra * ends[:, None]) / (own @ known.astype(np.float64) + extra))
    low, high = np.concatenate(means, axis=1)
    return np.stack([np.quantile(low, _TAIL, axis=0), np.quantile(high, 1 - _TAIL, axis=0)])


def _clopper_pearson(ones: int, number: int) -> tuple[float, float]:
    """The exact interval of a share, of which `ones` of `number` were seen."""
    low = betaincinv(ones, number - ones + 1, _TAIL) if ones else 0.0
    high = betaincinv(ones + 1, number - ones, 1 - _TAIL) if ones < number else 1.0
    return float(low), float(high)
