"""Tests the guards of updates: non-finite updates are skipped, saved and replayed from the command line, and a sampler
that disagrees with the trainer is detected."""

import re
import resource

import numpy as np
import pytest

from tests.training.small_learner import TEXTS, assert_same, collect, make, varied
from tunix_like import UserError
from tunix_like.cli import main as cli
from tunix_like.data import reverse_text
from tunix_like.errors import EngineLost, SamplerDrifted
from tunix_like.rollout.sampler import Sampler
from tunix_like.session import guards
from tunix_like.session.guards import GapWatch, SkippedUpdate, SkipWatch
from tunix_like.storage.metrics import rows

from .repeated_prompts import BATCH

ROWS = [reverse_text.record(text) for text in TEXTS]


def told(*skipped):
    return [{"update/skipped": float(each)} for each in skipped]


def test_consecutive_skipped_updates_end_the_run(caplog):
    watch = SkipWatch("the loss 'x'", 3)
    assert watch(told(1, 1)) == [0, 1]
    assert watch(told(1, 0)) == [0]
    assert "1 of 2 updates of this step skipped: the loss 'x' or its gradient" in caplog.text
    watch.check()  # three of four, but not consecutive at the end
    assert watch(told(0, 1)) == [1] and watch(told(1)) == [0]
    watch.check()
    watch(told(1))
    with pytest.raises(UserError, match="'x' or its gradient was not finite in 3 consecutive updates .*max_skipped"):
        watch.check()


def gaps(*means):
    return [{"logprob_gap/mean": mean, "logprob_gap/max": 2 * mean} for mean in means]


def test_logprob_gap_stops_the_first_step_and_warns_of_later_ones(caplog):
    watch = GapWatch(0.1)
    watch(1, gaps(np.nan))  # the update contained no completion
    with pytest.raises(
        UserError, match=r"differ by 0\.2 nats per token on average, 0\.4 at most .*max_logprob_gap: 0\.1"
    ):
        watch(2, gaps(np.nan, 0.05, 0.2, 0.1))
    watch = GapWatch(0.1)
    for step, mean in enumerate((np.nan, 0.05, 0.2, 0.3, np.nan, 0.3, 0.1, 0.4), start=1):
        watch(step, gaps(mean / 4, mean))
        watch.check()
    GapWatch(None)(1, gaps(9.0))
    warned = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in warned] == ["step 3", "step 8"], "once for each rise"
    assert "differ by 0.2 nats per token on average, 0.4 at most (training.max_logprob_gap: 0.1)" in warned[0]


def test_disagreeing_sampler_stops_the_run(monkeypatch, tmp_path):
    shift_samples(monkeypatch, {1})
    learner = make(reward=varied, output_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"sampler and trainer disagree: .* differ by 0\.5 nats per token") as error:
        learner.train(ROWS, batch_size=4)
    assert "rollouts" in str(error.value) and not any((tmp_path / "checkpoints").iterdir())


def shift_samples(monkeypatch, steps):
    """In the steps `steps`, the log-probabilities of the sampler become wrong by 0.5 nats."""
    generate, calls = Sampler.generate, []

    def other(*args):
        calls.append(1)
        shift = 0.5 if len(calls) in steps else 0.0
        for sample in generate(*args):
            yield sample._replace(logprobs=sample.logprobs - shift)

    monkeypatch.setattr(Sampler, "generate", other)


@pytest.mark.slow
def test_a_sampler_that_disagrees_later_saves_and_stops_the_run(monkeypatch, tmp_path):
    """The run stops after the step, which is a checkpoint. The resumed run equals one that only warns."""
    given = {"max_steps": 4, "checkpoint_every_n_steps": 100, "reward": varied}
    shift_samples(monkeypatch, {3})
    whole = make(**given)
    assert len(collect(whole, ROWS)) == 4
    given |= {"output_dir": str(tmp_path), "later_logprob_gap": "error"}
    shift_samples(monkeypatch, {3})
    with pytest.raises(SamplerDrifted, match=r"step 3: sampler and trainer .* by 0\.5 nats.*later_logprob_gap=error"):
        collect(make(**given), ROWS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    resumed = make(**given)
    assert [row["step"] for row in collect(resumed, ROWS)] == [4]
    assert_same(resumed.params, whole.params)


def failing(steps, **settings):
    """Returns a learner whose rewards are None for all completions of the steps `steps`."""
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(1)
        return [None] * len(prompts) if len(calls) in steps else varied(prompts, completions, None)

    return make(reward=reward, **settings)


@pytest.mark.slow
def test_consecutive_steps_without_a_scored_completion_end_the_run(tmp_path):
    """The last complete step is saved. The resumed run equals a run that did not end."""
    given = {"max_steps": 7, "checkpoint_every_n_steps": 100}
    whole = failing({2, 4, 5}, **given)
    collect(whole, ROWS)
    given |= {"output_dir": str(tmp_path), "max_unscored_steps": 3}
    with pytest.raises(EngineLost, match="max_unscored_steps"):
        collect(failing({2, 4, 5, 6}, **given), ROWS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"] and EngineLost.status == 75
    resumed = failing((), **given)
    assert [row["step"] for row in collect(resumed, ROWS)] == [6, 7]
    assert_same(resumed.params, whole.params)


def test_saved_skipped_update_is_read_unchanged(tmp_path):
    mask = np.zeros(BATCH.rewards.shape, bool)
    mask[1, 2] = True
    given = SkippedUpdate(12, 1, BATCH, mask, mask.any(axis=1), None, BATCH.rollout_logprobs)
    guards.save_skipped(tmp_path, given)
    found = guards.read_skipped(tmp_path / "skipped" / "step_000012_update_1.npz")
    assert (found.step, found.update, found.old_logprobs) == (12, 1, None)
    for name in ("live", "in_update", "ref_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(given, name))
    for name, value in BATCH._asdict().items():
        np.testing.assert_array_equal(getattr(found.batch, name), value, strict=value is not None)


def test_failed_write_of_a_skipped_update_does_not_stop_the_run(tmp_path, caplog):
    """On a full disk a warning is logged, and no partial file is left."""
    mask = np.ones(BATCH.rewards.shape, bool)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        guards.save_skipped(tmp_path, SkippedUpdate(1, 0, BATCH, mask, mask.any(axis=1), None, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write the inputs of the skipped update" in caplog.text
    assert list((tmp_path / "skipped").iterdir()) == []


@pytest.mark.parametrize(("last", "left"), [(-1, []), (2, ["000001", "000002"]), (11, ["000001", "000002", "000011"])])
def test_files_of_steps_that_will_be_repeated_are_removed(tmp_path, last, left):
    """Completions and skipped updates are removed. Other files stay. A missing folder is not an error."""
    guards.remove_files_after(tmp_path, last)
    names = {"rollouts": "step_{}.jsonl", "skipped": "step_{}_update_1.npz"}
    for folder, name in names.items():
        (tmp_path / folder).mkdir()
        for step in ("000001", "000002", "000011", "000012"):
            (tmp_path / folder / name.format(step)).touch()
    (tmp_path / "rollouts" / "reward_failure.txt").touch()
    guards.remove_files_after(tmp_path, last)
    for folder, name in names.items():
        kept = {"reward_failure.txt"} if folder == "rollouts" else set()
        assert {path.name for path in (tmp_path / folder).iterdir()} == kept | {name.format(step) for step in left}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"not an archive"])
def test_file_that_is_not_a_skipped_update_is_rejected(tmp_path, content):
    file = tmp_path / "skipped" / "x.npz"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(UserError, match="not a skipped update"):
        guards.read_skipped(file)


LOSS = """
import jax.numpy as jnp

def broken(logprobs, old_logprobs, advantages, mask):
    "No number for completions of exactly 3 tokens."
    bad = mask.sum(-1, keepdims=True) == 3
    return jnp.where(mask, jnp.where(bad, jnp.nan, -advantages * logprobs), 0.0), {}
"""


@pytest.mark.slow
def test_skipped_update_is_replayed(monkeypatch, tmp_path, capsys):
    """The test uses the command line. A loss that is not finite for some completions stops the run at the second such
    update. The replay names exactly these completions, with the weights of that step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "reward.py").write_text(
        "def f(prompts, completions, **_):\n    return [len(c) % 4 for c in completions]"
    )
    (tmp_path / "c.yaml").write_text(
        "model: {init: random, config: {model_type: qwen2, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,"
        " num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, tie_word_embeddings: true}}\n"
        "data: {name: reverse_text, batch_size: 8, train_size: 64, eval_size: 8}\n"
        "algorithm: {advantage_estimator: rloo, num_generations: 4, policy_loss_fn: loss.py:broken}\n"
        "rollout: {max_prompt_length: 16, max_tokens_to_generate: 8}\n"
        "rewards: {functions: [{name: reward.py:f}]}\n"
        "eval: {samples: 1, batch_size: 8}\n"
        "training: {max_steps: 4, output_dir: run, max_skipped_updates: 2}\n"
    )
    assert cli.main(["train", "c.yaml"]) == 2
    said = capsys.readouterr()
    first, second = sorted((tmp_path / "run" / "skipped").iterdir())  # consecutive
    kept = guards.read_skipped(first)
    assert guards.read_skipped(second).step == kept.step + 1
    assert "was not finite in 2 consecutive updates" in said.err and f"step_{kept.step + 1:06d}.jsonl" in said.err
    assert [row["train/update/skipped"] for row in rows("run") if "train/loss" in row][-1] == 1.0
    assert cli.main(["replay", str(first)]) == 0
    said = capsys.readouterr().out
    assert f"update 0 of step {kept.step}, with the weights after step {kept.step}" in said
    assert "weights: all finite" in said
    guilty = np.argwhere(kept.live & (kept.batch.completion_lengths == 3))
    assert len(guilty) and f"{len(guilty)} of {kept.live.sum()} completions have a non-finite loss or gradient" in said
    shown = [tuple(map(int, found)) for found in re.findall(r"│ +(\d+) │ +(\d+) │ +3 │", said)]
    assert shown == [tuple(each) for each in guilty.tolist()][:10]
    assert cli.main(["replay", "c.yaml"]) == 2
    assert "not a skipped update" in capsys.readouterr().err
