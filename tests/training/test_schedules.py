"""Tests parameters of estimators that change over steps: advantages of each step of a learner, one compilation."""

from __future__ import annotations

import numpy as np
import pytest

import tunix_like
from tests.training.small_learner import collect, make, varied, watch_advantages, watch_rewards
from tunix_like.training.learners import LEARNERS

STEPS = 4
SCHEDULED = {
    "maxk_mix": ({"alpha": {"start": 0.0, "end": 1.5, "steps": 4}}, [0.0, 0.5, 1.0, 1.5]),
    "maxpo": ({"k": {"start": 3, "end": 1, "steps": 3}}, [3, 2, 1, 1]),
    "maxrl": ({"truncation_order": {"start": 1, "end": 3, "steps": 2}}, [1, 3, 3, 3]),
    "pkpo": ({"k": {"start": 2, "end": 4, "steps": 3}}, [2, 3, 4, 4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULED)
def test_each_step_has_the_advantages_of_its_value(name):
    """The advantages of a step are those of the estimator with the value of the step, and the step is compiled once."""
    rewards, found = [], []
    (parameters, values) = SCHEDULED[name]
    learner = make(
        LEARNERS[name].config_class(num_generations=4, **parameters),
        learner=LEARNERS[name],
        reward=watch_rewards(rewards, varied),
        metric_fns=[watch_advantages(found)],
        max_steps=STEPS,
    )
    rows = collect(learner)
    (key,) = parameters
    assert [row[f"train/schedule/{key}"] for row in rows] == pytest.approx(values)
    for value, given, advantages in zip(values, rewards, found, strict=True):
        expected = tunix_like.compute_advantages(given, name, **{key: value})
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0]).max() > 0 and learner.programs.traces == 1


def test_groups_with_too_few_scored_completions_for_the_k_of_the_step_are_dropped():
    """With three of four completions scored, k = 3 leaves no group and k = 2 every group."""

    def one_unscored(prompts, completions, answer):
        return [None if i % 4 == 3 else float(i % 4) for i in range(len(completions))]

    algo = LEARNERS["maxpo"].config_class(num_generations=4, k={"start": 2, "end": 3, "steps": 2})
    found = []
    learner = make(algo, learner=LEARNERS["maxpo"], reward=one_unscored, metric_fns=[watch_advantages(found)])
    rows = collect(learner)
    assert np.abs(found[0][:, :3]).max() > 0 and not np.any(found[1])
    assert [row["train/update/empty"] for row in rows] == [0, 1]
