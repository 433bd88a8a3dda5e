"""Tests learners with environments: the mask of sampled tokens, turns, failures, resumption and evaluation."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import tunix_like
from tests.traces import calls, tracks_of
from tunix_like import (
    EnvironmentConfig,
    EnvironmentPool,
    EnvironmentUnavailable,
    EnvStepResult,
    EvalConfig,
    MaxRLConfig,
    RolloutConfig,
    UserError,
)
from tunix_like.errors import EngineLost, EnvironmentMisconfigured
from tunix_like.rewards import pooled
from tunix_like.rollout.collection import shape_rewards
from tunix_like.runtime import trace
from tunix_like.types import GroupBatch

from .small_learner import ROWS, TOKENIZER, assert_same, collect, make, watch_sampler

LETTERS = "abcdefgh"
ENDS = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
LENGTHS = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=48, eos_tokens=ENDS)
TURNS = EnvironmentConfig(max_turns=4, max_observation_tokens=40)


class Vowels:
    """Rewards an `a` or `e` in each turn, and ends after three turns. The observation reports what was right."""

    def reset(self, answer: str, **columns) -> None:
        self.answer, self.turns = answer, 0

    def step(self, completion: str) -> EnvStepResult:
        self.turns += 1
        good = completion[-1:] in ("a", "e")
        observation = self.answer[:2] if good else "xyz"
        return EnvStepResult(observation, float(good), self.turns == 3, {"good": good, "text": "no number"})


def learner(environment=Vowels, config=TURNS, algo=None, rollout=LENGTHS, **arguments):
    made = make(algo or MaxRLConfig(num_generations=4, truncation_order=1), rollout=rollout, reward=(),
                environment=environment, environment_config=config, **arguments)  # fmt: skip
    return made


def ended(completion: str) -> bool:
    return len(completion) < 48 or completion[-1] in "abcdefgh"


@pytest.mark.slow
def test_one_turn_environment_equals_a_reward_function():
    """The weights after two steps are bitwise equal with an environment and with a reward function."""

    class Once:
        def reset(self, **columns):
            pass

        def step(self, completion):
            return completion, len(completion) % 2, True

    def reward(prompts, completions, **columns):
        return [float(len(completion) % 2) if ended(completion) else 0.0 for completion in completions]

    by_environment, by_function = learner(Once), make(MaxRLConfig(num_generations=4, truncation_order=1),
                                                      rollout=LENGTHS, reward=reward)  # fmt: skip
    rows, expected = (collect(each) for each in (by_environment, by_function))
    assert_same(by_environment.params, by_function.params)
    for row, other in zip(rows, expected, strict=True):
        assert row["train/loss"] == other["train/loss"] and row["train/rewards/mean"] == other["train/rewards/mean"]
        assert row["train/turns/mean"] == 1 and row["train/completions/clipped_ratio"] < 1
    assert any(row["train/loss"] != 0 for row in rows)


@pytest.mark.slow
def test_turns_are_rewarded_and_masked():
    made = learner()
    sampled = watch_sampler(made)
    rows = collect(made)
    out = sampled[0]
    assert out.token_mask is not None and not out.token_mask.all()
    inside = np.arange(out.tokens.shape[-1]) < out.lengths[..., None]
    assert (out.token_mask <= inside).all() and (out.token_mask < inside).any()
    row = rows[0]
    assert 1 < row["train/turns/mean"] <= 3 and row["train/turns/max"] == 3
    assert 0 <= row["train/environment/good"] <= 1 and "train/environment/text" not in row
    assert row["train/rewards/max"] in (1, 2, 3) and row["train/rewards/environment"] == row["train/rewards/mean"]
    sampled = out.token_mask.sum(axis=-1)
    assert row["train/completions/mean_length"] == pytest.approx(sampled.mean())
    assert (row["train/completions/min_length"], row["train/completions/max_length"]) == (sampled.min(), sampled.max())
    assert sampled.mean() < row["train/completions/mean_total_length"] == pytest.approx(out.lengths.mean())
    assert row["train/logprob_gap/max"] < 1e-4, "the trainer's log-probabilities of sampled tokens are the sampler's"


@pytest.mark.slow
def test_lockstep_and_eager_train_the_same():
    one, other = learner(), learner(config=EnvironmentConfig(max_turns=4, max_observation_tokens=40, mode="eager"))
    first, second = collect(one), collect(other)
    assert [row["train/rewards/mean"] for row in first] == [row["train/rewards/mean"] for row in second]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one.params, other.params)


@pytest.mark.slow
def test_resumed_run_is_bitwise_equal(tmp_path):
    whole = learner(max_steps=4)
    collect(whole)
    for steps in (2, 4):
        part = learner(max_steps=steps, output_dir=str(tmp_path), checkpoint_every_n_steps=1)
        collect(part)
    assert_same(part.params, whole.params)


class Failing(Vowels):
    """Fails in one of five ways, selected by the first letter of the row's answer."""

    def reset(self, answer: str, **columns) -> None:
        super().reset(answer)
        if answer[0] == "d":
            raise RuntimeError("no reset")

    def step(self, completion: str):
        if self.turns == 1 and self.answer[0] == "b":
            raise RuntimeError("no step")
        if self.answer[0] == "f":
            return "x", float("nan"), True
        return b"bytes" if self.answer[0] == "h" else super().step(completion)


def played(environments, answer, **columns):
    """Rewards the number of turns that the environment of a completion has counted, as a reward function of TRL."""
    assert [environment.answer for environment in environments] == list(answer)
    return [100.0 + environment.turns for environment in environments]


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["nothing", "both", "rewards"])
def test_reward_functions_get_the_environments(apart, tmp_path):
    environment = Failing
    if apart == "both":
        environment = EnvironmentPool(f"{__name__}:Failing", workers=2)
    reward = played if apart == "nothing" else pooled([played], workers=1)
    settings = {"max_steps": 1, "log_rollouts_every_n_steps": 1, "output_dir": str(tmp_path)}
    made = make(rollout=LENGTHS, reward=reward, environment=environment, environment_config=TURNS, **settings)
    collect(made, batch_size=8)
    (file,) = (tmp_path / "rollouts").glob("step_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    scored = [row for row in rows if row["reward"] is not None]
    assert 0 < len(scored) < len(rows), "some environments have failed"
    assert all((row["failure"] is None) == (row["reward"] is not None) for row in rows)
    for row in scored:
        turns = [turn["role"] for turn in row["turns"]].count("assistant")
        assert row["reward/played"] - 100 in (turns, turns - 1), "the environment does not see a truncated turn"


@pytest.mark.slow
def test_failure_of_an_environment_affects_only_its_trajectory(tmp_path):
    made = learner(Failing, output_dir=str(tmp_path))
    rows = collect(made, batch_size=8)
    failed = rows[0]["train/reward/error_frac"]
    assert 0.3 < failed <= 0.5, "of four of the eight rows, less those cut in their first turn"
    assert rows[0]["train/reward/unscored_frac"] == failed and np.isfinite(rows[0]["train/loss"])
    told = (tmp_path / "rollouts" / "reward_failure.txt").read_text()
    assert "no reset" in told or "no step" in told or "reward" in told or "bytes" in told
    names = [event["name"] for event in calls(tracks_of(tmp_path / trace.FILE), "environment calls")]
    assert names.count("reset failed") + names.count("step failed") + names.count("finish failed") > 0
    assert "reset" in names and "step" in names


class Away(Vowels):
    """After two batches, cannot be reset for answers with these first letters."""

    batches, letters, error = 0, "", EnvironmentUnavailable

    def reset(self, answer: str, **columns) -> None:
        super().reset(answer)
        if Away.batches >= 2 and answer[0] in self.letters:
            raise self.error("the service is away.")


def away(monkeypatch, letters, **arguments):
    monkeypatch.setattr(Away, "batches", 0)
    monkeypatch.setattr(Away, "letters", letters)
    made = learner(Away, max_steps=4, **arguments)
    inner = made.engine.generate

    def generate(*given):
        yield from inner(*given)
        Away.batches += 1

    monkeypatch.setattr(made.engine, "generate", generate)
    return made


@pytest.mark.slow
def test_lost_service_stops_the_run_with_the_last_step_saved(tmp_path, monkeypatch):
    """The exit status is 75. The resumed run equals the uninterrupted run."""
    whole = away(monkeypatch, "")
    collect(whole)
    settings = {"output_dir": str(tmp_path / "reset"), "checkpoint_every_n_steps": 100}
    with pytest.raises(EngineLost, match="all 16 trajectories failed. the service is away. Start the server, then"):
        collect(away(monkeypatch, LETTERS, **settings))
    assert (tmp_path / "reset" / "checkpoints" / "2").exists() and EngineLost.status == 75
    resumed = away(monkeypatch, "", **settings)
    assert [row["step"] for row in collect(resumed)] == [3, 4]
    assert_same(resumed.params, whole.params)


@pytest.mark.slow
def test_environment_that_fails_for_all_trajectories_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Away, "error", RuntimeError)
    made = away(monkeypatch, LETTERS, output_dir=str(tmp_path), max_unscored_steps=2, checkpoint_every_n_steps=100)
    with pytest.raises(EngineLost, match=r"max_unscored_steps(.|\n)*the service is away"):
        collect(made)
    assert (tmp_path / "checkpoints" / "3").exists()


@pytest.mark.slow
def test_service_lost_by_some_trajectories_is_counted(monkeypatch):
    rows = collect(away(monkeypatch, "abcd"), batch_size=8)
    assert [row["train/turns/unavailable_frac"] > 0 for row in rows] == [False, False, True, True]
    assert all(row["train/turns/unavailable_frac"] == row["train/reward/error_frac"] < 1 for row in rows)


@pytest.mark.slow
def test_a_wrong_configuration_stops_the_run(monkeypatch):
    """The run also stops if the error occurs for some trajectories only, unless a timeout may be the cause."""
    monkeypatch.setattr(Away, "error", EnvironmentMisconfigured)
    with pytest.raises(EnvironmentMisconfigured, match="^the service is away.$"):
        collect(away(monkeypatch, "ab"), batch_size=8)
    made = away(monkeypatch, "ab")
    made.player.overtime = True
    assert collect(made, batch_size=8)[3]["train/reward/error_frac"] > 0


@pytest.mark.slow
def test_limits_of_turns_and_observations():
    class Endless(Vowels):
        def step(self, completion):
            return "abc" * (20 if self.answer[0] in "bd" else 1), 0.5, False

    row = collect(learner(Endless, EnvironmentConfig(max_turns=2, max_observation_tokens=40)))[0]
    assert row["train/turns/max"] == 2 and row["train/turns/limited_frac"] > 0
    assert row["train/turns/cut_observations"] > 0
    config = EnvironmentConfig(max_turns=2, max_observation_tokens=6, overlong_observation="unscored")
    row = collect(learner(Endless, config), batch_size=8)[0]
    assert 0 < row["train/reward/error_frac"] <= 0.25 and row["train/turns/cut_observations"] == 0


@pytest.mark.slow
def test_first_observations_are_part_of_the_prompt():
    class Opens(Vowels):
        def reset(self, answer, **columns):
            super().reset(answer)
            return answer[:1]

    made = learner(Opens)
    prompts, generate = [], made.engine.generate
    made.engine.generate = lambda params, requests, *rest: (
        prompts.extend(request.tokens for request in requests) or generate(params, requests, *rest)
    )
    collect(made)
    texts = [TOKENIZER.decode(tokens) for tokens in prompts]
    expected = {row["prompt"] + row["answer"][0] for row in ROWS}
    assert {text.replace(" ", "") for text in texts} <= {text.replace(" ", "") for text in expected}

    class Random(Vowels):
        made = 0

        def reset(self, answer, **columns):
            Random.made += 1
            return str(Random.made % 3)

    with pytest.raises(UserError, match="first observations of the trajectories of one row differ .* must depend"):
        collect(learner(Random))


@pytest.mark.slow
def test_evaluation_uses_the_environment():
    made = learner(eval_config=EvalConfig(samples=2, batch_size=3))
    found = made.evaluate(ROWS[:5])
    assert found.metrics["eval/turns/max"] == 3 and "eval/pass@2" in found.metrics
    assert len(found.texts) == 5 and found.rewards.shape == (5, 2)


@pytest.mark.slow
def test_lockstep_waits_for_all_replies(monkeypatch):
    """This includes a full cache with live rows: the next operation must not depend on time."""
    from tunix_like.environments.trajectories import Trajectories
    from tunix_like.rollout import schedule

    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    waits, replies = [], Trajectories.replies
    monkeypatch.setattr(Trajectories, "replies", lambda self, wait: waits.append(wait) or replies(self, wait))
    collect(learner(max_steps=1))
    assert len(waits) > 2 and all(waits)


def test_engine_without_turns_is_rejected():
    class Engine:
        max_prompt_length, row_steps = 16, 0

        def place(self, params):
            return params

        def generate(self, params, requests, key, sampling):
            raise AssertionError

    with pytest.raises(UserError, match="engine Engine: `generate` has no parameter `responder`"):
        learner(engine=Engine())


def test_functions_as_tools():
    """A turn without a call is the answer. The rewards come from functions."""

    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: the number.
        """
        return 2 * number

    with pytest.raises(UserError, match="tools need a chat template"):
        collect(learner([double]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environment": None}, "environment_config: it needs an environment"),
        ({"environment": object}, "has no method 'step'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(UserError, match=message):
        learner(**arguments)


def test_the_overlong_penalty_counts_sampled_tokens():
    algo = tunix_like.AlgorithmConfig(overlong="penalty", overlong_buffer=4)
    lengths = np.array([[6, 8]])
    np.testing.assert_allclose(shape_rewards(np.zeros((1, 2)), lengths, algo, 8, 1.0), [[-0.5, -1.0]])


def test_batch_contains_the_token_mask():
    tokens, lengths = np.zeros((1, 1, 4), np.int32), np.array([[3]], np.int32)
    mask = np.array([[[True, False, True, False]]])
    batch = GroupBatch(tokens[0], np.array([4]), tokens, lengths, None, lengths, lengths > 0, token_mask=mask)
    assert batch.sampled_lengths.tolist() == [[2]]


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        (
            Vowels,
            {"workers": 2},
            "environment_config.workers: it has no effect, because these environments do not run in",
        ),
        (Vowels, {"memory_gb": 1.0}, "give memory_gb to EnvironmentPool"),
        (
            Vowels,
            {"name": "guess"},
            "environment_config.name: it has no effect together with environment=...; remove it",
        ),
        (Vowels, {"arguments": {"a": 1}}, "environment_config.arguments: it has no effect"),
        ("pool", {"timeout_seconds": 5.0}, "environment_config.timeout_seconds: .*because the pool has 7; give"),
    ],
)
def test_settings_without_an_effect_are_rejected(environment, settings, message):
    if environment == "pool":
        environment = EnvironmentPool("guess", workers=2, timeout_seconds=7.0, memory_gb=0.7)
    with pytest.raises(UserError, match=message):
        learner(environment, EnvironmentConfig(**settings))


def test_settings_of_the_pool_itself_are_accepted():
    pool = EnvironmentPool("guess", workers=2, timeout_seconds=7.0, memory_gb=0.7)
    made = learner(pool, EnvironmentConfig(workers=2, timeout_seconds=7.0, memory_gb=0.7, name="guess"))
    assert made.player.environments is pool
    pool.close()
