"""Tests that N uninterrupted steps are bitwise equal to k steps and N - k resumed ones: weights, optimizer, keys, data
position, metrics and completions, for every learner, for every k, and for data from worker processes."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import grain.python as grain
import jax
import numpy as np
import optax
import pytest
from absl import flags

import tunix_like
from tests.tiny_model import HF
from tunix_like import Curriculum, EvalConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.config.schema import MeshConfig
from tunix_like.data import reverse_text
from tunix_like.models.sharding import build_mesh
from tunix_like.storage import run_lock
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.storage.run_lock import owned
from tunix_like.training.learners import LEARNERS

pytestmark = pytest.mark.slow

STEPS = 4
ROWS = [reverse_text.record(a + b) for a in "abcd" for b in "ef"]

OPTIONS = {
    "grpo": {"beta": 0.05},
    "drgrpo": {"num_iterations": 2},
    "rloo": {"beta": 0.05},
    "maxrl": {"dynamic_sampling": True},
    "maxpo": {"k": 2},
    "maxk_mix": {"alpha": {"start": 0.0, "end": 1.5, "steps": 4}},
    "order_statistic": {"k": {"start": 1, "end": 3, "steps": 3}, "statistic": "top_mean:1"},
    "pkpo": {"k": 2},
    "passk": {"k": 2},
    "opo": {"entropy_coef": 0.01},
    "reinforce_pp": {"sampler_is": "token"},
    "otb": {"beta": 0.05},
    "ppo": {"num_iterations": 2, "beta": 0.05},
    "distillation": {},
    "gdpo": {},
}
"""Every learner with its estimator, each with another option that adds state or random numbers."""


class Judge:
    """Counts the calls of the reward function, and has the numbers of those that return no rewards."""

    calls, fails = 0, frozenset()


JUDGE = Judge()


def zero_or_one(prompts, completions, **columns):
    JUDGE.calls += 1
    if JUDGE.calls in JUDGE.fails:
        return [None] * len(completions)
    return [float(sum(map(ord, text)) % 3 == 0) for text in completions]


def train(name, folder, steps, data=ROWS, optimizer=None, staleness=0, reward=zero_or_one, curriculum=None, **training):
    JUDGE.calls = 0
    kind = LEARNERS[name]
    devices = 4 if staleness else None
    teacher = {"teacher": tunix_like.load_model(HF, init="random", seed=1)[0]} if name == "distillation" else {}
    learner = kind(
        model=tunix_like.load_model(HF, init="random")[0],
        tokenizer=reverse_text.tokenizer(),
        reward_fns=reward,
        algo_config=kind.config_class(num_generations=4, **OPTIONS[name]),
        rollout_config=RolloutConfig(
            max_prompt_length=8, max_tokens_to_generate=4, max_staleness=staleness, devices=devices
        ),
        mesh=build_mesh(MeshConfig(), jax.devices()[:-devices]) if devices else None,
        training_config=RLTrainingConfig(
            max_steps=steps,
            output_dir=str(folder),
            checkpoint_every_n_steps=1,
            max_checkpoints_to_keep=steps,
            eval_every_n_steps=2,
            log_rollouts_every_n_steps=1,
            mini_batch_size=2 if name == "drgrpo" else None,
            actor_optimizer=optimizer or OptimizerConfig(learning_rate=1e-2),
            **training,
        ),
        eval_config=EvalConfig(samples=2, k=[1]),
        **teacher,
    )
    # An evaluation compiles additional programs, so only some of the learners evaluate.
    evaluated = ROWS[:2] if name in ("grpo", "maxrl") else None
    learner.train(data, evaluated, batch_size=4, curriculum=curriculum)


def as_killed_after(step, whole, folder, steps=STEPS):
    """Creates the folder of a run that was killed in the step after `step`, after the completions and metrics of later
    steps were written."""
    shutil.copytree(whole, folder)
    for later in range(step + 1, steps + 1):
        shutil.rmtree(folder / "checkpoints" / str(later))


def outcome(folder, steps=STEPS):
    """Returns the whole result of a run, except times."""
    clocks = ("train/time/", "train/sampler_time/", "train/perf/", "train/step_time_sec")
    metrics = [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in metric_rows(folder)]
    texts = {path.name: path.read_text() for path in (folder / "rollouts").glob("*.jsonl")}
    assert metrics[-1]["step"] == steps and len(texts) == steps
    with Checkpoints(folder / "checkpoints") as checkpoints:
        tree = checkpoints._checkpointer.metadata(folder / "checkpoints" / str(steps)).item_metadata["state"].tree
        state, meta = checkpoints.restore(steps, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree))
    place = json.loads((folder / "checkpoints" / str(steps) / "iterator" / "metadata").read_text())
    return metrics, texts, meta, place, jax.tree.map(np.asarray, state)


def assert_same(one, two):
    assert one[:-1] == two[:-1]
    assert set(one[-1]) - {"curriculum", "critic"} == {"params", "opt_state", "drawn"}
    jax.tree.map(np.testing.assert_array_equal, one[-1], two[-1])


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_resumes_bitwise(name, tmp_path):
    train(name, tmp_path / "whole", STEPS)
    for killed_after in range(1, STEPS) if name == "maxrl" else [2]:
        parts = tmp_path / str(killed_after)
        as_killed_after(killed_after, tmp_path / "whole", parts)
        train(name, parts, STEPS)
        assert_same(outcome(parts), outcome(tmp_path / "whole"))
    rewards = [row["train/rewards/mean"] for row in metric_rows(tmp_path / "whole")[-STEPS:]]
    assert len(set(rewards)) > 1, "steps differ"


def test_a_run_with_a_curriculum_resumes_bitwise(tmp_path):
    curriculum = Curriculum(floor=0.3)
    train("rloo", tmp_path / "whole", STEPS, curriculum=curriculum)
    as_killed_after(2, tmp_path / "whole", tmp_path / "parts")
    train("rloo", tmp_path / "parts", STEPS, curriculum=curriculum)
    whole = outcome(tmp_path / "whole")
    assert_same(outcome(tmp_path / "parts"), whole)
    assert (whole[-1]["curriculum"] > 0).any(axis=1).sum() > 4, "more prompts were drawn than those of one batch"
    with pytest.raises(UserError, match="curriculum"):
        train("rloo", tmp_path / "parts", STEPS + 1)


@pytest.mark.parametrize(("name", "staleness"), [("reinforce_pp", 1), ("reinforce_pp", 4), ("maxrl", 2), ("maxrl", 4)])
def test_runs_with_older_weights_resume_bitwise(name, staleness, tmp_path):
    """The checkpoint has the groups that older weights had sampled for the steps after it. `maxrl` samples
    dynamically."""
    steps = staleness + 4
    train(name, tmp_path / "whole", steps, staleness=staleness)
    whole = outcome(tmp_path / "whole", steps)
    rows = [row for row in whole[0] if "train/loss" in row]
    assert [row["train/staleness"] for row in rows] == [min(step, staleness) for step in range(steps)]
    assert len({row["train/rewards/mean"] for row in rows}) > 1, "steps differ"
    for killed_after in (1, staleness + 1):
        parts = tmp_path / str(killed_after)
        as_killed_after(killed_after, tmp_path / "whole", parts, steps)
        train(name, parts, steps, staleness=staleness)
        assert_same(outcome(parts, steps), whole)


def rewards_after_the_first_step(folder):
    return [row["train/rewards/mean"] for row in metric_rows(folder) if row.get("step", 0) > 1 and "train/loss" in row]


def test_groups_with_rewards_of_an_earlier_function_are_sampled_again(tmp_path):
    def hundred(prompts, completions, **columns):
        return [100.0] * len(completions)

    hundred.__name__ = zero_or_one.__name__
    train("reinforce_pp", tmp_path / "whole", STEPS, staleness=2, reward=hundred)
    as_killed_after(1, tmp_path / "whole", tmp_path / "parts")
    train("reinforce_pp", tmp_path / "parts", STEPS, staleness=2)
    found = rewards_after_the_first_step(tmp_path / "parts")
    assert len(found) == STEPS - 1 and max(found) <= 1


def test_groups_that_nothing_has_scored_are_sampled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(JUDGE, "fails", {2, 3})
    train("reinforce_pp", tmp_path / "whole", STEPS, staleness=2)
    assert [mean is None for mean in rewards_after_the_first_step(tmp_path / "whole")] == [True, True, False]
    monkeypatch.setattr(JUDGE, "fails", {})
    as_killed_after(1, tmp_path / "whole", tmp_path / "parts")
    train("reinforce_pp", tmp_path / "parts", STEPS, staleness=2)
    found = rewards_after_the_first_step(tmp_path / "parts")
    assert len(found) == STEPS - 1 and None not in found


def test_names_of_rewards_with_slashes_resume(tmp_path):
    reward = {"format/strict": zero_or_one, "other/strict": zero_or_one}
    for steps in (1, 2):
        train("rloo", tmp_path, steps, reward=reward)
    assert (tmp_path / "checkpoints" / "2").is_dir()


@pytest.mark.parametrize("kind", ["constant", "linear", "of one's own"])
def test_changed_length_logs_a_warning_if_the_schedule_depends_on_it(kind, tmp_path, caplog):
    own = optax.sgd(1e-2) if kind == "of one's own" else OptimizerConfig(learning_rate=1e-2, schedule=kind)
    for steps in (1, 2):
        assert "in the checkpoint: the schedule" not in caplog.text
        train("opo", tmp_path, steps, optimizer=own)
    assert ("the number of steps is now 2 and was 1 in the checkpoint" in caplog.text) is (kind == "linear")


def test_resumption_with_data_from_worker_processes(tmp_path):
    """The data is a grain `IterDataset` with a worker process that prefetches."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain's workers are started with absl's flags

    def data():
        rows = grain.MapDataset.source(ROWS).seed(3).shuffle().repeat().to_iter_dataset()
        return rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))

    train("rloo", tmp_path / "whole", STEPS, data())
    as_killed_after(2, tmp_path / "whole", tmp_path / "parts")
    train("rloo", tmp_path / "parts", STEPS, data())
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "whole"))
    prompts = [
        json.loads(line)["prompt"] for text in outcome(tmp_path / "whole")[1].values() for line in text.splitlines()
    ]
    assert set(prompts) == {row["prompt"] for row in ROWS}


def test_concurrent_runs_and_changed_settings_are_rejected(tmp_path, monkeypatch):
    """The error is raised before anything is compiled or written. It names the settings that differ, and no others."""
    train("rloo", tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    with ThreadPoolExecutor() as other, owned(tmp_path):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on"):
            other.submit(train, "rloo", tmp_path, STEPS).result()
    with pytest.raises(
        UserError, match="Different settings .checkpoint, now.:\n  seed: 0 -> 5\nUse another output_dir"
    ):
        train("rloo", tmp_path, STEPS, seed=5)
    with owned(tmp_path):
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "run.lock"}
    # The trace also has the restoration that found the difference.
    kept = [path for path in before if path.is_file() and "model" not in path.parts and path.name != "trace.json"]
    assert kept and all(after[path] == before[path] for path in kept)
