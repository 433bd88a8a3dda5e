"""Tests that the page of metrics lists every metric that runs write."""

import re
from pathlib import Path

import pytest

from tests.callbacks import OnRow
from tests.rollout.engines.stand_in import StandIn
from tests.training import test_environments, test_preferences, test_reward_model, test_staleness
from tests.training.small_learner import ROWS, TOKENIZER, collect, make, make_model
from tunix_like import (
    AlgorithmConfig,
    EvalConfig,
    MaxPOLearner,
    PPOConfig,
    PPOLearner,
    RolloutConfig,
    SFTConfig,
    SFTTrainer,
)
from tunix_like.models.loading import export_model
from tunix_like.rollout.engines.vllm import VLLMEngine

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "output.md"
SAMPLES = EvalConfig(samples=2)


def documented(section="Metrics"):
    """Returns a pattern of the names in the tables (and, for SFT, the text) of a section of the page."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index(f"## {section}\n") :].partition("\n## ")[0]
    lines = [line.split("|")[1] if line.startswith("|") else line for line in text.splitlines()]
    names = {name for line in lines for name in re.findall(r"`([^`\s]+)`", line)}
    return re.compile("|".join(re.sub(r"<\w+>", "[\\\\w.@/-]+", re.escape(name)) for name in sorted(names)))


def unknown(rows, prefix, pattern):
    names = {name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)}
    assert names
    return sorted(name for name in names if not pattern.fullmatch(name))


def rewards(prompts, completions, **columns):
    return [float(len(completion) % 2) for completion in completions]


def rows_of_servers(folder):
    export_model(make_model(), TOKENIZER, folder / "model")
    server = StandIn(folder / "model", TOKENIZER)
    rollout = RolloutConfig(engine="vllm", urls=[server.url], max_prompt_length=8, max_tokens_to_generate=4)
    engine = VLLMEngine(make_model(), TOKENIZER, rollout, folder / "weights")
    yield from collect(make(engine=engine))
    engine.close()
    server.stop()


def all_rows(folder):
    yield from collect(
        make(
            AlgorithmConfig(
                num_generations=4, beta=0.1, sampler_is="token", dynamic_sampling=True, overlong="mask",
                advantage_estimator="maxpo", k={"start": 1, "end": 2, "steps": 2}, off_policy_mask_threshold=0.1,
            ),
            learner=MaxPOLearner, reward={"length": rewards}, eval_config=SAMPLES, teacher=make_model(1),
        ),
        [row | {"data_source": "ab"[i % 2]} for i, row in enumerate(ROWS)],
        ROWS[:2],
    )  # fmt: skip
    ppo = PPOConfig(num_generations=4)
    yield from collect(make(ppo, learner=PPOLearner, reward={"length": rewards}))
    yield from collect(test_environments.learner(eval_config=SAMPLES), eval_ds=ROWS[:2])
    yield from collect(test_staleness.stale())
    yield from rows_of_servers(folder)


def test_every_metric_of_training_and_evaluation_is_on_the_page(tmp_path):
    rows = list(all_rows(tmp_path))
    assert unknown(rows, "train/", documented()) == []
    assert unknown(rows, "eval/", documented("Evaluation")) == []
    names = set().union(*rows)
    assert {"train/kl", "train/staleness", "train/environment/good", "train/dynamic_sampling/extra_batches"} <= names
    assert {"train/critic/loss", "train/critic/clipfrac", "train/critic/explained_variance"} <= names
    assert {"train/teacher/divergence", "train/teacher/logprob"} <= names
    assert {"train/off_policy_mask/dropped_frac", "train/schedule/k"} <= names
    assert {"train/sampler_is/ess", "train/overlong/masked_frac", "train/pass@1/a", "eval/low/pass@1"} <= names
    assert {"train/perf/weights_sent_bytes", "train/perf/weights_sent_sec"} <= names
    assert "new" not in names and unknown([{"train/new": 1}], "train/", documented()) == ["new"]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", None])
def test_every_metric_of_preferences_is_on_the_page(loss):
    pairs, judge = test_preferences, test_reward_model
    learner = judge.make(max_steps=1) if loss is None else pairs.make(pairs.LOSSES[loss], max_steps=1)
    rows = pairs.collect(learner, held_out=pairs.ROWS[:2])
    assert unknown(rows, "train/", documented("Preferences")) == []
    assert unknown(rows, "eval/", documented("Preferences")) == []


def test_every_metric_of_fine_tuning_is_on_the_page():
    found = []
    trainer = SFTTrainer(
        model=make_model(),
        tokenizer=TOKENIZER,
        sft_config=SFTConfig(max_steps=2, batch_size=2, eval_every_n_steps=1),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        evaluate=lambda params, step: {"eval/pass@1": 0.5},
    )
    trainer.train(ROWS, callbacks=[OnRow(lambda row: found.append(dict(row)))])
    pattern = documented("Supervised fine-tuning")
    assert unknown(found, "sft/", re.compile(f"{pattern.pattern}|step")) == []
