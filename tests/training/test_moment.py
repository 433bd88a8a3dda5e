"""Tests the step and the progress that reward functions and environments get during a run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.rewards import asking
from tests.training.small_learner import ROWS, TOKENIZER, NotASequence, collect, make
from tunix_like import (
    EnvironmentConfig,
    EnvironmentPool,
    EnvStepResult,
    EvalConfig,
    MaxRLConfig,
    RolloutConfig,
    UserError,
)
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh
from tunix_like.rewards import pooled
from tunix_like.runs.trained import open_trained
from tunix_like.storage.metrics import rows as metric_rows

STEPS = 4
EXPECTED = {step: step + (step - 1) / STEPS for step in range(1, STEPS + 1)}
"""The sum of step and progress in each step."""

EVALUATED = {step: step + step / STEPS for step in range(STEPS + 1)}
LENGTHS = {"max_prompt_length": 8, "max_tokens_to_generate": 4}
ONE_SAMPLE = {"eval_config": EvalConfig(samples=1), "eval_every_n_steps": 1}


class Asking:
    """Its reward, and with `info` a metric, is the sum of the numbers that `reset` got."""

    def reset(self, answer: str, step: int, progress: float) -> None:
        self.sum = step + progress

    def step(self, completion: str) -> EnvStepResult:
        return EnvStepResult(reward=self.sum, done=True, info={"sum": self.sum})


def by_step(rows, name):
    return {row["step"]: row[name] for row in rows if name in row}


def test_rewards_and_evaluations_get_the_step_of_the_metrics():
    learner = make(reward=asking.both, max_steps=STEPS, **ONE_SAMPLE)
    rows = collect(learner, eval_ds=ROWS[:2])
    assert by_step(rows, "train/rewards/both") == EXPECTED
    assert by_step(rows, "eval/rewards/mean") == EVALUATED
    assert learner.evaluate(ROWS[:2]).rewards.tolist() == [[5.0]] * 2, "as in the run, after its last step"
    rows = collect(learner)
    assert by_step(rows, "train/rewards/both") == {step: step + (step - 1) / 8 for step in range(5, 9)}


@pytest.mark.slow
def test_an_epoch_has_a_known_number_of_steps():
    rows = collect(make(reward=asking.both, max_steps=None), batch_size=2)
    assert by_step(rows, "train/rewards/both") == EXPECTED


def test_unknown_progress_is_refused():
    learner = make(reward=asking.both, max_steps=None)
    with pytest.raises(UserError, match="'both' needs an argument 'progress'.*set training.max_steps"):
        learner.train(NotASequence(), batch_size=4)
    rows = collect(make(reward=asking.only_step, max_steps=None), NotASequence())
    assert by_step(rows, "train/rewards/only_step") == {1: 1, 2: 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "one_completion"])
def test_workers_and_waiting_calls_get_them(name):
    function = getattr(asking, name)
    reward = pooled([function], workers=1) if name == "both" else function
    rows = collect(make(reward=reward, max_steps=STEPS))
    assert by_step(rows, f"train/rewards/{name}") == EXPECTED


def ahead(**settings):
    mesh = build_mesh(MeshConfig(), jax.devices()[:-4])
    rollout = RolloutConfig(**LENGTHS, max_staleness=1, devices=4)
    algo = MaxRLConfig(num_generations=4, sampler_is="token")
    return make(algo, reward=asking.both, max_steps=STEPS, rollout=rollout, mesh=mesh, **settings)


@pytest.mark.slow
def test_groups_collected_ahead_get_the_step_that_trains_on_them():
    rows = collect(ahead())
    assert by_step(rows, "train/staleness") == {1: 0, 2: 1, 3: 1, 4: 1}
    assert by_step(rows, "train/rewards/both") == EXPECTED


def playing(environment=Asking, **settings):
    ends = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=48, eos_tokens=ends)
    turns = {"environment": environment, "environment_config": EnvironmentConfig(max_turns=1)}
    return make(reward=asking.both, rollout=rollout, max_steps=STEPS, **turns, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [ahead, playing])
def test_a_resumed_run_sees_the_same_numbers(tmp_path, maker):
    """The run is cut off in step 4, after the checkpoint of step 2."""
    settings = {"output_dir": str(tmp_path), "checkpoint_every_n_steps": 2, **ONE_SAMPLE}
    learner = maker(**settings)
    step = learner.step

    def cut_off(number):
        if number == 4:
            raise RuntimeError("the machine is gone")
        return step(number)

    learner.step = cut_off
    with pytest.raises(RuntimeError, match="gone"):
        learner.train(ROWS, ROWS[:2], batch_size=4)
    assert max(by_step(metric_rows(tmp_path), "train/rewards/both")) == 3
    assert [row["step"] for row in collect(maker(**settings), eval_ds=ROWS[:2])] == [3, 4]
    rows = metric_rows(tmp_path)
    names = ["rewards/both"] if maker is ahead else ["rewards/both", "environment/sum"]
    for name in names:
        assert by_step(rows, f"train/{name}") == EXPECTED
    assert by_step(rows, "eval/rewards/mean" if maker is ahead else "eval/environment/sum") == EVALUATED


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_in_its_run(tmp_path):
    make(reward=asking.both, max_steps=STEPS, output_dir=str(tmp_path), checkpoint_every_n_steps=3).train(ROWS)
    assert open_trained(f"{tmp_path}/checkpoints/3").moment == {"step": 3, "progress": 0.75}


@pytest.mark.slow
@pytest.mark.parametrize("place", [None, f"{Path(__file__)}:Asking"], ids=["in this process", "in processes"])
def test_environments_get_them(place):
    learner = playing(Asking if place is None else EnvironmentPool(place, workers=2), **ONE_SAMPLE)
    rows = collect(learner, eval_ds=ROWS[:2])
    assert by_step(rows, "train/environment/sum") == EXPECTED
    assert by_step(rows, "eval/environment/sum") == EVALUATED
