"""Tests the list of sources of signals per token. What each source gives is tested with its learner."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.small_learner import TEXTS, collect, make, make_model
from tunix_like import (
    DistillationConfig,
    DistillationLearner,
    EnvironmentConfig,
    MaxRLConfig,
    MaxRLLearner,
    OTBConfig,
    OTBLearner,
    PPOConfig,
    PPOLearner,
    RLOOConfig,
    RLOOLearner,
    TeacherConfig,
)
from tunix_like.training import updates
from tunix_like.training.token_signals import SignalInputs, TokenSignals, all_signals

OTHER = {"source_estimators": {"copy": {"advantage_estimator": "otb"}}}


class OneTurn:
    def reset(self, **columns):
        pass

    def step(self, completion):
        return "", float(len(completion) % 2), True


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, algo, arguments, expected",
    [
        (MaxRLLearner, MaxRLConfig(num_generations=4), {}, False),
        (OTBLearner, OTBConfig(num_generations=4), {}, True),
        (MaxRLLearner, MaxRLConfig(num_generations=4), OTHER, True),
        (PPOLearner, PPOConfig(num_generations=4), {}, True),
        (RLOOLearner, RLOOConfig(num_generations=4, credit="turn"),
         {"reward": (), "environment": OneTurn, "environment_config": EnvironmentConfig(max_turns=2)}, True),
        (DistillationLearner, DistillationConfig(num_generations=4), {"reward": (), "teacher": True}, True),
        (MaxRLLearner, MaxRLConfig(num_generations=4),
         {"teacher": True, "teacher_config": TeacherConfig(divergence="jsd")}, False),
    ],
    ids=["maxrl", "otb", "otb of a source", "ppo", "turns", "reverse_kl", "jsd"],
)  # fmt: skip
def test_the_step_has_advantages_of_tokens_where_the_objective_says_so(kind, algo, arguments, expected, monkeypatch):
    """`doctor` compiles the step by what the objective says."""
    seen = []
    step_inputs = updates.step_inputs

    def watched(*given, token_advantages, **others):
        seen.append(token_advantages is not None)
        return step_inputs(*given, token_advantages=token_advantages, **others)

    monkeypatch.setattr(updates, "step_inputs", watched)
    arguments = {**arguments, **({"teacher": make_model(3)} if "teacher" in arguments else {})}
    learner = make(algo, learner=kind, max_steps=1, **arguments)
    rows = [{"prompt": text, "answer": text[::-1], "data_source": "reverse"} for text in TEXTS]
    collect(learner, rows)
    assert set(seen) == {expected}
    assert learner._objective(1).gives_token_advantages is expected


def test_the_signals_of_several_sources_are_added():
    def number(value):
        return np.full((1, 1, 1), value, np.float32)

    one = TokenSignals(logged=number(1), metrics={"a": 1.0})
    two = TokenSignals(logged=number(2), unlogged=number(3), metrics={"b": 2.0})
    nothing = object.__new__(SignalInputs)  # which these sources do not read
    total = all_signals([lambda inputs: one, lambda inputs: two], nothing)
    assert (total.logged, total.unlogged, total.advantages) == (number(3), number(3), number(6))
    assert total.metrics == {"a": 1.0, "b": 2.0}
    assert all_signals([], nothing).advantages is None
