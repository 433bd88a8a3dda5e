"""pass@k and votes against every subset, intervals against resampling one by one, and the answers that vote."""

from __future__ import annotations

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tunix_like import eval_statistics
from tunix_like.eval_statistics import intervals, maj_at_k, pass_at_k, problem_values
from tunix_like.rewards import ANSWERS
from tunix_like.rewards.math import grade, vote


def test_pass_at_k_is_a_mean_over_subsets():
    for k in range(1, 8):
        cases = [(n, c) for n in range(k, 8) for c in range(n + 1)]
        expected = [np.mean([min(rows) < c for rows in itertools.combinations(range(n), k)]) for n, c in cases]
        n, c = np.array(cases).T
        np.testing.assert_allclose(pass_at_k(n, c, k), expected, atol=1e-12)
        assert np.isnan(pass_at_k(np.array([k - 1, 0]), np.array([0, 0]), k)).all()


def test_pass_at_k_of_many_samples():
    exact = 1 - math.comb(2000, 256) / math.comb(2048, 256)
    assert pass_at_k(np.array([2048]), np.array([48]), 256)[0] == pytest.approx(exact, rel=1e-9)


def vote_by_hand(votes, successes, k):
    """Every order of every subset is drawn: of tied answers the one seen first wins."""
    right = {v: np.mean([s for w, s in zip(votes, successes, strict=True) if w == v]) for v in votes}
    won = []
    for order in itertools.permutations(range(len(votes)), k):
        seen = [votes[i] for i in order if votes[i] is not None]
        won.append(right[collections.Counter(seen).most_common(1)[0][0]] if seen else 0.0)
    return float(np.mean(won))


@pytest.mark.parametrize(
    ("votes", "successes"),
    [
        ("aabbc", [1, 1, 0, 0, 0]),
        ("aabbc", [0, 0, 1, 1, 0]),
        ("abcde", [0, 0, 0, 1, 0]),
        ("aaab", [1, 0, 1, 1]),  # one answer, other rewards: it counts two thirds
        ([None, "a", None, "b", "b"], [0, 1, 0, 0, 0]),
        ([None, None, 3], [0, 0, 1]),
        ([Fraction(1, 2), Fraction(2, 4), "x", 1], [1, 1, 0, 0]),
    ],
)
def test_a_vote_is_a_mean_over_every_order(votes, successes):
    for k in range(1, len(votes) + 1):
        expected = vote_by_hand(list(votes), successes, k)
        assert maj_at_k(list(votes), np.array(successes, float), k) == pytest.approx(expected, abs=1e-6)


def test_votes_of_many_samples():
    """More subsets than are taken: the estimate is near the exact value, the same again, and exact at both ends."""
    votes, successes, exact = list("a" * 7 + "b" * 5 + "cdef"), np.array([1.0] * 7 + [0.0] * 9), {}
    for k in (4, 8):  # against counting outcomes: answers a, b and the four single ones
        total = 0.0
        for a, b, c in itertools.product(range(8), range(6), range(5)):
            if a + b + c == k:
                ways = math.comb(7, a) * math.comb(5, b) * math.comb(4, c)
                top = max(a, b, min(c, 1))
                tied = (a == top) + (b == top) + (c if top == 1 else 0)
                total += ways * (a == top) / tied
        exact[k] = total / math.comb(16, k)
        found = maj_at_k(votes, successes, k)
        assert found == pytest.approx(exact[k], abs=4 * 0.5 / math.sqrt(eval_statistics.SUBSETS))
        assert found == maj_at_k(votes, successes, k)
    assert maj_at_k(votes, successes, 1) == pytest.approx(7 / 16) and maj_at_k(votes, successes, 16) == 1.0
    assert exact[8] > exact[4] > 7 / 16


def test_values_of_problems():
    """avg is over what was scored, a problem without votes has no maj, and unscored completions do not vote."""
    nan = math.nan
    rewards = np.array([[1, 0.5, 0, 0], [nan, nan, 1, 0], [nan] * 4, [1, 1, 0, 0]])
    votes = [["a", "b", "b", "b"], ["b", "b", "a", "a"], ["a"] * 4, None]
    found = problem_values(rewards, rewards >= 1, votes, [1, 2])
    assert list(found) == ["pass@1", "pass@2", "avg@4", "maj@1", "maj@2"]
    np.testing.assert_allclose(found["pass@1"], [1 / 4, 1 / 2, nan, 1 / 2])
    np.testing.assert_allclose(found["pass@2"], [1 / 2, 1, nan, 5 / 6])
    np.testing.assert_allclose(found["avg@4"], [1.5 / 4, 1 / 2, nan, 1 / 2])
    np.testing.assert_allclose(found["maj@1"], [1 / 4, 1 / 2, nan, nan], atol=1e-6)
    np.testing.assert_allclose(found["maj@2"], [1 / 4, 1 / 2, nan, nan], atol=1e-6)  # the two that were scored agree
    assert list(problem_values(rewards, rewards >= 1, [None] * 4, [1])) == ["pass@1", "avg@4"]


def test_intervals_are_those_of_resampling(monkeypatch):
    """Against a loop over resamples, blocks or not; the width against the normal one; what is not known."""
    rng = np.random.default_rng(3)
    values = {"x": rng.random(40), "y": np.where(rng.random(40) < 0.2, np.nan, rng.random(40))}
    found = intervals(values)
    drawn = np.random.default_rng(0).integers(40, size=(eval_statistics.RESAMPLES, 40))
    for name, each in values.items():
        means = [np.nanmean(each[rows]) for rows in drawn]
        np.testing.assert_allclose(found[name], np.quantile(means, [0.025, 0.975]), rtol=1e-9)
        known = each[~np.isnan(each)]
        width = 2 * 1.96 * known.std() / math.sqrt(len(known))
        assert np.diff(found[name])[0] == pytest.approx(width, rel=0.1)
    monkeypatch.setattr(eval_statistics, "_CELLS", 40 * 7)
    np.testing.assert_allclose(list(intervals(values).values()), list(found.values()), rtol=1e-9)
    few = intervals({"one": np.array([1.0, np.nan, np.nan]), "two": np.array([1.0, 0.0, np.nan])})
    assert np.isnan(few["one"]).all() and few["two"] == (0.0, 1.0)


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """95 % of 200 experiments, each of 100 problems; 3 standard deviations of such a share are 4.6 %."""
    rng = np.random.default_rng(1)
    table = {str(i): rng.beta(1, 2, 100) for i in range(200)}
    hits = np.mean([low <= 1 / 3 <= high for low, high in intervals(table).values()])
    assert 0.95 - 0.046 - 0.02 < hits < 0.95 + 0.046  # a percentile interval of a skewed mean is a little short


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("#### 1,000", r"so \boxed{1000.0}", True),
        ("#### 50%", "<answer>50</answer>", True),
        ("#### 1/2", "#### 0.5", True),
        (r"\boxed{x + 1}", r"\boxed{x+1}", True),
        ("#### 7", "#### 8", False),
        (r"\boxed{x+1}", r"\boxed{1+x}", False),
    ],
)
def test_answers_that_vote_alike(one, other, same):
    assert (vote(one) == vote(other)) is same and vote(one) is not None
    assert ANSWERS["gsm8k"] is vote and ANSWERS["exact_match"](" ab\n") == "ab" and "maze" not in ANSWERS


def test_no_answer_is_no_vote():
    for completion in ("", "it is 7", "#### ", "#### " + "1" * 300):
        assert vote(completion) is None and grade(completion, "7") == 0.0
