"""Groups by pass rate: how many there are, and how much of the advantage is theirs.

It knows rewards and advantages as arrays of groups; it knows no estimator, no model and no file.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

PASS_RATES = ("0", "(0, 1/8]", *(f"({i}/8, {i + 1}/8]" for i in range(1, 7)), "(7/8, 1)", "1")
"""The bins, named by the pass rates `k/n` that fall into them: none passed, eight of equal width, all passed."""


def bins_of(passed: Bool[np.ndarray, "P G"], scored: Bool[np.ndarray, "P G"]) -> Int[np.ndarray, "P"]:
    """The bin of each group, by the share of its scored completions that passed; -1 where none is scored."""
    successes, count = (passed & scored).sum(axis=1), scored.sum(axis=1)
    inner = -(-8 * successes // np.maximum(count, 1))  # rounded up in integers, so that k/8 itself stays below the edge
    return np.where(count == 0, -1, np.where(successes == 0, 0, np.where(successes == count, 9, inner)))


def count_groups(bins: Int[np.ndarray, "P"]) -> list[int]:
    """Groups in each of the ten bins."""
    return np.bincount(bins[bins >= 0], minlength=len(PASS_RATES)).tolist()


def sum_advantages(bins: Int[np.ndarray, "P"], advantages: Float[np.ndarray, "P G"]) -> list[float]:
    """Sum over the groups of each bin of their mean `|advantage|` (0 where unscored).

    Divided by the bin's groups it says how much one prompt of that pass rate pulls, divided by the sum over the bins
    which share of the pull is theirs. It is no norm of a gradient: it sums up the factors that the gradients of the
    completions' log-probabilities have, and lengths, aggregation and how gradients add up are left out. A group of 0/1
    rewards and pass rate p has `2 (1-p)` under MaxRL (2602.02710), `2 sqrt(p (1-p))` under GRPO with `ddof` 0 and
    `2 p (1-p)` under Dr. GRPO; nothing where p is 0 or 1.
    """
    mean = np.abs(advantages.astype(np.float64)).mean(axis=1)
    return np.bincount(bins[bins >= 0], weights=mean[bins >= 0], minlength=len(PASS_RATES)).tolist()
