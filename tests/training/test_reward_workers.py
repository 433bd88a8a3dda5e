"""Tests training with failing reward functions: the step continues, metrics count the failures, and the weights equal
those of a run in which the function returned None."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.rewards import misbehaving
from tests.tiny_model import HF
from tunix_like import EvalConfig, MaxRLConfig, MaxRLLearner, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.config.schema import Config, DataConfig, RewardsConfig
from tunix_like.data import load_source, reverse_text
from tunix_like.rewards import Scores, pooled
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rollout.files import FirstFailure, saved_on_failure
from tunix_like.runs import reward_functions
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.types import Problem


def train(reward, rows, folder, eval_rows=None):
    """Trains two steps of two prompts with four completions each. Returns the weights and the rows of metrics."""
    model = tunix_like.load_model(HF, init="random")[0]
    learner = MaxRLLearner(
        model=model,
        tokenizer=reverse_text.tokenizer(),
        reward_fns={"parity": reward},
        algo_config=MaxRLConfig(num_generations=4),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(max_steps=2, actor_optimizer=optax.sgd(0.5), output_dir=str(folder)),
        eval_config=EvalConfig(samples=2, k=[1]),
    )
    learner.train(rows, eval_rows, batch_size=2, shuffle=False)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1])), metric_rows(folder)


def rows_of(*hang):
    return [
        reverse_text.record(text) | {"hang": each} for text, each in zip(("ab", "cd", "ef", "gh"), hang, strict=True)
    ]


def comparable(rows):
    own = ("time", "perf", "timeout_frac")
    return [{name: value for name, value in row.items() if not any(word in name for word in own)} for row in rows]


@pytest.mark.slow
def test_hanging_reward_equals_a_reward_of_none(tmp_path, caplog):
    """One of the eight completions of step 1 hangs. The oracle is a run in which its reward is None."""
    chosen = []

    def oracle(prompts, completions, hang):
        if not chosen and "this" in hang:
            chosen.append(next(text for text in completions[:4] if completions.count(text) == 1))
        this = [named == "this" and text == chosen[0] for text, named in zip(completions, hang, strict=True)]
        return [None if no else float(len(text) % 2) for text, no in zip(completions, this, strict=True)]

    eval_rows = rows_of(None, None, None, None)
    expected, rows = train(oracle, rows_of("this", None, None, None), tmp_path / "none", eval_rows)
    functions = pooled({"parity": misbehaving.parity}, workers=2, timeout_seconds=1.0)
    began = time.monotonic()
    found, got = train(functions["parity"], rows_of(chosen[0], None, None, None), tmp_path / "hangs", eval_rows)
    assert time.monotonic() - began < 120
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert comparable(got) == comparable(rows)
    assert [row["train/reward/timeout_frac"] for row in got[1:]] == [1 / 8, 0]
    assert [row["train/reward/unscored_frac"] for row in got[1:]] == [1 / 8, 0]
    assert all(row["train/reward/error_frac"] == 0 for row in got[1:])
    assert got[0]["eval/timeout_frac"] == got[0]["eval/error_frac"] == got[0]["eval/unscored_frac"] == 0
    assert any(row["train/grad_norm"] > 0 for row in got[1:])
    shown = (tmp_path / "hangs" / "rollouts" / "reward_failure.txt").read_text()
    assert "'parity': the call did not return within" in shown and f"Completion: {chosen[0]!r}" in shown
    assert [
        record.message.count("Only the first failure is shown")
        for record in caplog.records
        if "unscored" in record.message
    ] == [1]
    assert not functions["parity"].pool.idle, "no worker outlives the training"


def test_failure_of_all_rewards_in_step_1_stops_the_run(tmp_path):
    functions = pooled([misbehaving.raises], workers=1)
    with pytest.raises(
        UserError, match="no completion could be scored(.|\n)*raised ZeroDivisionError: no verifier"
    ) as e:
        train(functions["raises"], rows_of(None, None, None, None), tmp_path)
    file = tmp_path / "rollouts" / "step_000001.jsonl"
    assert str(file) in str(e.value) and len(file.read_text().splitlines()) == 8
    assert not functions["raises"].pool.idle


@pytest.mark.slow
def test_later_exception_of_a_reward_is_counted(tmp_path):
    """The function runs in this process and fails for one prompt of step 2. Its group has no reward; the other group is
    unaffected."""

    def reward(prompts, completions, hang):
        if "bad" in hang:
            raise KeyError("gold")
        return [float(len(text) % 2) for text in completions]

    _, rows = train(reward, rows_of(None, None, None, "bad"), tmp_path)
    assert [row["train/reward/error_frac"] for row in rows] == [0, 1 / 2]
    assert [row["train/reward/unscored_frac"] for row in rows] == [0, 1 / 2]
    kept = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert "reward" in kept and "KeyError" in (tmp_path / "rollouts" / "reward_failure.txt").read_text()


def failed(text):
    return Scores(np.array([np.nan]), {}, np.array([True]), np.array([False]), np.array([True]), text)


def test_failure_with_undecodable_bytes_is_shown(tmp_path, caplog):
    """The message contains a file name in Latin-1, as Python decodes it: a lone surrogate, which UTF-8 cannot
    encode."""
    FirstFailure()(failed("ValueError: " + os.fsdecode(b"caf\xe9.txt")), tmp_path)
    shown = (tmp_path / "reward_failure.txt").read_text(encoding="utf-8")
    assert shown == "ValueError: caf\\udce9.txt\n" and shown in caplog.text.encode().decode()


@contextlib.contextmanager
def full_disk():
    """Limits the file size to zero. It is not a fixture, because pytest writes between the end of a test and that of
    its fixtures."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failure_is_logged_on_a_full_disk(tmp_path, caplog):
    with full_disk():
        FirstFailure()(failed("ValueError: no verifier"), tmp_path / "rollouts")
    assert "ValueError: no verifier" in caplog.text and "reward_failure.txt (" in caplog.text


def test_full_disk_does_not_replace_the_error_of_scoring(tmp_path, caplog):
    problems = [Problem(0, "p", [1], {})]
    kept = saved_on_failure(tmp_path, 3, problems, ["a", "b"])
    with full_disk(), pytest.raises(UserError, match="^no verifier$"), kept:
        raise UserError("no verifier")
    assert "cannot write the completions of step 3" in caplog.text


def test_which_functions_run_in_workers(tmp_path, monkeypatch):
    """By default functions that may hang or crash. With a number of workers all functions, and none with 0."""
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    named = [{"name": "exact_match"}, {"name": "mine.py:f", "weight": 0.5}]

    def chosen(**settings):
        config = Config(
            data=DataConfig(name="reverse_text", train_size=4, eval_size=2),
            rewards=RewardsConfig(functions=named, **settings),
        )
        return reward_functions.reward_functions(config, load_source(config.data))

    def pools(found):
        return [isinstance(function, PooledFunction) for _, function, _ in found]

    found = chosen(timeout_seconds=7, memory_gb=2)
    assert pools(found) == [False, True] and [(name, weight) for name, _, weight in found] == [
        ("exact_match", 1.0),
        ("mine.py:f", 0.5),
    ]
    pool = found[1][1].pool
    assert (pool.supervisor.timeout_seconds, pool.supervisor.memory_gb) == (7, 2) and 1 <= pool.workers <= 4
    assert pools(chosen(workers=0)) == [False, False]
    every = chosen(workers=3)
    assert pools(every) == [True, True] and every[0][1].pool.workers == 3 and every[0][1].pool is every[1][1].pool
