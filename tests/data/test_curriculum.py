"""Tests the draws of a curriculum: probabilities against integration, exact expected numbers of draws, corrected
expectations, and the discounted counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, chisquare

from tunix_like import Curriculum, UserError
from tunix_like.config.schema import AlgorithmConfig, DataConfig, RolloutConfig
from tunix_like.data import reverse_text
from tunix_like.data.curriculum import CurriculumBatches, check_curriculum, curriculum_of, draw, mixed_probability
from tunix_like.types import Problem

TOKENIZER = reverse_text.tokenizer()
ROWS = [reverse_text.record(a + b) for a in "abcd" for b in "efg"]


class Given(np.random.Generator):
    """A random generator with a given uniform number that never permutes."""

    def __init__(self, number):
        super().__init__(np.random.PCG64(0))
        self.number = number

    def permutation(self, values):
        return np.arange(values) if isinstance(values, int) else values

    def random(self):
        return self.number


def make(settings=None, batch_size=4, rows=ROWS, limit=8, seed=3):
    return CurriculumBatches(rows, TOKENIZER, batch_size, limit, seed, settings or Curriculum(), 4)


def observe(batches, row, passed, scored):
    return batches.observe([Problem(0, "", [1], {}, row=row)], np.array([passed]), np.array([scored]))


@pytest.mark.parametrize("group_size", [2, 8])
def test_probability_of_a_mixed_group_is_the_integral_over_pass_rates(group_size):
    counts = np.array([[0, 0], [3, 0], [0, 5], [2.7, 0.81], [40, 1]])
    found = mixed_probability(counts, group_size)
    for own, (passed, failed) in zip(found, counts, strict=True):
        density = beta(1 + passed, 1 + failed).pdf
        right, _ = quad(lambda p, f=density: f(p) * (1 - p**group_size - (1 - p) ** group_size), 0, 1)
        assert own == pytest.approx(right, abs=1e-7)


def test_expected_numbers_of_draws_are_exact():
    """The result is constant between multiples of 1/10 of the uniform number, so ten numbers give the expectation."""
    probabilities = np.array([1, 12, 0, 3, 4, 20]) / 40
    size = 4
    numbers = np.zeros(len(probabilities))
    for place in range(10):
        drawn = draw(probabilities, size, Given((place + 0.5) / 10))
        numbers += np.bincount(drawn, minlength=len(probabilities)) / 10
    np.testing.assert_allclose(numbers, size * probabilities, atol=1e-12)


def test_every_place_of_a_batch_has_the_probabilities_of_the_draw():
    probabilities = np.array([0.05, 0.3, 0.15, 0.4, 0.1])
    random = np.random.default_rng(0)
    drawn = np.array([draw(probabilities, 3, random) for _ in range(4000)])
    for place in range(3):
        seen = np.bincount(drawn[:, place], minlength=5)
        assert chisquare(seen, probabilities * 4000).pvalue > 1e-3
    assert all(len(set(row)) == 3 for row in drawn[:, :] if not (row == 3).sum() > 1), "others are drawn once"


@pytest.mark.parametrize("correct", [True, False])
def test_corrected_sums_have_the_expectation_of_uniform_draws(correct, monkeypatch):
    batches = make(Curriculum(correct=correct, floor=0.3), batch_size=3)
    for row, passed in enumerate([0, 4, 2, 4, 1]):
        observe(batches, row, 4 * passed, 16)
    values = np.random.default_rng(1).normal(size=len(ROWS))
    probabilities = batches.probabilities()
    # Between these uniform numbers the rows of the batch are the same, so the sum over the intervals is exact.
    edges = np.unique([0.0, *(np.cumsum(probabilities) * 3 % 1), 1.0])
    assert probabilities.sum() == pytest.approx(1) and probabilities.std() > 0.007
    total = 0.0
    for low, high in itertools.pairwise(edges):
        monkeypatch.setattr(np.random, "default_rng", lambda seed, number=(low + high) / 2: Given(number))
        total += (high - low) * sum(values[prompt.row] * (prompt.weight or 1) for prompt in next(batches)) / 3
    expected = values.mean() if correct else (probabilities * values).sum()
    assert total == pytest.approx(expected, abs=1e-9)
    assert abs(values.mean() - (probabilities * values).sum()) > 0.01, "the correction matters"


def test_solved_and_hopeless_prompts_are_drawn_at_the_floor_and_come_back():
    batches = make(Curriculum(floor=0.24))
    for row in range(len(ROWS)):
        for _ in range(12):
            observe(batches, row, (4, 0, 2)[row % 3], 4)
    solved, hopeless, mixed = batches.probabilities()[:3]
    assert solved == pytest.approx(hopeless) and 0.02 < solved < 0.08 and mixed > 2 * solved
    metrics = batches.metrics()
    assert metrics["curriculum/seen_frac"] == 1 and metrics["pass_rate/all"] == [4, 0, 0, 0, 4, 0, 0, 0, 0, 4]
    for _ in range(6):
        observe(batches, 0, 1, 4)
    assert batches.probabilities()[0] > 0.8 * batches.probabilities()[2]


def test_counts_are_discounted_and_unscored_completions_do_not_count():
    batches = make(Curriculum(discount=0.5))
    observe(batches, 7, 1, 4)
    observe(batches, 7, 2, 3)
    np.testing.assert_allclose(batches.counts[7], [0.5 * 1 + 2, 0.5 * 3 + 1])
    assert batches.counts.sum() == batches.counts[7].sum()


def test_rows_without_a_usable_prompt_are_never_drawn():
    rows = [{"prompt": "ab>"}, {"prompt": 5}, {"prompt": "abababababab>"}, {"prompt": "c>"}]
    batches = make(Curriculum(), batch_size=2, rows=rows)
    seen = [prompt.row for _ in range(20) for prompt in next(batches)]
    assert set(seen) == {0, 3} and batches.probabilities()[[1, 2]].sum() == 0
    assert {prompt.weight for prompt in next(batches)} == {1.0}


def test_position_and_counts_determine_the_next_batch():
    one, two = make(), make()
    first = [next(one) for _ in range(3)]
    two.set_state({"next": 2})
    assert next(two) == first[2] and first[0] != first[1]


def test_epochs_have_as_many_draws_as_usable_rows():
    batches = CurriculumBatches(
        [*ROWS, reverse_text.record("a" * 20)], TOKENIZER, 5, 8, 3, Curriculum(), 4, forever=False
    )
    assert [len(batch) for batch in batches] == [5, 5] and next(batches, None) is None
    batches.next_epoch()
    assert len(list(batches)) == 2


def test_settings():
    assert curriculum_of(DataConfig()) is None
    config = DataConfig(curriculum=True, curriculum_correct=False, curriculum_floor=0.5)
    assert curriculum_of(config) == Curriculum(correct=False, floor=0.5)
    with pytest.raises(UserError, match=r"data\.curriculum_floor"):
        curriculum_of(DataConfig(curriculum_floor=0.5))
    with pytest.raises(UserError, match=r"data.curriculum: a weight in data.sources repeats rows"):
        curriculum_of(DataConfig(name="mix", curriculum=True, sources=[{"name": "maze", "weight": 2}]))
    with pytest.raises(UserError, match="floor"):
        Curriculum(floor=0.0)
    with pytest.raises(UserError, match=r"rollout\.max_staleness"):
        check_curriculum(Curriculum(), AlgorithmConfig(), RolloutConfig(max_staleness=1))
    with pytest.raises(UserError, match=r"curriculum_correct"):
        check_curriculum(Curriculum(), AlgorithmConfig(dynamic_sampling=True), RolloutConfig())
    check_curriculum(Curriculum(correct=False), AlgorithmConfig(dynamic_sampling=True), RolloutConfig())
