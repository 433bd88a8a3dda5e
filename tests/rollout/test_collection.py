"""Tests the selection of training samples against Python loops, without a model: shaped rewards and dynamic
sampling."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_like import AlgorithmConfig, MaxPOConfig, MaxRLConfig, RLOOConfig, RolloutConfig, UserError
from tunix_like.algorithms.objective import build_objective, resolve
from tunix_like.data import reverse_text
from tunix_like.data.stream import Prompt
from tunix_like.rewards.scoring import Scores
from tunix_like.rollout.collection import Collector, shape_rewards, training_batch
from tunix_like.rollout.requests import samples_of
from tunix_like.rollout.rollouts import Rollout, Task, join_rollouts
from tunix_like.runtime.profile import Clock
from tunix_like.types import Completions

SIZE, LIMIT = 4, 6


def slow_shape(total, length, algo, threshold):
    """Computes the shaped reward of one completion, following the formulas."""
    if math.isnan(total):
        return total
    if algo.overlong == "penalty":
        free, worst = LIMIT - algo.overlong_buffer, algo.overlong_penalty or 1.0
        total -= 0.0 if length <= free else worst * min(1.0, (length - free) / algo.overlong_buffer)
    if algo.binarize:
        return 1.0 if total >= threshold or math.isclose(total, threshold, abs_tol=1e-6) else 0.0
    return total


SHAPES = st.sampled_from(
    [
        {},
        {"binarize": True},
        {"overlong": "penalty", "overlong_buffer": 1},
        {"overlong": "penalty", "overlong_buffer": LIMIT, "overlong_penalty": 0.25},
        {"overlong": "penalty", "overlong_buffer": 4, "overlong_penalty": 2.0, "binarize": True},
        {"overlong": "penalty", "overlong_buffer": 3, "binarize": True},
        {"overlong": "mask", "binarize": True},
    ]
)
REWARDS = st.sampled_from([0.0, 0.1, 0.7 + 0.2 + 0.1, 1.0, 1.5, 2.0, 3.0, -1.0, 4 / 3, 5 / 3, math.nan])


@given(SHAPES, st.lists(st.tuples(REWARDS, st.integers(0, LIMIT)), min_size=SIZE, max_size=SIZE), st.booleans())
@settings(max_examples=200, deadline=None)
def test_shaped_rewards_equal_those_of_a_loop(shaping, completions, high):
    """The length penalty is applied first, then the success threshold. A missing score stays missing."""
    algo, threshold = AlgorithmConfig(**shaping), 1.0 if high else 0.3
    total, lengths = (
        np.array([column], kind) for column, kind in zip(zip(*completions, strict=True), (float, int), strict=True)
    )
    expected = [slow_shape(reward, length, algo, threshold) for reward, length in completions]
    found = shape_rewards(total, lengths, algo, LIMIT, threshold)
    np.testing.assert_array_equal(found[0], expected)
    assert np.array_equal(total[0], [reward for reward, _ in completions], equal_nan=True), "its argument stays"


def test_values_of_the_length_penalty():
    """With a buffer of 4 tokens before a limit of 6, the penalty is 0 up to 2 tokens and then grows by a quarter per
    token, to 1 at the limit. The penalty precedes the threshold of 1: a reward of 1.5 less 0.5 is a success, 1.5 less
    0.75 is not."""
    lengths = np.arange(7)[None]
    algo = AlgorithmConfig(overlong="penalty", overlong_buffer=4)
    total = np.full((1, 7), 1.5)
    assert shape_rewards(total, lengths, algo, 6, 1.0).tolist() == [[1.5, 1.5, 1.5, 1.25, 1.0, 0.75, 0.5]]
    algo = AlgorithmConfig(overlong="penalty", overlong_buffer=4, binarize=True)
    assert shape_rewards(total, lengths, algo, 6, 1.0).tolist() == [[1, 1, 1, 1, 1, 0, 0]]


GROUPS = {
    "mixed": [0, 1, 0, 1],
    "uneven": [0.5, 0.5, 0.5, 0.25],
    "lost": [0, 0, 0, 0],
    "won": [1, 1, 1, 1],
    "unscored": [None] * 4,
    "one scored": [None, 1, None, None],
    "two scored": [None, 1, 0, None],
    "equal where scored": [None, 1, 1, 1],
}


def given_rewards(prompts, completions, rewards):
    """A reward function: each row contains the rewards of its group's completions."""
    return [row[i % SIZE] for i, row in enumerate(rewards)]


class FakeEngine:
    """Returns completions that depend only on the problem's number, as those of the real engine do."""

    max_prompt_length, row_steps = 8, 0

    def __init__(self):
        self.numbers = []

    def place(self, params):
        return params

    def generate(self, params, requests, key, sampling):
        numbers = [request.number for request in requests]
        self.numbers += numbers
        return samples_of(self.completions(numbers, SIZE))

    def completions(self, numbers, size):
        draws = [np.random.default_rng(number) for number in numbers]
        lengths = np.array([draw.integers(1, LIMIT + 1, size) for draw in draws], np.int32)
        tokens = np.array([draw.integers(5, 13, (size, LIMIT)) for draw in draws], np.int32)
        return Completions(tokens, lengths, np.zeros(tokens.shape, np.float32), lengths < LIMIT)


def make(kinds, batch_size, algo, rollouts=None, sources=None, functions=None):
    """Returns a collector with one prompt for each of `kinds`, in order. `sources` are the values of their column
    `data_source`; "own" belongs to maxrl."""
    algo = resolve(algo, type(algo))
    lengths = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=LIMIT)
    task = Task(algo, lengths, functions or [("given", given_rewards, 1.0)], 1.0)
    columns = [{"rewards": GROUPS[kind]} for kind in kinds]
    if sources is not None:
        columns = [each | {"data_source": source} for each, source in zip(columns, sources, strict=True)]
    prompts = [Prompt(f"{i}>", [1, 5, 4], each) for i, each in enumerate(columns)]
    batches = (prompts[i : i + batch_size] for i in range(0, len(prompts) - batch_size + 1, batch_size))
    objective = build_objective(algo, LIMIT, 1, {"own": {"advantage_estimator": "maxrl"}} if sources else None)
    tokenizer, key = reverse_text.tokenizer(), jax.random.key(0)
    return Collector(task, FakeEngine(), tokenizer, objective, batches, batch_size, key, rollouts)


def batch_of(collector, rollout=None):
    """Returns the training batch of `rollout`, or of the collector's next step."""
    rollout = collector(1, None, Clock())[0] if rollout is None else rollout
    return training_batch(rollout, collector.task, collector.objective)


def slow_steps(kinds, batch_size, cap, teaching):
    """Computes, by a loop over groups, which groups each step trains on and how many batches it samples."""
    steps, place = [], 0
    while place + batch_size <= len(kinds):
        drawn, extra = list(range(place, place + batch_size)), 0
        place += batch_size
        while (
            sum(kinds[n] in teaching for n in drawn) < batch_size and extra < cap and place + batch_size <= len(kinds)
        ):
            drawn += range(place, place + batch_size)
            place, extra = place + batch_size, extra + 1
        good = [n for n in drawn if kinds[n] in teaching]
        rest = [n for n in drawn if kinds[n] not in teaching]
        steps.append((sorted((good + rest)[:batch_size]), extra, len(good) - batch_size, drawn))
    return steps


ESTIMATORS = {
    "rloo": (RLOOConfig, {}, ("mixed", "uneven", "two scored")),
    "maxpo": (MaxPOConfig, {"k": 2}, ("mixed", "uneven")),  # needs three scored completions
}


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(sorted(GROUPS)), min_size=4, max_size=24),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(sorted(ESTIMATORS)),
)
@settings(max_examples=60, deadline=None)
def test_dynamic_sampling_equals_a_loop_over_groups(kinds, batch_size, cap, name):
    """Groups are used whole and in the order in which they were sampled. Groups without signal only fill up a step.
    Problem numbers and metrics cover everything that was sampled. The end of the data ends the collection."""
    config, params, teaching = ESTIMATORS[name]
    kinds = ["mixed", *kinds[1:]]  # the first batch must contain a scored completion
    algo = config(num_generations=SIZE, dynamic_sampling=True, max_extra_batches=cap, **params)
    collector = make(kinds, batch_size, algo)
    for expected, extra, beyond, drawn in slow_steps(kinds, batch_size, cap, teaching):
        rollout, metrics = collector(2, None, Clock())
        batch = batch_of(collector, rollout)
        assert [problem.number for problem in rollout.problems] == expected
        assert [problem.text for problem in rollout.problems] == [f"{n}>" for n in expected]
        every = FakeEngine().completions(drawn, SIZE)
        own = FakeEngine().completions(expected, SIZE)
        expected_tokens = np.where(np.arange(LIMIT) < own.lengths[..., None], own.tokens, 0)
        width = batch.completion_tokens.shape[-1]
        np.testing.assert_array_equal(batch.completion_tokens, expected_tokens[:, :, :width])
        np.testing.assert_array_equal(batch.completion_lengths, own.lengths)
        rewards = np.array([GROUPS[kinds[n]] for n in expected], float)
        np.testing.assert_array_equal(batch.scored, ~np.isnan(rewards))
        np.testing.assert_array_equal(batch.rewards, np.nan_to_num(rewards))
        np.testing.assert_array_equal(rollout.scores.total.reshape(rewards.shape), rewards)
        assert len(rollout.texts) == len(expected) * SIZE
        everything = np.array([GROUPS[kinds[n]] for n in drawn], float)
        seen = everything[~np.isnan(everything)]
        assert metrics["rewards/mean"] == pytest.approx(seen.sum() / len(seen) if len(seen) else math.nan, nan_ok=True)
        assert metrics["reward/unscored_frac"] == pytest.approx(np.isnan(everything).mean())
        assert metrics["completions/mean_length"] == pytest.approx(every.lengths.mean())
        assert metrics["dynamic_sampling/extra_batches"] == extra
        assert metrics["dynamic_sampling/short_groups"] == max(-beyond, 0)
        assert metrics["dynamic_sampling/unused_groups"] == max(beyond, 0)
    assert collector(2, None, Clock()) is None
    assert (
        collector.engine.numbers == list(range(collector.drawn)) == list(range(len(kinds) // batch_size * batch_size))
    )


@pytest.mark.parametrize("segmented", [(False, True), (True, False), (True, True), (False, False)])
def test_joined_rollouts_keep_segments(segmented):
    """A batch without segments has one per completion, which starts at 0."""

    def rollout(number, segments):
        out = FakeEngine().completions([number, number + 1], SIZE)
        starts = np.where(np.arange(LIMIT) > 0, 1, 0) * np.ones_like(out.tokens)
        out = out._replace(segment_start=starts if segments else None)
        scores = Scores(np.zeros(2 * SIZE), {}, *[np.zeros(2 * SIZE, bool)] * 3, None)
        return Rollout([Prompt("", [1], {})] * 2, [""] * 2 * SIZE, out, scores)

    sides = [rollout(3 * i, segments) for i, segments in enumerate(segmented)]
    found = join_rollouts(*sides).completions.segment_start
    if not any(segmented):
        assert found is None
        return
    for part, side, segments in zip(np.split(found, 2), sides, segmented, strict=True):
        expected = side.completions.segment_start if segments else np.zeros_like(side.completions.tokens)
        np.testing.assert_array_equal(part, expected)


def test_without_dynamic_sampling_one_batch_is_one_step():
    kinds = ["lost", "mixed", "won", "lost", "mixed", "mixed"]
    collector = make(kinds, 2, RLOOConfig(num_generations=SIZE))
    for first in (0, 2, 4):
        rollout, metrics = collector(1, None, Clock())
        batch = batch_of(collector, rollout)
        assert [problem.number for problem in rollout.problems] == [first, first + 1]
        assert batch.trained is None and not [name for name in metrics if name.startswith("dynamic")]
    assert collector(1, None, Clock()) is None


def test_cap_of_extra_batches_has_a_default_and_is_logged_once(caplog):
    """The default cap is four extra batches. At the cap the step continues with the groups that it has, and one warning
    is logged."""
    algo = RLOOConfig(num_generations=SIZE, dynamic_sampling=True)
    collector = make(["lost", "mixed"] + ["lost"] * 28, 2, algo)
    for step in (1, 2, 3):
        rollout, metrics = collector(step, None, Clock())
        assert metrics["dynamic_sampling/extra_batches"] == 4
        assert metrics["dynamic_sampling/short_groups"] == (1 if step == 1 else 2)
        assert [problem.number for problem in rollout.problems] == [10 * step - 10, 10 * step - 9]
    assert len(caplog.records) == 1
    assert "step 1: dynamic sampling found 1 of 2 groups with different rewards after 4 extra batch(es)" in caplog.text


def test_dynamic_sampling_selects_by_shaped_rewards():
    """Different rewards that are all below the threshold give no signal once they are binarized."""
    kinds = ["uneven", "mixed", "uneven", "mixed"]
    for binarize, numbers in ((False, [0, 1]), (True, [1, 3])):
        algo = MaxRLConfig(num_generations=SIZE, dynamic_sampling=True, binarize=binarize)
        collector = make(kinds, 2, algo)
        rollout, _ = collector(1, None, Clock())
        batch = batch_of(collector, rollout)
        assert [problem.number for problem in rollout.problems] == numbers
        np.testing.assert_array_equal(batch.rewards, [GROUPS[kinds[n]] for n in numbers])


def test_unscored_extra_batches_are_not_an_error():
    """Only a first batch without any score is an error, because it indicates a fault of the reward function."""
    algo = RLOOConfig(num_generations=SIZE, dynamic_sampling=True)
    rollout, _ = make(["mixed", "lost", "unscored", "unscored", "mixed", "lost"], 2, algo)(1, None, Clock())
    assert [problem.number for problem in rollout.problems] == [0, 4]
    with pytest.raises(UserError, match="no completion could be scored"):
        make(["unscored", "unscored", "mixed", "mixed"], 2, algo)(1, None, Clock())
    with pytest.raises(UserError, match="fewer than 3 usable prompts"):
        make(["mixed", "mixed"], 3, algo)(1, None, Clock())


def test_overlong_mask_and_estimator_by_source():
    """overlong=mask marks truncated completions and keeps their rewards. The column data_source selects the
    estimator."""
    batch = batch_of(make(["mixed"] * 3, 3, MaxRLConfig(num_generations=SIZE, overlong="mask")))
    np.testing.assert_array_equal(batch.trained, batch.completion_lengths < LIMIT)
    assert not batch.trained.all() and batch.scored.all() and batch.rewards.sum() == 6
    assert batch.estimator_ids.tolist() == [0, 0, 0]
    collector = make(["mixed"] * 3, 3, RLOOConfig(num_generations=SIZE), sources=["own", "unheard of", "own"])
    assert batch_of(collector).estimator_ids.tolist() == [1, 0, 1]


def test_reward_that_the_estimator_does_not_accept_raises(tmp_path):
    """The message names the prompt, the completion and the reward functions. Groups of another estimator may have such
    a reward. The completions are written to a file."""
    minus = [("given", given_rewards, 1.0), ("price", lambda completions: [0.5] * len(completions), -2.0)]
    algo = RLOOConfig(num_generations=SIZE)
    batch = batch_of(make(["won", "mixed"], 2, algo, sources=["own", "other"], functions=minus))
    np.testing.assert_array_equal(batch.rewards, [[0, 0, 0, 0], [-1, 0, -1, 0]])
    collector = make(["won", "uneven"], 2, algo, tmp_path / "rollouts", ["other", "own"], minus)
    with pytest.raises(UserError) as error:
        collector(7, None, Clock())
    file = tmp_path / "rollouts" / "step_000007.jsonl"
    for words in ("prompt '1>' (group 1), completion 0 (given gave 0.5, price gave 0.5)", "the reward -0.5 is negative",
                  "the estimator 'maxrl'", "algorithm.binarize=true", str(file)):  # fmt: skip
        assert words in str(error.value)
    assert len(file.read_text().splitlines()) == 2 * SIZE
