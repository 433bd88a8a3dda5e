"""What an evaluation's counts say: pass@k, majority votes, bootstrap intervals. Axes: `N` problems, `n` completions.

It knows numpy alone: no model, no text, no file.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

SUBSETS = 1000
"""A vote is taken over all subsets of k completions where there are no more than these, else over so many drawn."""

RESAMPLES = 2000
LEVEL = 0.95
_CELLS = 1 << 22  # of one block of resampled counts: 32 MB


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


def intervals(values: Mapping[str, Float[np.ndarray, "N"]]) -> dict[str, tuple[float, float]]:
    """95 % intervals of the means over problems: percentile bootstrap, problems drawn with replacement, NaN left out.

    Args:
      values: of each problem, by name; all are resampled alike, with the same seed at every call.

    Returns:
      low and high by name; NaN where fewer than two problems have a value.
    """
    names, size = list(values), len(next(iter(values.values()), ()))
    if not size:
        return {}
    table = np.stack([values[name] for name in names], axis=1)
    known = ~np.isnan(table)
    sums, rng, means = np.where(known, table, 0.0), np.random.default_rng(0), []
    block = max(1, _CELLS // size)
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        drawn = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)
        number = counts @ known
        means.append(np.where(number > 0, counts @ sums / np.maximum(number, 1), np.nan))
    found, tails = np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    enough = known.sum(axis=0) >= 2
    return {
        name: (float(low), float(high))
        for i, name in enumerate(names)
        for low, high in [np.nanquantile(found[:, i], tails) if enough[i] else (math.nan, math.nan)]
    }
