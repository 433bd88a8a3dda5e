"""Computes histograms of groups by pass rate, the fraction of a group's completions that passed. Each bin has the
number of its groups and the sum of their mean `|advantage|`."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.tasks.results import PASS_RATES


def bins_of(passed: Bool[np.ndarray, "P G"], scored: Bool[np.ndarray, "P G"]) -> Int[np.ndarray, "P"]:
    """Returns the bin of each group, from 0 to 9, by the fraction of its scored completions that passed; -1 if no
    completion is scored."""
    successes = (passed & scored).sum(axis=1)
    count = scored.sum(axis=1)
    inner = -(-8 * successes // np.maximum(count, 1))  # integer ceiling, so that k/8 falls into the bin that ends there
    return np.where(count == 0, -1, np.where(successes == 0, 0, np.where(successes == count, 9, inner)))


def count_groups(bins: Int[np.ndarray, "P"]) -> list[int]:
    """Counts the groups in each of the ten pass-rate bins. `bins` has the bin of each group; -1 is not counted."""
    return np.bincount(bins[bins >= 0], minlength=len(PASS_RATES)).tolist()


def sum_advantages(bins: Int[np.ndarray, "P"], advantages: Float[np.ndarray, "P G"]) -> list[float]:
    """Returns, for each bin of the pass rate, the sum over its groups of their mean `|advantage|`. Unscored completions
    count with advantage 0.

    A sum divided by the number of groups in the bin is the mean `|advantage|` of a prompt with that pass rate. A sum
    divided by the sum over all bins is the share of the bin. The sums are not gradient norms: an advantage is only the
    factor by which the gradient of a completion's log-probability is multiplied. Lengths, aggregation and cancellation
    between gradients are ignored. For a group of 0/1 rewards with pass rate p, the mean `|advantage|` is `2 (1-p)`
    under MaxRL (2602.02710), `2 sqrt(p (1-p))` under GRPO with `ddof` 0, `2 p (1-p)` under Dr. GRPO, and 0 if p is 0 or
    1.
    """
    mean = np.abs(advantages.astype(np.float64)).mean(axis=1)
    return np.bincount(bins[bins >= 0], weights=mean[bins >= 0], minlength=len(PASS_RATES)).tolist()
