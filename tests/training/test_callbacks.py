"""Tests callbacks in the loop: what they are told, what they can ask for, failures, resumption; the shipped ones."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest

import tunix_like
from tests.runs.test_recipe import SMALL, YAML
from tests.training.small_learner import ROWS, collect, make
from tests.training.test_loop import Counting, fail, go, run, run_control, saved, sums
from tunix_like import Callback, EarlyStopping, RateProbe, UserError
from tunix_like.config.load import load
from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import CallbackFailed
from tunix_like.runs.checks import check_config
from tunix_like.session.callbacks import check_callbacks, named_callbacks
from tunix_like.step.optimizer import build_schedule
from tunix_like.storage.metrics import MetricsLog, rows


class Told(Callback):
    """Records what it is told. `at` maps a step to the name of what it asks for."""

    def __init__(self, at=None):
        self.at, self.events = at or {}, []

    def on_begin(self, run, rows):
        self.events.append(("begin", [row["count/step"] for row in rows]))

    def on_row(self, run, row):
        self.events.append(("row", row["count/step"]))
        asked = getattr(run, self.at.get(run.step, ""), None)
        if asked is not None and "count/sum" in row:
            asked(*(["enough"] if self.at[run.step] == "stop" else []))

    def on_evaluation(self, run, row):
        self.events.append(("evaluation", row["count/step"]))

    def on_samples(self, run, samples):
        self.events.append(("samples", samples))

    def on_checkpoint(self, run, folder):
        assert (folder / "state").is_dir(), "it is complete"
        self.events.append(("checkpoint", int(folder.name)))

    def on_end(self, run):
        self.events.append(("end", run.step))


def of(told, *kinds):
    return [event for event in told.events if event[0] in kinds]


def test_events_of_a_run(tmp_path):
    told = Told()
    go(Counting(4, evaluate_every=4), tmp_path, callbacks=[told], every=3)
    assert of(told, "begin", "row", "evaluation", "end") == [
        ("begin", []), ("row", 0), ("evaluation", 0), ("row", 1), ("row", 2), ("row", 3), ("row", 4), ("evaluation", 4),
        ("end", 4),
    ]  # fmt: skip
    assert of(told, "checkpoint") == [("checkpoint", 3), ("checkpoint", 4)]
    again = Told()
    go(Counting(5), tmp_path, callbacks=[again])
    assert again.events[0] == ("begin", [0, 1, 2, 3, 4]) and of(again, "row") == [("row", 5)]


def test_samples_are_told_after_the_row_of_their_step():
    phase, told = Counting(2), Told()
    phase.at = {2: lambda: setattr(phase, "samples", ("best", "worst"))}
    run(phase, checkpoints=None, log=MetricsLog(None), checkpoint_every=9, callbacks=[told])
    assert told.events[2:] == [("row", 2), ("samples", ("best", "worst")), ("end", 2)]


def test_a_stop_ends_the_run_with_an_evaluation_and_counts_as_its_end(tmp_path, caplog):
    told = Told({3: "stop"})
    assert go(Counting(9, evaluate_every=5), tmp_path, callbacks=[told], every=100) == 3
    assert "stopped after step 3 of 9: enough" in caplog.text
    assert of(told, "evaluation") == [("evaluation", 0), ("evaluation", 3)] and told.events[-1] == ("end", 3)
    assert sums(tmp_path) == {1: 1, 2: 3, 3: 6} and saved(tmp_path) == [3]
    again = Counting(20)
    assert go(again, tmp_path) == 3 and again.seen == []


def test_an_evaluation_and_a_checkpoint_on_request(tmp_path):
    told = Told({1: "evaluate", 2: "save", 5: "evaluate"})
    go(Counting(6, evaluate_every=5), tmp_path, callbacks=[told], every=100)
    assert [step for _, step in of(told, "evaluation")] == [0, 1, 5, 6], "step 5 is evaluated once"
    assert saved(tmp_path) == [2, 6]


@pytest.mark.parametrize(
    "method, error",
    [
        ("on_row", KeyError(1)),
        ("on_evaluation", KeyError(1)),
        ("on_checkpoint", KeyError(1)),
        ("on_row", SystemExit(1)),
        ("on_row", asyncio.CancelledError(1)),
    ],
)
def test_an_error_names_the_callback_and_the_last_step_is_saved(tmp_path, method, error):
    class Mine(Told):
        pass

    def broken(self, run, given):
        if run.step >= 3:
            raise error

    setattr(Mine, method, broken)
    told = Mine()
    with pytest.raises(CallbackFailed, match=rf"callback Mine\.{method}: {type(error).__name__}: 1 \(test_callbacks"):
        go(Counting(9, evaluate_every=1), tmp_path, callbacks=[told], every=2)
    done = len(sums(tmp_path))
    assert 3 <= done < 9 and saved(tmp_path)[-1] == done and told.events[-1] == ("end", done)
    assert go(Counting(9), tmp_path) == 9 and sums(tmp_path) == {n: n * (n + 1) // 2 for n in range(1, 10)}


def test_an_error_after_the_last_data_saves_the_last_step(tmp_path):
    class Mine(Callback):
        def on_evaluation(self, run, row):
            if run.step:
                raise ValueError("after the data")

    with pytest.raises(CallbackFailed, match="after the data"):
        go(Counting(9, data=3, evaluate_every=9), tmp_path, callbacks=[Mine()])
    assert saved(tmp_path)[-1] == 3


def test_an_error_at_the_end_does_not_hide_that_of_the_run(tmp_path, caplog):
    class Mine(Callback):
        def on_end(self, run):
            raise ValueError("at the end")

    with pytest.raises(CallbackFailed, match=r"Mine\.on_end: ValueError: at the end"):
        go(Counting(2), tmp_path / "a", callbacks=[Mine()])
    with pytest.raises(RuntimeError, match="the machine is gone"):
        go(Counting(2, at={2: fail}), tmp_path / "b", callbacks=[Mine()])
    assert "at the end" in caplog.text and saved(tmp_path / "a") == [2]


class Noisy(Counting):
    """Has a metric that improves only sometimes."""

    values = np.random.default_rng(3).normal(size=60).round(2).tolist()

    def step(self, step):
        return super().step(step) | {"noisy": self.values[step]}


def stop_of(values, patience, sign, delta):
    """Returns the first step at which `patience` values in a row were not better than the best before them."""
    for step in range(1, len(values)):
        best, waited = None, 0
        for value in values[1 : step + 1]:
            if best is None or sign * (value - best) > delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited >= patience:
            return step
    return None


@pytest.mark.parametrize(
    ("mode", "patience", "delta"),
    [("max", 3, 0.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("min", 5, 0.0), ("max", 2, 0.5)))],
)
def test_early_stopping_of_a_resumed_run_is_that_of_the_uninterrupted_run(tmp_path, mode, patience, delta):
    expected = stop_of(Noisy.values, patience, 1 if mode == "max" else -1, delta)

    def stopping():
        return [EarlyStopping("count/noisy", patience, mode, delta)]

    assert go(Noisy(50), tmp_path / "whole", callbacks=stopping()) == expected
    for broken in range(2, expected + 1):
        folder = tmp_path / str(broken)
        with pytest.raises(RuntimeError):
            go(Noisy(50, at={broken: fail}), folder, callbacks=stopping(), every=2)
        assert go(Noisy(50), folder, callbacks=stopping(), every=2) == expected, broken


def test_early_stopping_ignores_rows_without_a_number():
    stopping, run = EarlyStopping("eval/x", patience=2), run_control(9, step=1)
    run.trainer.training = type("T", (), {"eval_every_n_steps": 2})
    stopping.on_begin(run, [{"eval/x": 1.0}, {"eval/x": None}, {"train/loss": 3.0}, {"eval/x": 0.5}])
    stopping.on_row(run, {"eval/x": float("nan")})
    assert not run.asked
    stopping.on_row(run, {"eval/x": 1.0})
    assert "stop" in run.asked


def test_early_stopping_waits_for_the_next_evaluation_of_a_resumed_run():
    """Other processes than 0 have no earlier rows, and evaluations may begin with the resumption."""
    stopping, run = EarlyStopping("eval/x"), run_control(99, step=15)
    run.trainer.training = type("T", (), {"eval_every_n_steps": 10})
    stopping.on_begin(run, [])
    for run.trainer.done in range(16, 20):
        stopping.on_row(run, {"train/loss": 0.5})
    run.trainer.done = 20
    with pytest.raises(UserError, match="eval/x"):
        stopping.on_row(run, {"train/loss": 0.5})


@pytest.mark.parametrize(
    ("metric", "every", "message"),
    [("eval/pass@1", None, "set training.eval_every_n_steps"), ("train/los", None, "Did you mean 'train/loss'")],
)
def test_early_stopping_rejects_a_metric_that_no_row_has(metric, every, message):
    stopping, run = EarlyStopping(metric), run_control(9)
    run.trainer.training = type("T", (), {"eval_every_n_steps": every})
    with pytest.raises(UserError, match=message):
        stopping.on_begin(run, [])
        run.trainer.done = 1
        stopping.on_row(run, {"step": 1, "train/loss": 0.5})


def test_early_stopping_rejects_a_metric_that_the_evaluation_before_training_lacks():
    stopping, run = EarlyStopping("eval/pass@2"), run_control(9)
    run.trainer.training = type("T", (), {"eval_every_n_steps": 4})
    stopping.on_begin(run, [])
    with pytest.raises(UserError, match="step 0 has the metric 'eval/pass@2'. Did you mean 'eval/pass@1'"):
        stopping.on_row(run, {"step": 0, "eval/pass@1": 0.5})


def test_early_stopping_waits_for_what_an_environment_reports_in_some_episodes():
    stopping, run = EarlyStopping("eval/environment/turns"), run_control(9)
    run.trainer.training = type("T", (), {"eval_every_n_steps": 4})
    stopping.on_begin(run, [])
    stopping.on_row(run, {"step": 0, "eval/pass@1": 0.5})
    run.trainer.done = 4
    stopping.on_row(run, {"step": 4, "eval/environment/turns": 2.0})
    assert not run.asked


@pytest.mark.parametrize("collapse", [40, None])
def test_rate_probe_finds_the_rate_at_which_the_reward_collapses(collapse, capsys):
    """The reward rises with noise, and falls quickly from a step on."""
    config = OptimizerConfig(1e-6, "exponential", end_fraction=1e4)
    for seed in range(15):
        noise = np.random.default_rng(seed).normal(size=80)
        probe, run = RateProbe(), run_control(80)
        run.trainer.schedule = schedule = build_schedule(config, 80)
        probe.on_begin(run, [])
        for step in range(80):
            reward = min(step, 30) / 60 + 0.03 * noise[step] - (0 if collapse is None else max(0, step - collapse) / 10)
            probe.on_row(run, {"train/learning_rate": float(schedule(step)), "train/rewards/mean": reward})
            if run.asked:
                break
        probe.on_end(run)
        if collapse is None:
            assert probe.unstable is None and probe.stable == pytest.approx(float(schedule(79)), rel=1)
        else:
            assert float(schedule(collapse - 8)) < probe.stable < float(schedule(collapse + 6))
            assert float(schedule(collapse)) < probe.unstable < float(schedule(collapse + 12))
    assert "stable learning rates: up to" in capsys.readouterr().out


def test_rate_probe_means_leave_out_steps_without_an_update(capsys):
    """Such a step has no trained token, so no entropy (NaN)."""
    probe, run = RateProbe(), run_control(20)
    run.trainer.schedule = build_schedule(OptimizerConfig(schedule="exponential", end_fraction=10), 20)
    probe.on_begin(run, [])
    for step in range(20):
        entropy = math.nan if step % 2 else 1.25
        probe.on_row(run, {"train/learning_rate": 1e-6, "train/rewards/mean": 0.5, "train/entropy": entropy})
    probe.on_end(run)
    out = capsys.readouterr().out
    assert out.count("1.25") == 10 and "nan" not in out


def test_rate_probe_needs_a_rising_rate_and_stops_at_an_update_that_is_not_finite():
    probe, run = RateProbe(), run_control(9)
    run.trainer.schedule = build_schedule(OptimizerConfig(schedule="cosine"), 9)
    with pytest.raises(UserError, match="schedule=exponential"):
        probe.on_begin(run, [])
    run.trainer.schedule = build_schedule(OptimizerConfig(schedule="exponential", end_fraction=10), 9)
    probe.on_begin(run, [{"train/learning_rate": 1e-6, "train/rewards/mean": 0.5, "train/update/skipped": 1.0}])
    probe.on_row(run, {"train/learning_rate": 2e-6, "train/rewards/mean": 0.5})
    assert probe.unstable == 1e-6 and "stop" in run.asked


def test_callbacks_are_named_in_the_configuration(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from tunix_like import Callback\n"
        "class Mine(Callback):\n    def __init__(self, wait=1): self.wait = wait\n"
        "class Other:\n    pass\n"
        "class Bad(Callback):\n    def __init__(self): raise OSError('no network')\n"
    )
    entries = [{"name": "early_stopping", "metric": "train/loss", "mode": "min"}, {"name": f"{file}:Mine", "wait": 3}]

    def made(entries):
        given = ["model.path=x", "algorithm.advantage_estimator=grpo", f"training.callbacks={json.dumps(entries)}"]
        return named_callbacks(check_config(load(None, given))[0].training.callbacks)

    stopping, mine = made(entries)
    assert (stopping.metric, stopping.sign, mine.wait) == ("train/loss", -1, 3)
    for entry, message in (
        ({"metric": "x"}, r"training.callbacks\[0\]: expected {name"),
        ({"name": "early_stoping"}, "Did you mean 'early_stopping'"),
        ({"name": "early_stopping"}, "needs a value for metric"),
        ({"name": "early_stopping", "metric": "x", "patence": 3}, "has no parameter 'patence'"),
        ({"name": "early_stopping", "metric": "x", "patience": 0}, "patience: got 0"),
        ({"name": f"{file}:Mien"}, "has no function 'Mien'; it has: .*Mine"),
        ({"name": f"{file}:Other"}, "got Other; give an object of a subclass of tunix_like.Callback"),
        ({"name": f"{file}:Bad"}, "OSError: no network"),
    ):
        with pytest.raises(UserError, match=message):
            made([entry])


def test_rows_that_a_callback_sees_are_those_of_the_file(tmp_path):
    seen = []
    go(Counting(3, evaluate_every=2), tmp_path, seen=seen)
    assert seen == rows(tmp_path)


@pytest.mark.slow
def test_callbacks_of_a_learner_and_of_its_settings(tmp_path):
    """A callback samples with the weights of its step, and those of `training.callbacks` act too."""

    class Sampling(Callback):
        texts, seen = [], []

        def on_row(self, run, row):
            self.texts.append(run.trainer.generate(["ab>"], temperature=0))

        def on_samples(self, run, samples):
            self.seen.append((run.step, samples.size))

    stopping = [{"name": "early_stopping", "metric": "train/update/empty", "patience": 3}]
    given = {"max_steps": 9, "output_dir": str(tmp_path), "callbacks": stopping, "log_samples_every_n_steps": 2}
    make(**given).train(ROWS, batch_size=4, callbacks=[Sampling()])
    assert len(Sampling.texts) == 4, "the first value is the best, and three are not better"
    assert Sampling.seen == [(1, 4), (2, 4), (4, 4)]
    found = collect(make(**given))
    assert found == [] and [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_callbacks_of_a_run_are_not_told_of_sft_unless_they_show_progress(tmp_path):
    class Names(Callback):
        def __init__(self):
            self.names = []

        def on_row(self, run, row):
            self.names.append(run.trainer.name)

    class Display(Names):
        shows_progress = True

    names, display = Names(), Display()
    tunix_like.run(load(YAML, [*SMALL, f"training.output_dir={tmp_path}"]), callbacks=[names, display])
    assert set(names.names) == {"train"} and set(display.names) == {"sft", "train"}


def test_a_function_is_no_callback():
    for wrong in (lambda run, row: None, EarlyStopping):
        with pytest.raises(UserError, match="callbacks: got (function|type); give an object of a subclass of"):
            check_callbacks([wrong])
