"""Tests the learner through its public Python interface: required arguments, repeated calls, engines, metrics,
evaluations and resumption."""

import gc
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunix_like
from tests.parameters import others_slow
from tests.tiny_model import HF
from tunix_like import (
    CustomConfig,
    CustomLearner,
    EvalConfig,
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    RolloutConfig,
    UserError,
    register_advantage_estimator,
)
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training import learners

from .small_learner import (
    ADAMW,
    ROWS,
    SOURCES,
    TEXTS,
    TOKENIZER,
    assert_same,
    collect,
    differ,
    long_or_short,
    make,
    make_model,
    params_of,
    plain,
    varied,
    watch_sampler,
)


def test_four_arguments_are_enough(monkeypatch, tmp_path):
    """They are the model, the tokenizer, the rewards and the number of generations. All other settings have defaults,
    and no file is written."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def score(prompts, completions, answer, text):
        asked.append((len(prompts), prompts[:5], answer[0] == text[0][::-1]))
        return long_or_short(prompts, completions, answer)

    # With 64 positions the default lengths (512 + 256) do not fit. The error names the keys to lower.
    arguments = {"model": make_model(), "tokenizer": TOKENIZER, "reward_fns": [score]}
    with pytest.raises(UserError, match="max_prompt_length.*768.*64 positions .max_position_embeddings.. Lower them"):
        MaxRLLearner(**arguments, algo_config=MaxRLConfig(num_generations=4))
    arguments["model"] = tunix_like.load_model(HF | {"max_position_embeddings": 1024}, init="random")[0]
    before = params_of(arguments["model"])
    learner = MaxRLLearner(**arguments, algo_config=MaxRLConfig(num_generations=4))
    last = learner.train([{"prompt": f"{text}>", "answer": text[::-1], "text": text} for text in TEXTS])
    assert last["step"] == 1, "eight rows are one batch of eight, and one pass is one step"
    assert len(asked) == 1 and asked[0][0] == 32 and asked[0][2] and len(set(asked[0][1][:4])) == 1
    assert differ(params_of(arguments["model"]), before), "the model that was handed in is the trained one"
    assert_same(params_of(arguments["model"]), jax.tree.map(np.asarray, learner.params))
    assert list(tmp_path.iterdir()) == []


def test_estimator_is_traced_into_one_compiled_program(compiled, monkeypatch):
    """Advantage and loss are one program. The estimator is traced into it once and never gets a concrete value. It was
    traced on shapes alone before, when the learner was created."""
    seen, counts = [], []
    monkeypatch.setattr("tunix_like.algorithms.registry.ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))

    @register_advantage_estimator("half")
    def half(rewards, *, scored, lengths):
        seen.append([isinstance(x, jax.core.Tracer) for x in (rewards, scored, lengths)])
        return jnp.where(scored, rewards - 0.5, 0.0)

    assert learners.find_learner("half") is CustomLearner
    learner = make(
        CustomConfig(advantage_estimator="half", num_generations=4),
        learner=CustomLearner,
        max_steps=5,
        actor_optimizer=OptimizerConfig(learning_rate=1e-3),
        on_row=lambda row, total: counts.append((row["train/perf/update_programs"], len(compiled))),
    )
    assert seen == [[True, True, True]]
    last = learner.train(ROWS, batch_size=4)
    assert seen == [[True, True, True]] * 2
    assert [traced for traced, _ in counts] == [1.0] * 5
    assert counts[0][1] > 0 and len({programs for _, programs in counts}) == 1, f"compiled after step 1: {counts}"
    assert last["train/advantage/max"] == 0.5 and last["train/advantage/min"] == -0.5


@pytest.mark.slow
def test_a_call_does_not_keep_what_earlier_calls_collected():
    learner = make()
    collect(learner)
    earlier = weakref.ref(learner.iterator)
    collect(learner)
    gc.collect()
    assert earlier() is None


@pytest.mark.slow
@pytest.mark.parametrize("passes", others_slow([False, True], False))
def test_a_second_call_without_a_folder_continues(compiled, passes):
    """Two calls of two steps equal one of four: steps, prompts, random numbers and moments. The second call compiles
    nothing."""
    seen = {"one": [], "two": []}

    def reward_into(name):
        def reward(prompts, completions, answer):
            seen[name].append((list(prompts), list(completions)))
            return varied(prompts, completions, answer)

        return reward

    steps = {"max_steps": None if passes else 2, "actor_optimizer": ADAMW}
    two = make(reward=reward_into("two"), **steps)
    first = collect(two)
    programs = len(compiled)
    second = collect(two)
    assert len(compiled) == programs, "the second call compiles nothing"
    assert [row["step"] for row in first + second] == [1, 2, 3, 4]
    assert {row["train/perf/update_programs"] for row in second} == {1.0}

    one = make(reward=reward_into("one"), max_steps=4, actor_optimizer=ADAMW)
    rows = collect(one)
    assert seen["two"] == seen["one"] and len({completion for _, group in seen["one"] for completion in group}) > 20
    assert_same(params_of(one.model), params_of(two.model))
    assert rows[-1]["train/loss"] == second[-1]["train/loss"]
    assert len(compiled) == programs, "a learner with equal settings compiles nothing"
    collect(two, [*ROWS])
    assert seen["two"][4][0] != seen["two"][3][0] and seen["two"][4][1] != seen["two"][0][1], "other data, new numbers"


class Reversed:
    """A user's engine: the engine of a learner with its samples in another order."""

    def __init__(self, learner):
        self.inner, self.max_prompt_length, self.row_steps = learner.engine, 8, 0

    def place(self, params):
        return params

    def generate(self, *arguments):
        yield from reversed(list(self.inner.generate(*arguments)))


@pytest.mark.slow
def test_engine_of_the_user():
    """The order of its samples does not change the result."""
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=20)
    plain = make(reward=varied, rollout=rollout, actor_optimizer=ADAMW)
    own = make(reward=varied, rollout=rollout, actor_optimizer=ADAMW, engine=Reversed(plain))
    assert collect(own)[-1]["train/loss"] == collect(plain)[-1]["train/loss"]
    assert_same(params_of(own.model), params_of(plain.model))


def test_a_call_that_failed_can_be_repeated():
    """Completed steps count, even if a function of the user failed after the update. An epoch continues at the same
    position, and an iterable starts again."""
    failing = [True]

    def metric(prompts, completions, rewards, advantages, **columns):
        if failing[0]:
            raise RuntimeError("a metric failed")
        return {}

    learner = make(max_steps=None, metric_fns=[metric])
    with pytest.raises(RuntimeError, match="a metric failed"):
        learner.train(ROWS, batch_size=4)
    failing[0] = False
    assert [row["step"] for row in collect(learner)] == [2], "the second half of the epoch"
    assert [row["step"] for row in collect(learner)] == [3, 4], "the next epoch"

    rows = [{"question": "ab"}, *ROWS]
    learner, data = make(max_steps=1), Rows(rows)
    with pytest.raises(UserError, match="prompt"):
        learner.train(data, batch_size=4)
    rows.pop(0)
    assert learner.train(data, batch_size=4)["step"] == 1


class Rows:
    """An iterable that is not a sequence."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_an_iterator_that_was_read_before_is_named():
    learner = make(max_steps=None)
    rows = iter(ROWS)
    learner.train(rows, batch_size=4)
    with pytest.raises(
        UserError, match="fewer than 4 usable prompts.*If the data is an iterator, check that it was not consumed"
    ):
        learner.train(rows, batch_size=4)


def test_metric_functions():
    calls = []

    def lengths(prompts, completions, rewards, advantages, answer, **columns):
        calls.append((len(prompts), len(completions), len(rewards), len(advantages), len(answer), sorted(columns)))
        return {"mine/longest": ([len(text) for text in completions], max), "mine/shortest": ([1, 2], min)}

    row = collect(make(metric_fns=[lengths], max_steps=1))[0]
    assert calls == [(16, 16, 16, 16, 16, ["text"])]
    assert 0 < row["train/mine/longest"] <= 4 * len("<unk>") and row["train/mine/shortest"] == 1


@pytest.mark.slow
def test_metrics_of_time_and_useful_work(tmp_path, monkeypatch):
    """The metrics contain shares of useful work from the lengths, the split of the time, compilations, and the share of
    the device's peak where it is known. A trace is written."""
    monkeypatch.setattr("tunix_like.training.step_metrics.peak_flops", lambda: 1e9)
    learner = make(max_steps=3, reward=varied, output_dir=str(tmp_path), profile_steps=[2, 2])
    sampled = watch_sampler(learner)
    found = collect(learner, batch_size=8)
    for row, completions in zip(found, sampled, strict=True):
        split = sum(value for name, value in row.items() if name.startswith("train/time/"))
        # Within 5 % only for steps that compile: a later step takes less than 0.1 s, of which a busy machine may add
        # some at any place.
        assert (0.95 * row["train/step_time_sec"] if row["step"] == 1 else 0) < split <= row["train/step_time_sec"]
        lengths = completions.lengths
        assert lengths.mean() / lengths.max() <= row["train/perf/rollout_occupancy"] <= 1
        assert 0.4 <= row["train/perf/update_occupancy"] <= 1
        useful = row["train/perf/update_mfu"] * row["train/time/update"] * 1e9
        assert useful == pytest.approx(row["train/perf/update_operations"], rel=1e-4)
        assert row["train/perf/rollout_mfu"] > 0
    assert found[0]["train/perf/programs_compiled"] > 0 < found[0]["train/perf/compile_sec"]
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.slow
def test_compilations_between_two_steps_are_counted():
    """An evaluation or a checkpoint may compile programs. They count for the step after it."""
    found = []

    def compile_after_2(row, total):
        found.append(row["train/perf/programs_compiled"])
        if row["step"] == 2:
            jax.jit(lambda x: x * 5 - 2)(np.arange(3.0))

    make(max_steps=4, reward=varied, on_row=compile_after_2).train(ROWS, batch_size=4)
    assert found[1:] == [0, 1, 0]


def test_evaluation_before_during_and_after():
    learner = make(max_steps=4, eval_every_n_steps=2, eval_config=EvalConfig(samples=4, batch_size=8))
    rows = collect(learner, eval_ds=ROWS)
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 4]
    assert {"eval/pass@1", "eval/pass@4", "eval/rewards/mean", "eval/mean_length"} <= rows[0].keys()
    again = learner.evaluate(ROWS)
    assert again.metrics["eval/pass@1"] == rows[-1]["eval/pass@1"], "the same key draws the same completions"
    assert len(again.texts) == 8 and len(again.texts[0]) == 4


def run_twice(folder, data, first, then, **training):
    """Trains to step `first`, then to step `then` with a new learner on the same folder. Returns its parameters and
    rows."""
    make(reward=varied, max_steps=first, output_dir=str(folder), **training).train(data(), batch_size=4)
    learner = make(reward=varied, max_steps=then, output_dir=str(folder), **training)
    learner.train(data(), batch_size=4)
    return params_of(learner.model), metric_rows(folder)


def without_times(rows):
    return [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(["list", "generator"], "list"))
def test_resumed_run_equals_the_uninterrupted_run(kind, tmp_path):
    """6 steps are bitwise 3 steps and 3 more: weights, optimizer, position in the data, random numbers and metrics."""
    data = SOURCES | {"list": lambda: ROWS, "generator": lambda: plain(ROWS * 4)}
    settings = {"actor_optimizer": OptimizerConfig(learning_rate=1e-2), "checkpoint_every_n_steps": 2}
    whole = make(reward=varied, max_steps=6, output_dir=str(tmp_path / "whole"), **settings)
    whole.train(data[kind](), batch_size=4)
    params, rows = run_twice(tmp_path / "parts", data[kind], 3, 6, **settings)
    assert_same(params, params_of(whole.model))
    assert without_times(rows) == without_times(metric_rows(tmp_path / "whole")) and len(rows) == 6
    assert differ(params, params_of(make_model()))


@pytest.mark.slow
def test_folder_of_another_run_is_rejected(tmp_path):
    make(output_dir=str(tmp_path), max_steps=1).train(ROWS, batch_size=4)
    other = {"seed": {"seed": 5}, "batch_size": {}, "algorithm": {}, "rows": {}}
    for what, training in other.items():
        algo = MaxRLConfig(num_generations=8) if what == "algorithm" else None
        data, size = (ROWS[:6] if what == "rows" else ROWS), (2 if what == "batch_size" else 4)
        with pytest.raises(UserError, match=f"(?s)another run.*  {what}.*another output_dir"):
            make(algo, output_dir=str(tmp_path), **training).train(data, batch_size=size)
    finished = make(output_dir=str(tmp_path), max_steps=1, on_row=lambda *_: pytest.fail("a finished run trained"))
    finished.train(ROWS, batch_size=4)
    assert Path(tmp_path, "checkpoints", "1").is_dir()


def test_training_outside_the_main_thread():
    """Signals can only be handled in the main thread. In another thread training runs without the handlers."""
    learner, found = make(max_steps=1), []
    thread = threading.Thread(target=lambda: found.append(learner.train(ROWS, batch_size=4)))
    thread.start()
    thread.join()
    assert found[0]["step"] == 1
