"""Tests an evaluation with a scripted sampler and scripted answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import tokenizers

from tunix_like.config.schema import EvalConfig
from tunix_like.data.stream import Skipped
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import Evaluator, eval_problems, ks_of
from tunix_like.evaluation.statistics import intervals
from tunix_like.rewards import ANSWERS as ANSWERS_OF
from tunix_like.rewards import REWARDS as REWARD_FNS
from tunix_like.rewards import Scores, register_reward_fn
from tunix_like.rollout.requests import samples_of
from tunix_like.rollout.rollouts import Rollout, rollout_metrics
from tunix_like.rollout.sampler import Sampler
from tunix_like.runtime import progress
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Completions, Problem, SamplingParams

WORDS = {"<eos>": 0, "yes": 1, "no": 2, "unclear": 3, "half": 4}
REWARDS = {"yes": 1.0, "no": 0.0, "unclear": None, "half": 0.5}
ANSWERS = [
    ["yes", "no", "no", "no"],
    ["yes", "yes", "half", "no"],
    ["no", "no", "no", "no"],
    ["unclear", "yes", "no", "unclear"],
    ["unclear", "unclear", "unclear", "yes"],
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="no"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token="<eos>")


class Scripted(Sampler):
    """Answers problem `n` with the words of `ANSWERS[n]`, each followed by an end-of-sequence token, except "half"."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.max_prompt_length, self.row_steps = 99, 0

    def place(self, params):
        return params

    def generate(self, params, requests, key, sampling):
        numbers, num_generations = [request.number for request in requests], requests[0].samples
        self.calls.append((params, [list(r.tokens) for r in requests], numbers, num_generations, key, sampling))
        words = np.array([[WORDS[word] for word in ANSWERS[min(n, 4)][:num_generations]] for n in numbers], np.int32)
        cut = words == WORDS["half"]
        tokens = np.stack([words, np.zeros_like(words)], axis=-1)
        return samples_of(Completions(tokens, 2 - cut.astype(np.int32), np.zeros(tokens.shape, np.float32), ~cut))


def score(prompts, completions, **columns):
    assert all(prompt == f"problem {number}" for prompt, number in zip(prompts, columns["which"], strict=True))
    return [REWARDS[text] for text in completions]


def make(tokenizer, sampler=None, problems=(0, 1, 2, 3, 4), threshold=1.0, **settings) -> Evaluator:
    settings = {"samples": 4, "k": [1, 2, 4], "batch_size": 2} | settings
    return Evaluator(
        sampler or Scripted(),
        tokenizer,
        [Problem(n, f"problem {n}", [1] * (n + 1), {"which": n}) for n in problems],
        [("score", score, 1.0)],
        EvalConfig(**settings),
        threshold,
        jax.random.key(0),
    )


def test_values_of_k():
    assert ks_of(EvalConfig(samples=16)) == [1, 2, 4, 8, 16]
    assert ks_of(EvalConfig(samples=15)) == [1, 2, 4, 8]
    assert ks_of(EvalConfig(samples=1)) == [1]
    assert ks_of(EvalConfig(samples=8, k=[8, 1, 3, 1])) == [1, 3, 8]
    for bad in ([0], [1, 9], [-1]):
        message = f"eval.k: got {bad[-1]}; each k must be between 1 and eval.samples .8"
        with pytest.raises(UserError, match=message):
            ks_of(EvalConfig(samples=8, k=bad))


def test_metrics_of_an_evaluation(tokenizer):
    """Unscored completions are not counted. A problem with fewer than k scored completions is left out of pass@k."""
    found = make(tokenizer)("weights")
    assert found.texts == ANSWERS
    assert found.scored.tolist() == [4, 4, 4, 2, 1]
    assert found.successes.tolist() == [1, 2, 0, 1, 1]
    metrics = found.metrics
    assert metrics["eval/pass@1"] == pytest.approx(np.mean([1 / 4, 2 / 4, 0, 1 / 2, 1]))
    assert metrics["eval/pass@2"] == pytest.approx(np.mean([1 / 2, 5 / 6, 0, 1]))
    assert metrics["eval/pass@4"] == pytest.approx(np.mean([1, 1, 0]))
    assert metrics["eval/rewards/mean"] == pytest.approx(5.5 / 15)
    assert metrics["eval/unscored_frac"] == pytest.approx(5 / 20)
    assert metrics["eval/mean_length"] == pytest.approx(39 / 20)
    assert metrics["eval/clipped_ratio"] == pytest.approx(1 / 20)
    np.testing.assert_array_equal(found.rewards[1], [1, 1, 0.5, 0])
    assert math.isnan(found.rewards[3][0])


def of_sources(evaluator, *labels, **more):
    """Returns the evaluator with these data sources of its problems (None: no source)."""
    named = [{} if label is None else {"data_source": label} for label in labels]
    problems = [
        dataclasses.replace(problem, columns={**problem.columns, **own, **more})
        for problem, own in zip(evaluator.problems, named, strict=True)
    ]
    return dataclasses.replace(evaluator, problems=problems)


def test_metrics_of_an_evaluation_of_several_sources(tokenizer):
    """pass@k of each source is reported in addition to the overall value, over the problems of that source. A single
    source adds no metrics."""
    whole = make(tokenizer)("weights").metrics
    found = of_sources(make(tokenizer), "a", "a", "b/c", "a", "b/c")("weights").metrics
    assert {name: value for name, value in found.items() if name in whole} == whole
    assert {name: value for name, value in found.items() if name not in whole} == {
        "eval/pass@1/a": pytest.approx((1 / 4 + 2 / 4 + 1 / 2) / 3),
        "eval/pass@2/a": pytest.approx((1 / 2 + 5 / 6 + 1) / 3),
        "eval/pass@4/a": pytest.approx(1.0),
        "eval/pass@1/b/c": pytest.approx(1 / 2),
        "eval/pass@2/b/c": 0.0,
        "eval/pass@4/b/c": 0.0,
    }
    assert of_sources(make(tokenizer), *"aaaaa")("weights").metrics == whole
    assert of_sources(make(tokenizer), None, None, None, None, 3)("weights").metrics == whole
    alone = of_sources(make(tokenizer), *"aaaaa", source_reward="score")("weights").metrics
    assert alone["eval/pass@1/a"] == whole["eval/pass@1"], "a mix, of which only one source has held-out rows"
    unscored = of_sources(make(tokenizer, problems=[0, 4]), "a", "b")("weights").metrics
    assert math.isnan(unscored["eval/pass@2/b"]) and unscored["eval/pass@2/a"] == 0.5


def test_the_metrics_of_a_step_by_source():
    """The metrics are means over the scored completions of a source, compared with loops."""
    rewards = np.array([[1, 0, np.nan], [0.5, 1, 1], [np.nan] * 3, [0, 0, 2.0]])
    labels = ["b", "a", "none scored", "b"]

    def metrics(labels, **more):
        problems = [Problem(i, "", [1], {"data_source": label, **more}) for i, label in enumerate(labels)]
        lengths = np.ones((4, 3), np.int32)
        drawn = Completions(lengths[..., None], lengths, np.zeros((4, 3, 1), np.float32), lengths > 0)
        flat, none = rewards.reshape(-1), np.zeros(12, bool)
        scores = Scores(flat, {"r": flat}, none, none, none, None)
        return rollout_metrics(Rollout(problems, [""] * 12, drawn, scores), 1.0)

    plain = metrics([None] * 4)
    found = {name: value for name, value in metrics(labels).items() if name not in plain}
    assert found == {
        "pass@1/a": pytest.approx(2 / 3),
        "rewards/mean/a": pytest.approx(2.5 / 3),
        "pass@1/b": pytest.approx(2 / 5),
        "rewards/mean/b": pytest.approx(3 / 5),
        "pass@1/none scored": pytest.approx(math.nan, nan_ok=True),
        "rewards/mean/none scored": pytest.approx(math.nan, nan_ok=True),
    }
    assert metrics(["a"] * 4) == plain
    of_a_mix = metrics(["a"] * 4, source_reward="r")
    assert of_a_mix["pass@1/a"] == plain["pass@1"] and of_a_mix["rewards/mean/a"] == plain["rewards/mean"]


def test_reward_at_or_above_the_threshold_is_a_success(tokenizer):
    assert make(tokenizer, threshold=0.5)("weights").successes.tolist() == [1, 3, 0, 1, 1]
    assert make(tokenizer, threshold=1.5)("weights").successes.tolist() == [0] * 5
    assert make(tokenizer, threshold=0.7 + 0.2 + 0.1 + 1e-9)("weights").successes.tolist() == [1, 2, 0, 1, 1], (
        "a rounding"
    )


def test_all_batches_have_the_same_size(tokenizer, monkeypatch):
    """The last batch is filled up, and the filler is not counted. The key and the settings are the same for every
    batch."""
    sampler, done = Scripted(), []
    monkeypatch.setattr(progress, "task", lambda name, total: contextlib.nullcontext(done.append))
    make(tokenizer, sampler, temperature=0.5, top_p=0.9)("weights")
    assert done == [2, 2, 1]
    assert [call[2] for call in sampler.calls] == [[0, 1], [2, 3], [4, 5]], "a distinct number each"
    for params, prompts, numbers, samples, key, sampling in sampler.calls:
        assert prompts == [[1] * (min(n, 4) + 1) for n in numbers]
        assert (params, samples, sampling) == ("weights", 4, SamplingParams(0.5, 0.9))
        assert key == jax.random.key(0)


def test_undefined_metrics_are_nan_or_an_error(tokenizer):
    """Without a problem with k scored completions the value is NaN, not zero. If nothing is scored, an error is
    raised."""
    assert math.isnan(make(tokenizer, problems=[3, 4])("weights").metrics["eval/pass@4"])
    with pytest.raises(UserError, match="no completion could be scored: every reward is None or NaN. Check rewards"):
        make(tokenizer, problems=[4], samples=2, k=[1])("weights")


def test_completions_are_stored_if_the_reward_fails(tokenizer, tmp_path):
    def broken(prompts, completions, **columns):
        raise RuntimeError("no verifier")

    evaluator = dataclasses.replace(make(tokenizer), rewards=[("broken", broken, 1.0)])
    with pytest.raises(UserError, match=r"'broken' raised RuntimeError: no verifier(.|\n)*step_000000.jsonl"):
        evaluator("weights", rollouts=tmp_path / "kept")
    lines = (tmp_path / "kept" / "step_000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in lines] == ANSWERS[0] + ANSWERS[1]
    later = evaluator("weights", step=7).metrics  # it has worked before, so the run continues
    assert later["eval/error_frac"] == later["eval/unscored_frac"] == 1 and later["eval/timeout_frac"] == 0
    assert math.isnan(later["eval/rewards/mean"]) and math.isnan(later["eval/pass@1"])


def test_selection_of_the_problems_of_an_evaluation(tokenizer):
    """The problems are the first ones that fit, with their columns and row numbers. Skipped ones are counted."""
    rows = [{"prompt": "yes " * n, "answer": n} for n in (2, 5, 1, 3, 2, 4, 0)]
    found, skipped = eval_problems(rows, tokenizer, 3, 3)
    assert [(p.number, len(p.tokens), p.columns) for p in found] == [
        (0, 2, {"answer": 2}),
        (2, 1, {"answer": 1}),
        (3, 3, {"answer": 3}),
    ]
    assert str(skipped) == "1 of the first 4 longer than 3 tokens and skipped" and skipped.prompts == 1
    found, skipped = eval_problems(rows, tokenizer, 3, None)
    assert len(found) == 4 and skipped.prompts == 3
    assert str(skipped) == "2 of them longer than 3 tokens and skipped, 1 of them empty and skipped"
    assert eval_problems(rows[2:5], tokenizer, 3, None)[1].prompts == 0
    with pytest.raises(
        UserError, match="all 7 evaluation prompts are empty or longer than rollout.max_prompt_length=0; raise it"
    ):
        eval_problems(rows, tokenizer, 0, None)
    with pytest.raises(
        UserError, match=r"evaluation row 1 \(counted from 0\): its prompt has 5 tokens, .* is 3. Raise"
    ):
        eval_problems(rows, tokenizer, 3, 3, "error")
    with pytest.raises(UserError, match=r"evaluation row 1 .*: its prompt is empty. Remove the row, or set data.over"):
        eval_problems([rows[0], rows[-1]], tokenizer, 3, None, "error")
    with pytest.raises(UserError, match="evaluation row 1: a data row needs a 'prompt' column"):
        eval_problems([rows[0], {"question": "yes"}], tokenizer, 3, None)
    with pytest.raises(UserError, match="overlong_prompts: unknown value 'err'. Did you mean 'error'"):
        eval_problems(rows, tokenizer, 3, None, "err")
    assert len(eval_problems(rows[2:5], tokenizer, 3, None, "error")[0]) == 3


def test_number_of_skipped_prompts_is_a_metric(tokenizer):
    evaluator = make(tokenizer)
    assert evaluator("weights").metrics["eval/skipped_prompts"] == 0
    skipped = Skipped(rows=10, scanned=8, limit=3, long=2, empty=1)
    assert dataclasses.replace(evaluator, skipped=skipped)("weights").metrics["eval/skipped_prompts"] == 3


def test_votes_and_intervals_of_an_evaluation(tokenizer):
    """maj@k is reported if a registered reward defines the answers. In a mix the reward of the row does. Every mean has
    the limits of its interval."""
    assert not [name for name in make(tokenizer)("weights").metrics if "maj@" in name]
    evaluator = make(tokenizer, problems=[0, 1])
    problems = [dataclasses.replace(p, columns={"answer": "no"}) for p in evaluator.problems]
    own = dataclasses.replace(evaluator, problems=problems, rewards=[("exact_match", REWARD_FNS["exact_match"], 1.0)])
    found = own("weights")
    assert found.answers == ANSWERS[:2] and found.successes.tolist() == [3, 1]
    assert found.metrics["eval/maj@1"] == found.metrics["eval/pass@1"] == found.metrics["eval/avg@4"] == 0.5
    assert found.metrics["eval/maj@4"] == 0.5, "no wins the first, yes the second"
    np.testing.assert_allclose(found.values["maj@2"], [3 / 4, 1 / 4], atol=1e-6)
    expected = intervals(found.values, dict.fromkeys(found.values, (0.0, 1.0)))
    for name in found.values:
        assert tuple(found.metrics[f"eval/{end}/{name}"] for end in ("low", "high")) == expected[name]
    dearer = dataclasses.replace(own, success_threshold=3.0)("weights").metrics
    assert dearer["eval/high/pass@1"] == pytest.approx(1 - 0.025**0.5), "none of two problems"
    assert dearer["eval/high/avg@4"] > 1 > found.metrics["eval/high/avg@4"], "a reward of 3 is possible"

    def exact_match(prompts, completions, answer):
        return [1.0] * len(completions)

    named_alike = dataclasses.replace(own, rewards=[("exact_match", exact_match, 1.0)])
    assert named_alike("weights").answers == [None, None]
    columns = [{"answer": "no", "grid": "###\n#S#\n###", "source_reward": name} for name in ("exact_match", "maze")]
    mixed = dataclasses.replace(
        own,
        problems=[dataclasses.replace(p, columns=c) for p, c in zip(problems, columns, strict=True)],
        rewards=[("by_source", REWARD_FNS["by_source"], 1.0)],
    )("weights")
    assert mixed.answers == [ANSWERS[0], None] and mixed.metrics["eval/maj@1"] == pytest.approx(3 / 4)


def test_registered_reward_defines_the_answers_of_votes(tokenizer):
    try:
        register_reward_fn("first letter", answer=lambda text: text[:1])(score)
        own = dataclasses.replace(make(tokenizer), rewards=[("first letter", score, 1.0)])
        assert own("weights").answers == [[text[:1] for text in texts] for texts in ANSWERS]
    finally:
        del REWARD_FNS["first letter"], ANSWERS_OF["first letter"]
