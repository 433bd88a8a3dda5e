"""Tests `rollout.max_staleness`: each step is trained on completions that were sampled during an earlier step."""

import dataclasses
import itertools
import logging
import threading
import time

import jax
import numpy as np
import optax
import pytest

from tests.training import test_history
from tests.training.small_learner import ROWS, NotASequence, assert_same, collect, differ, make, make_model, varied
from tunix_like import EvalConfig, MaxRLConfig, RolloutConfig, UserError
from tunix_like.config.load import load
from tunix_like.config.schema import MeshConfig
from tunix_like.errors import EngineLost
from tunix_like.models.sharding import build_mesh
from tunix_like.runs.checks import check_config

SAMPLING = 4
LENGTHS = {"max_prompt_length": 8, "max_tokens_to_generate": 4}
CORRECTED = MaxRLConfig(num_generations=4, sampler_is="token")


def stale(engine=None, reward=varied, algo=CORRECTED, staleness=1, **settings):
    """Returns a learner on four devices, with four others for sampling."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:-SAMPLING])
    rollout = RolloutConfig(**LENGTHS, max_staleness=staleness, devices=SAMPLING)
    return make(algo, reward=reward, rollout=rollout, mesh=mesh, model=make_model(), engine=engine, **settings)


def on_host(params):
    return jax.tree.map(np.array, params)


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_sampling_weights_are_older_by_the_logged_staleness(staleness):
    """Step n is sampled with the weights after the update of step n - 1 - staleness, or the initial ones. The weights
    of the sampler are on separate devices, which never hold two versions."""
    steps, sampling = staleness + 3, set(jax.devices()[-SAMPLING:])
    learner, placed, used, rows = stale(staleness=staleness, max_steps=steps), [], [], []
    place, generate = learner.engine.place, learner.engine.generate
    trained = [on_host(learner.params)]
    shape = learner.params["embed_tokens"]["embedding"].shape

    def watched(params):
        placed.append(on_host(params))
        out = place(params)
        held = [x for x in jax.live_arrays() if x.shape == shape and x.sharding.device_set == sampling]
        assert len(held) == 1, "weights of an older version are still there"
        return out

    def sampled(*arguments):
        used.append(placed[-1])
        yield from generate(*arguments)

    learner.engine.place, learner.engine.generate = watched, sampled
    learner._listeners[0] = lambda row, total: (rows.append(dict(row)), trained.append(on_host(learner.params)))
    learner.train(ROWS, batch_size=4)
    versions = [max(0, number - staleness) for number in range(steps)]
    assert [row["train/staleness"] for row in rows] == [number - version for number, version in enumerate(versions)]
    assert len(used) == steps and len(placed) == len(set(versions))
    for weights, version in zip(used, versions, strict=True):
        assert_same(weights, trained[version])
    assert all(differ(one, two) for one, two in itertools.pairwise(trained))
    assert all(row["train/time/trainer_idle"] >= 0 and row["train/sampler_time/idle"] >= 0 for row in rows)
    gaps = [row["train/logprob_gap/max"] for row in rows]
    assert gaps[0] < 1e-4 < min(gaps[1:]), "the sampler's log-probabilities are those of its own weights"


def test_rewards_of_a_step_are_computed_while_later_steps_are_sampled():
    """The rewards of a step wait until the next step is sampled, so this would not end with one thread for both. The
    first step is collected alone."""
    begun, waited = [threading.Event() for _ in range(7)], []
    engine = stale().engine
    generate, calls = engine.generate, itertools.count()

    def sampled(*arguments):
        begun[next(calls)].set()
        yield from generate(*arguments)

    def reward(prompts, completions, answer):
        number = len(waited)
        waited.append(number in (0, 5) or begun[number + 1].wait(60))
        return varied(prompts, completions, answer)

    engine.generate = sampled
    learner = stale(engine=engine, reward=reward, staleness=2, max_steps=6)
    learner.train(ROWS, batch_size=4)
    assert waited == [True] * 6


@pytest.mark.slow
def test_staleness_0_on_other_devices_equals_the_synchronous_run():
    apart = stale(staleness=0, max_steps=3)
    mesh = build_mesh(MeshConfig(), jax.devices()[:-SAMPLING])
    together = make(CORRECTED, reward=varied, mesh=mesh, model=make_model(), max_steps=3)
    for one, two in zip(collect(apart, batch_size=4), collect(together, batch_size=4), strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], rel=1e-5)
        assert one["train/rewards/mean"] == two["train/rewards/mean"]


def watching(seen):
    def reward(prompts, completions, answer):
        seen.append(list(prompts))
        return varied(prompts, completions, answer)

    return reward


@pytest.mark.slow
@pytest.mark.parametrize("data", [ROWS, NotASequence()])
def test_a_resumed_run_has_the_same_prompts(data, tmp_path):
    """Groups that were collected ahead of a checkpoint are kept. If the position in the data cannot be saved, they are
    collected again, with the current weights. No prompt is omitted."""
    seen, parts = [], []
    collect(stale(reward=watching(seen), max_steps=7, staleness=2), data, batch_size=4)
    assert len(seen) == 7, "nothing is sampled after the last step"
    settings = {"output_dir": str(tmp_path / "run"), "checkpoint_every_n_steps": 1, "staleness": 2, "max_steps": 7}

    class Stop(KeyboardInterrupt):
        pass

    def stop(row, total):
        if row["step"] == 3:
            raise Stop

    first = stale(reward=watching(parts), **settings)
    first._listeners[0] = stop
    with pytest.raises(Stop):
        first.train(data, batch_size=4)
    kept = 4 if data is ROWS else 2  # step 3 was not saved; steps 3 and 4 were collected at the checkpoint of step 2
    del parts[kept:]
    rows = collect(stale(reward=watching(parts), **settings), data, batch_size=4)
    assert [row["step"] for row in rows] == [3, 4, 5, 6, 7]
    assert [row["train/staleness"] for row in rows] == [2] * 5 if data is ROWS else [0, 1, 2, 2, 2]
    assert parts == seen


@pytest.mark.slow
def test_an_interrupted_run_without_a_folder_continues_with_the_next_prompts():
    """After Ctrl-C in a notebook, the next call of `train` samples again the prompts that were sampled ahead."""
    seen, parts = [], []
    collect(stale(reward=watching(seen), max_steps=4), batch_size=4)
    learner = stale(reward=watching(parts), max_steps=2)

    def interrupt(row, total):
        if row["step"] == 1:
            while len(parts) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt

    learner._listeners[0] = interrupt
    with pytest.raises(KeyboardInterrupt):
        learner.train(ROWS, batch_size=4)
    del parts[1:]
    rows = collect(learner, batch_size=4)
    assert [row["step"] for row in rows] == [2, 3]
    assert parts == seen[:3]


@pytest.mark.slow
def test_evaluation_uses_the_weights_of_its_step():
    """The evaluation of a step uses the weights of this step, as in a run without staleness."""
    learner = stale(max_steps=3, eval_config=EvalConfig(samples=2), eval_every_n_steps=1)
    found = []
    evaluate = learner.evaluate_if_due

    def watched(step, last):
        out = evaluate(step, last)
        found.append((out, learner.evaluator(ROWS[:4])(learner.params, step=step).metrics))
        return out

    learner.evaluate_if_due = watched
    learner.train(ROWS, ROWS[:4], batch_size=4)
    assert len(found) == 4
    for one, two in found:
        assert one["eval/rewards/mean"] == two["eval/rewards/mean"]


class Fails:
    """The engine of a learner, with an exception in call number `at` of `generate`."""

    def __init__(self, engine, at, error):
        self.inner, self.at, self.error, self.calls = engine, at, error, 0
        self.max_prompt_length = 8

    @property
    def row_steps(self):
        return self.inner.row_steps

    def place(self, params):
        return self.inner.place(params)

    def generate(self, *arguments):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        yield from self.inner.generate(*arguments)


def test_errors_of_the_sampling_end_the_run():
    engine = Fails(stale().engine, 3, ValueError("in the thread"))
    learner, rows = stale(engine=engine, max_steps=5), []
    learner._listeners[0] = lambda row, total: rows.append(dict(row))
    with pytest.raises(ValueError, match="in the thread"):
        learner.train(ROWS, batch_size=4)
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_lost_engine_leaves_a_checkpoint(staleness, tmp_path):
    seen, whole = [], []
    settings = {
        "output_dir": str(tmp_path / "run"),
        "checkpoint_every_n_steps": 100,
        "max_steps": 5,
        "staleness": staleness,
    }
    engine = Fails(stale().engine, 4, EngineLost("gone"))
    with pytest.raises(EngineLost, match="gone"):
        stale(engine=engine, reward=watching(seen), **settings).train(ROWS, batch_size=4)
    assert (tmp_path / "run" / "checkpoints" / "3").exists()
    rows = collect(stale(reward=watching(seen), **settings), batch_size=4)
    assert [row["step"] for row in rows] == [4, 5]
    collect(stale(reward=watching(whole), max_steps=5), batch_size=4)
    assert seen == whole


@pytest.mark.slow
def test_end_of_a_run_cancels_sampling_ahead():
    class Slow(Fails):
        """Its third call yields a sample every 0.1 s."""

        def generate(self, *arguments):
            self.calls, self.yielded = self.calls + 1, 0
            for sample in self.inner.generate(*arguments):
                time.sleep(0.1 * (self.calls == 3))
                self.yielded += 1
                yield sample

    class Stop(KeyboardInterrupt):
        pass

    def stop(row, total):
        if row["step"] == 2:
            while engine.calls < 3 or not engine.yielded:
                time.sleep(0.01)
            raise Stop

    engine = Slow(stale().engine, None, None)
    learner = stale(engine=engine, max_steps=5)
    learner._listeners[0] = stop
    with pytest.raises(Stop):
        learner.train(ROWS, batch_size=4)
    assert engine.yielded < 8, "of 16"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_staleness_with_rewritten_histories(rate):
    """Tests `environment.history=template` with completions of the previous weights. With a rate of 0 these equal the
    current ones."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:-SAMPLING])
    lengths = dataclasses.replace(test_history.LENGTHS, max_staleness=1, devices=SAMPLING)
    algo = MaxRLConfig(num_generations=4, truncation_order=1, sampler_is="token")
    rows = collect(
        test_history.learner(algo=algo, lengths=lengths, mesh=mesh, max_steps=3, actor_optimizer=optax.sgd(rate)),
        test_history.ROWS,
    )
    assert [row["train/staleness"] for row in rows] == [0, 1, 1]
    gaps = [row["train/logprob_gap/max"] for row in rows]
    assert max(gaps) < 1e-4 if rate == 0 else gaps[0] < 1e-4 < min(gaps[1:])
    assert all(row["train/turns/rewritten"] > 0.2 for row in rows)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rollout.max_staleness=1"], "rollout.max_staleness: 1 needs devices that only sample; set rollout.devices"),
        (["rollout.max_staleness=3"], "rollout.max_staleness: 3 needs devices that only sample; set rollout.devices"),
        (
            ["rollout.max_staleness=1", "rollout.devices=1", "training.later_logprob_gap=error"],
            "training.later_logprob_gap: error has no effect with rollout.max_staleness: 1",
        ),
        (
            ["training.max_logprob_gap=null", "training.later_logprob_gap=error"],
            "training.later_logprob_gap: error needs a limit; set training.max_logprob_gap",
        ),
        (["rollout.max_staleness=-1"], "rollout.max_staleness: got -1; it must be at least 0"),
        (["rollout.max_staleness=1.5"], "rollout.max_staleness: .*1.5"),
        (
            ["rollout.engine=vllm", "rollout.urls=[http://a]", "rollout.devices=2"],
            "rollout.devices: it needs rollout.engine=local",
        ),
    ],
)
def test_invalid_settings_are_rejected(keys, message):
    with pytest.raises(UserError, match=message):
        check_config(load(None, ["data.name=reverse_text", "algorithm.advantage_estimator=rloo", *keys]))


def test_too_many_devices_are_rejected():
    from tunix_like.training.engine import training_devices

    with pytest.raises(UserError, match="rollout.devices: got 8, but there are 8 devices"):
        training_devices(RolloutConfig(devices=8))


@pytest.mark.slow
def test_run_without_correction_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tunix_like"):
        stale(algo=MaxRLConfig(num_generations=4))
    assert "nothing corrects the difference; set algorithm.sampler_is" in caplog.text
    caplog.clear()
    stale(algo=MaxRLConfig(num_generations=4, policy_loss_fn="vespo"))
    assert "nothing corrects" not in caplog.text, "the ratio of this loss is that to the sampler"
