"""Tests pass@k and majority votes against all subsets, confidence intervals against scipy and by their coverage, and
the comparison of answers in votes."""

from __future__ import annotations

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from tests.parameters import others_slow
from tunix_like.evaluation import statistics as eval_statistics
from tunix_like.evaluation.statistics import intervals, maj_at_k, pass_at_k, problem_values, value_ranges
from tunix_like.rewards import ANSWERS
from tunix_like.rewards.math import grade, vote

UNIT = {"x": (0.0, 1.0)}


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
    """Enumerates every order of every subset. Of tied answers the one that occurs first wins."""
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
        ("aaab", [1, 0, 1, 1]),  # the same answer with different rewards counts two thirds
        ([None, "a", None, "b", "b"], [0, 1, 0, 0, 0]),
        ([None, None, 3], [0, 0, 1]),
        ([Fraction(1, 2), Fraction(2, 4), "x", 1], [1, 1, 0, 0]),
    ],
)
def test_majority_vote_is_a_mean_over_every_order(votes, successes):
    for k in range(1, len(votes) + 1):
        expected = vote_by_hand(list(votes), successes, k)
        assert maj_at_k(list(votes), np.array(successes, float), k) == pytest.approx(expected, abs=1e-6)


def test_votes_of_many_samples():
    """There are more subsets than samples of subsets. The estimate is close to the exact value, reproducible, and exact
    for the smallest and the largest k."""
    votes, successes, exact = list("a" * 7 + "b" * 5 + "cdef"), np.array([1.0] * 7 + [0.0] * 9), {}
    for k in (4, 8):  # the oracle counts outcomes: answers a, b and the four single ones
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
    """avg averages the scored completions, a problem without votes has no maj, and unscored completions do not vote."""
    nan = math.nan
    rewards = np.array([[1, 0.5, 0, 0], [nan, nan, 1, 0], [nan] * 4, [1, 1, 0, 0]])
    votes = [["a", "b", "b", "b"], ["b", "b", "a", "a"], ["a"] * 4, None]
    found = problem_values(rewards, rewards >= 1, votes, [1, 2])
    assert list(found) == ["pass@1", "pass@2", "avg@4", "maj@1", "maj@2"]
    np.testing.assert_allclose(found["pass@1"], [1 / 4, 1 / 2, nan, 1 / 2])
    np.testing.assert_allclose(found["pass@2"], [1 / 2, 1, nan, 5 / 6])
    np.testing.assert_allclose(found["avg@4"], [1.5 / 4, 1 / 2, nan, 1 / 2])
    np.testing.assert_allclose(found["maj@1"], [1 / 4, 1 / 2, nan, nan], atol=1e-6)
    np.testing.assert_allclose(found["maj@2"], [1 / 4, 1 / 2, nan, nan], atol=1e-6)  # the two scored completions agree
    assert list(problem_values(rewards, rewards >= 1, [None] * 4, [1])) == ["pass@1", "avg@4"]


def test_intervals_of_zeros_and_ones_equal_clopper_pearson():
    """The oracle is scipy, which inverts the binomial test. For other ranges the limits are scaled."""
    for number in (2, 5, 64):
        for ones in range(number + 1):
            expected = scipy.stats.binomtest(ones, number).proportion_ci(0.95, "exact")
            values = {"x": np.array([1.0] * ones + [0.0] * (number - ones) + [math.nan])}
            assert intervals(values, UNIT)["x"] == pytest.approx((expected.low, expected.high), abs=1e-9)
            moved = intervals({"x": 3 * values["x"] - 1}, {"x": (-1, 2)})["x"]
            assert moved == pytest.approx((3 * expected.low - 1, 3 * expected.high - 1), abs=1e-9)


def test_intervals_by_their_definition(monkeypatch):
    """The oracle is a loop over draws. The result does not depend on the block size or on the other metrics, is
    continuous at the limits of the range, and is NaN for unknown values."""
    rng = np.random.default_rng(3)
    values = {"x": rng.random(40), "y": np.where(rng.random(40) < 0.2, np.nan, 2 * rng.random(40))}
    ranges = {"x": (0.0, 1.0), "y": (-1.0, 2.0)}
    found = intervals(values, ranges)
    drawn = np.random.default_rng(0)
    weights = drawn.standard_exponential((eval_statistics.DRAWS, 41))
    for name, each in values.items():
        known = ~np.isnan(each)
        ends = []
        for end, level in zip(ranges[name], (0.025, 0.975), strict=True):
            whole, own = np.append(each[known], end), weights[:, np.append(known, True)]
            ends.append(np.quantile([np.average(whole, weights=row) for row in own], level))
        np.testing.assert_allclose(found[name], ends, rtol=1e-9)
        assert intervals({name: each}, ranges)[name] == pytest.approx(found[name]), "the same whatever stands beside it"
    assert intervals(values, ranges) == found
    monkeypatch.setattr(eval_statistics, "_CELLS", 41 * 7)
    np.testing.assert_allclose(list(intervals(values, ranges).values()), list(found.values()), rtol=1e-9)
    nearly = np.array([1e-6] + [0.0] * 20 + [1.0] * 9)
    exact = scipy.stats.binomtest(9, 30).proportion_ci(0.95, "exact")
    assert intervals({"x": nearly}, UNIT)["x"] == pytest.approx((exact.low, exact.high), abs=0.005)
    few = intervals({"x": np.array([1.0, np.nan, np.nan])}, UNIT)
    assert np.isnan(few["x"]).all() and intervals({}, {}) == {}


def test_interval_of_equal_values_has_positive_width():
    """If all problems have the same value, the interval still covers the values that the sample may have missed."""
    size = 50
    unseen = 1 - 0.025 ** (1 / size)
    for value in (0.0, 1.0, 0.25, -0.5):
        low, high = intervals({"x": np.full(size, value)}, {"x": (-1.0, 1.0)})["x"]
        assert low == pytest.approx(value - (value + 1) * unseen, abs=2e-3 * (value + 1))
        assert high == pytest.approx(value + (1 - value) * unseen, abs=2e-3 * (1 - value))


RATES, SIZES = (0.004, 0.02, 0.1, 0.5), (32, 64, 256, 1319)


@pytest.mark.parametrize("size", SIZES)
def test_coverage_with_one_sample_each(size):
    """The coverage is exact: a sum over all numbers of successes."""
    outcomes = {str(ones): np.repeat([1.0, 0.0], [ones, size - ones]) for ones in range(size + 1)}
    ends = np.array([intervals({"x": values}, UNIT)["x"] for values in outcomes.values()])
    for rate in RATES:
        holds = (ends[:, 0] <= rate) & (rate <= ends[:, 1])
        chances = scipy.stats.binom.pmf(np.arange(size + 1), size, rate)
        assert chances[holds].sum() >= 0.95, rate
        width = chances @ (ends[:, 1] - ends[:, 0])
        normal = 2 * 1.96 * math.sqrt(rate * (1 - rate) / size)
        assert width < normal + 4.2 / size, "no wider than the rule of three adds"


def coverages(cases, size, experiments):
    """Returns for each `(draw, truth, range)` the fraction of intervals that contain the truth, and their mean
    width."""
    rng, values, ranges = np.random.default_rng(size), {}, {}
    for i, (draw, _, ends) in enumerate(cases):
        for j in range(experiments):
            values[f"{i} {j}"] = draw(size, rng)
            ranges[f"{i} {j}"] = ends(values[f"{i} {j}"]) if callable(ends) else ends
    found = np.array(list(intervals(values, ranges).values())).reshape(len(cases), experiments, 2)
    truths = np.array([truth for _, truth, _ in cases])[:, None]
    holds = (found[..., 0] <= truths) & (truths <= found[..., 1])
    return list(zip(holds.mean(axis=1), (found[..., 1] - found[..., 0]).mean(axis=1), strict=True))


def beta_problems(rate, spread, samples, k):
    """Returns a sampler of pass@k of problems whose success probabilities are Beta(spread * rate, spread * (1 - rate)),
    and its true mean."""

    def draw(size, rng):
        successes = rng.binomial(samples, rng.beta(spread * rate, spread * (1 - rate), size))
        return pass_at_k(np.full(size, samples), successes, k)

    return draw, 1 - math.prod((spread * (1 - rate) + i) / (spread + i) for i in range(k))


def rare_ones(rate, samples):
    """Half of the rate comes from problems that always succeed, the rest from problems that rarely succeed."""

    def draw(size, rng):
        return np.where(rng.random(size) < rate / 2, 1.0, rng.binomial(samples, rate / 2, size) / samples)

    return draw, rate / 2 + (1 - rate / 2) * rate / 2


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_coverage_with_several_samples_each(size, monkeypatch):
    """At least 93 % of 300 intervals contain the truth (the standard error at 95 % is 1.3 %). For well spread values
    the interval is only slightly wider than the normal one."""
    monkeypatch.setattr(eval_statistics, "DRAWS", 1000)
    cases = []
    for rate in RATES:
        made = beta_problems(rate, 0.5, 8, 1), beta_problems(rate, 5, 8, 4), rare_ones(rate, 16)
        cases += [(*each, (0.0, 1.0)) for each in made]
    for (draw, truth, _), (held, width) in zip(cases, coverages(cases, size, 300), strict=True):
        assert held >= 0.93, truth
        normal = 2 * 1.96 * draw(20_000, np.random.default_rng(0)).std() / math.sqrt(size)
        assert width < 1.1 * normal + 4.2 / size, truth


def paired(rate):
    """B - A with one sample per problem. B succeeds at `rate`, A at a third of it and on other problems."""

    def draw(size, rng):
        uniform = rng.random(size)
        return (uniform > 1 - rate).astype(float) - (uniform < rate / 3)

    return draw, rate * 2 / 3


@pytest.mark.parametrize("size", others_slow((32, 256), 32))
def test_coverage_of_paired_differences(size, monkeypatch):
    monkeypatch.setattr(eval_statistics, "DRAWS", 1000)
    found = coverages([(*paired(rate), (-1.0, 1.0)) for rate in RATES], size, 1000)
    assert min(held for held, _ in found) >= 0.93


@pytest.mark.parametrize("size", (32, 256))
def test_coverage_of_rewards(size, monkeypatch):
    """Tests mean rewards of normal, skewed and rare distributions. The range is that of the observed rewards, 0 and the
    threshold."""
    monkeypatch.setattr(eval_statistics, "DRAWS", 1000)
    draws = (
        (lambda size, rng: rng.normal(0.3, 1, size), 0.3),
        (lambda size, rng: rng.exponential(1, size), 1.0),
        (lambda size, rng: 10.0 * (rng.random(size) < 0.02) - 0.1, 0.1),
    )
    found = coverages(
        [(*each, lambda seen: value_ranges(["avg@1"], [seen, [9.9]])["avg@1"]) for each in draws], size, 300
    )
    assert min(held for held, _ in found) >= 0.93


def test_interval_of_paired_differences_agrees_with_the_sign_test():
    """If no problem is lost, the interval is above 0 exactly if the sign test rejects: P(all wins) = 2^-wins below 2.5
    %."""
    for wins, sure in ((3, False), (5, False), (6, True), (20, True)):
        low, high = intervals({"x": np.repeat([1.0, 0.0], [wins, 100 - wins])}, {"x": (-1.0, 1.0)})["x"]
        assert (low > 0) == sure and high > wins / 100


def test_the_range_of_a_metric():
    rewards = [np.array([[0.5, -2.0], [math.nan, 3.0]]), [1.0]]
    found = value_ranges(["pass@1", "avg@2", "maj@2"], rewards)
    assert found == {"pass@1": (0, 1), "avg@2": (-2, 3), "maj@2": (0, 1)}
    assert value_ranges(["avg@2"], [[math.nan], [-1.0]]) == {"avg@2": (-1, 0)}


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
def test_equal_answers_give_equal_votes(one, other, same):
    assert (vote(one) == vote(other)) is same and vote(one) is not None
    assert ANSWERS["gsm8k"] is vote and ANSWERS["exact_match"](" ab\n") == "ab" and "maze" not in ANSWERS


def test_completion_without_an_answer_has_no_vote():
    for completion in ("", "it is 7", "#### ", "#### " + "1" * 300):
        assert vote(completion) is None and grade(completion, "7") == 0.0
