"""Tests the pass rate bins of groups against a loop over fractions, and the advantages per bin against formulas."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_like import compute_advantages
from tunix_like.algorithms.pass_rates import bins_of, count_groups, sum_advantages
from tunix_like.tasks.results import PASS_RATES


def slow_bin(passed, scored):
    """Determines the bin from the text of the bin labels."""
    known = [p for p, s in zip(passed, scored, strict=True) if s]
    if not known:
        return -1
    rate = Fraction(sum(known), len(known))
    for place, text in enumerate(PASS_RATES):
        if text in ("0", "1"):
            inside = rate == int(text)
        else:
            low, high = (Fraction(end.strip("(]) ")) for end in text.split(","))
            inside = low < rate <= high if text.endswith("]") else low < rate < high
        if inside:
            return place
    raise AssertionError(f"{rate} is in no bin")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_pass_rate_lies_in_the_interval_of_the_bin_label(group):
    passed, scored = (np.array([each], bool) for each in zip(*group, strict=True))
    assert bins_of(passed, scored).tolist() == [slow_bin(passed[0], scored[0])]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, 24])
def test_bins_of_all_pass_rates_of_a_group_size(size):
    passed = np.tri(size + 1, size, -1, dtype=bool)  # row k has k successes
    assert passed.sum(axis=1).tolist() == list(range(size + 1))
    found = bins_of(passed, np.ones_like(passed))
    assert found.tolist() == [slow_bin(row, [True] * size) for row in passed]


def test_counts_and_sums_leave_out_groups_without_a_score():
    bins = np.array([0, 9, -1, 9, 4])
    advantages = np.array([[0, 0], [1, -3], [100, 100], [0.5, 0.5], [-1, 0]])
    assert count_groups(bins) == [1, 0, 0, 0, 1, 0, 0, 0, 0, 2]
    assert sum_advantages(bins, advantages) == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 2.5]


FORMULAS = {
    "maxrl": lambda p: 2 * (1 - p),
    "grpo": lambda p: 2 * np.sqrt(p * (1 - p)),
    "drgrpo": lambda p: 2 * p * (1 - p),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_sum_of_advantages_of_one_group_matches_the_formula(name):
    """For 0/1 rewards, the value is the one that the docstring of `sum_advantages` states."""
    for successes in range(1, 16):
        rewards = np.float32(np.arange(16) < successes)[None]
        out = compute_advantages(rewards, name, **({"ddof": 0} if name == "grpo" else {}))
        (place,) = bins_of(rewards > 0, rewards >= 0)
        pull = sum_advantages(np.array([place]), np.asarray(out))
        assert pull[place] == pytest.approx(FORMULAS[name](successes / 16), rel=1e-4)
