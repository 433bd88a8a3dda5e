"""Tests what a real run records by pass rate, against a loop over its stored completions, and that its page can be
made."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

import tunix_like
from tests.algorithms.test_pass_rates import slow_bin
from tests.tiny_model import HF
from tunix_like import MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig
from tunix_like.cli.main import main
from tunix_like.data import reverse_text
from tunix_like.storage.metrics import rows

pytestmark = pytest.mark.slow

STEPS, SIZE = 3, 4
LETTERS = [a + b for a in "abcd" for b in "efgh"]
DATA = [reverse_text.record(text) | {"live": i % 3 == 0 or i > 10} for i, text in enumerate(LETTERS)]


def sometimes(prompts, completions, live):
    """A reward that gives groups with and without a gradient, and occasionally no reward at all."""
    out = [float(sum(map(ord, text)) % 3 == 0) if each else 0.0 for text, each in zip(completions, live, strict=True)]
    return [None if len(text) == 3 else reward for text, reward in zip(completions, out, strict=True)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    MaxRLLearner(
        model=tunix_like.load_model(HF, init="random")[0],
        tokenizer=reverse_text.tokenizer(),
        reward_fns=sometimes,
        algo_config=MaxRLConfig(num_generations=SIZE, dynamic_sampling=True, max_extra_batches=1),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(
            max_steps=STEPS,
            output_dir=str(folder),
            log_rollouts_every_n_steps=1,
            actor_optimizer=OptimizerConfig(learning_rate=1e-2),
        ),
    ).train(DATA, batch_size=4)
    return folder


def test_recorded_pass_rates_match_the_completions(run):
    """With dynamic sampling, `trained` and `advantage` count the groups of the update, and `drawn` counts all
    groups."""
    drawn_more = 0
    for row in rows(run):
        groups = defaultdict(list)
        for line in (run / "rollouts" / f"step_{row['step']:06d}.jsonl").read_text().splitlines():
            each = json.loads(line)
            groups[each["problem"]].append(each)
        counts, sums = [0] * 10, [0.0] * 10
        for group in groups.values():
            place = slow_bin([each["reward"] == 1 for each in group], [each["reward"] is not None for each in group])
            if place >= 0:
                counts[place] += 1
                sums[place] += sum(abs(each["advantage"]) for each in group) / SIZE
        assert row["train/pass_rate/trained"] == counts
        assert row["train/pass_rate/advantage"] == pytest.approx(sums)
        drawn = row["train/pass_rate/drawn"]
        assert all(a >= b for a, b in zip(drawn, counts, strict=True))
        drawn_more += sum(drawn) > sum(counts)
    assert drawn_more and any(sum(row["train/pass_rate/advantage"]) > 0 for row in rows(run)), "the test can fail"


def test_finished_marks_truncated_completions(run):
    for row in rows(run):
        lines = (run / "rollouts" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()
        cut = [not json.loads(line)["finished"] for line in lines]
        assert any(cut) and all(json.loads(line)["length"] == 4 for line, each in zip(lines, cut, strict=True) if each)


def test_page_of_a_real_run_is_made(run):
    assert main(["report", str(run)]) == 0
    assert '"drawn":[[' in (run / "report.html").read_text()
