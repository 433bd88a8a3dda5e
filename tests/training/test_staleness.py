"""Tests `rollout.max_staleness: 1`: each step is trained on completions that were sampled during the previous step."""

import dataclasses
import logging
import time

import jax
import numpy as np
import optax
import pytest

from tests.training import test_history
from tests.training.small_learner import ROWS, assert_same, collect, make, make_model, varied
from tunix_like import EvalConfig, MaxRLConfig, RolloutConfig, UserError
from tunix_like.config.load import load
from tunix_like.config.schema import MeshConfig
from tunix_like.errors import EngineLost
from tunix_like.models.sharding import build_mesh
from tunix_like.runs.build import check_config

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


def test_sampling_weights_are_one_update_older():
    """This holds from the second step on. The weights of the sampler are on separate devices."""
    learner, placed, trained = stale(max_steps=4), [], []
    place = learner.engine.place

    def watched(params):
        placed.append(on_host(params))
        out = place(params)
        assert jax.tree.leaves(out)[0].sharding.device_set == set(jax.devices()[-SAMPLING:])
        return out

    learner.engine.place = watched
    trained.append(on_host(learner.params))
    learner._listeners[0] = lambda row, total: (rows.append(dict(row)), trained.append(on_host(learner.params)))
    rows = []
    learner.train(ROWS, batch_size=4)
    assert [row["train/staleness"] for row in rows] == [0, 1, 1, 1]
    assert len(placed) == 4 and len(trained) == 5
    for weights, step in zip(placed, (0, 0, 1, 2), strict=True):
        assert_same(weights, trained[step])
    assert all(row["train/time/trainer_idle"] >= 0 and row["train/sampler_time/idle"] >= 0 for row in rows)
    gaps = [row["train/logprob_gap/max"] for row in rows]
    assert gaps[0] < 1e-4 < min(gaps[1:]), "the sampler's log-probabilities are those of its own weights"


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
def test_a_resumed_run_has_the_same_prompts(tmp_path):
    """Completions that were sampled ahead of a checkpoint are sampled again. No prompt is omitted."""
    seen, parts = [], []
    collect(stale(reward=watching(seen), max_steps=6), batch_size=4)
    assert len(seen) == 6, "nothing is sampled after the last step"
    settings = {"output_dir": str(tmp_path / "run"), "checkpoint_every_n_steps": 1}

    class Stop(Exception):
        pass

    def stop(row, total):
        if row["step"] == 3:
            raise Stop

    first = stale(reward=watching(parts), max_steps=6, **settings)
    first._listeners[0] = stop
    with pytest.raises(Stop):
        first.train(ROWS, batch_size=4)
    del parts[2:]  # step 3 was not saved, and step 4 was sampled ahead
    rows = collect(stale(reward=watching(parts), max_steps=6, **settings), batch_size=4)
    assert [row["step"] for row in rows] == [3, 4, 5, 6] and rows[0]["train/staleness"] == 0
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
def test_a_lost_engine_leaves_a_checkpoint(tmp_path):
    seen, whole = [], []
    settings = {"output_dir": str(tmp_path / "run"), "checkpoint_every_n_steps": 100, "max_steps": 5}
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

    class Stop(Exception):
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
        (["rollout.max_staleness=2"], "rollout.max_staleness: got 2; it must be at most 1"),
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


def test_run_without_correction_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tunix_like"):
        stale(algo=MaxRLConfig(num_generations=4))
    assert "nothing corrects the difference; set algorithm.sampler_is" in caplog.text
