"""Tests the diagnosis of a step without a signal: its cause, with counts, a completion and a config key."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

from tests.training.small_learner import collect, differ, make, make_model
from tests.training.test_loop import run_control
from tunix_like import AlgorithmConfig, GRPOConfig, GRPOLearner, RolloutConfig
from tunix_like.algorithms.objective import build_objective, resolve
from tunix_like.config.load import keys
from tunix_like.rewards import REWARDS, Scores
from tunix_like.rollout.collection import training_batch
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.rollouts import Rollout, Task
from tunix_like.rollout.samples import pick_samples
from tunix_like.session import diagnosis, display
from tunix_like.session.diagnosis import REPEAT_AFTER, SignalWatch, diagnose, has_signal
from tunix_like.types import Completions, Problem

LIMIT = 20
NAN = float("nan")
OBJECTIVE = build_objective(resolve(GRPOConfig(num_generations=4), GRPOConfig), LIMIT, 1)


def task_of(reward="mine"):
    return Task(
        algo=AlgorithmConfig(advantage_estimator="maxpo"),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=LIMIT),
        rewards=[(reward, REWARDS.get(reward, len), 1.0)],
        success_threshold=1.0,
    )


def made(rewards, texts="no", lengths=5, finished=True, trained=None, late=0, failed=0):
    """Returns a rollout with a group for each row of rewards, its batch, and the advantages `r - mean`."""
    rewards = np.array(rewards, float)
    shape = rewards.shape
    texts = [texts] * rewards.size if isinstance(texts, str) else texts
    lengths = np.broadcast_to(lengths, shape).astype(np.int32)
    tokens = np.zeros((*shape, LIMIT), np.int32)
    out = Completions(tokens, lengths, tokens.astype(np.float32), np.broadcast_to(finished, shape).copy())
    flat = rewards.reshape(-1)
    marks = np.arange(flat.size)
    scores = Scores(flat, {"mine": flat}, np.isnan(flat), marks < late, (marks >= late) & (marks < late + failed), None)
    problems = [Problem(i, f"prompt {i}\x1b[2J", [1, 2], {"answer": str(40 + i)}) for i in range(shape[0])]
    rollout = Rollout(problems, texts, out, scores)
    batch = training_batch(rollout, task_of(), OBJECTIVE)
    batch = batch if trained is None else batch._replace(trained=np.broadcast_to(trained, shape).copy())
    seen = np.where(batch.scored, rewards, 0.0)
    mean = seen.sum(axis=1, keepdims=True) / np.maximum(batch.scored.sum(axis=1, keepdims=True), 1)
    return rollout, batch, np.where(batch.scored, seen - mean, 0.0)


TIED = [[0.2] * 4, [0.0] * 4]

CASES = {
    "unscored": (task_of(), made([[NAN] * 4, [NAN] * 3 + [1]], late=3, failed=2), 0,
                 "7 of 8 completions have no reward (3 because a reward function timed out, 2 because it failed)",
                 "rewards.timeout_seconds"),
    "half of each group unscored": (task_of(), made([[0.0, 0, NAN, NAN, NAN]] * 2, late=6), 2,
                                    "6 of 10 completions have no reward", "check-rewards"),
    "masked": (task_of(), made([[0, 1, 0, 0]], finished=[True, False, True, True], trained=[False] * 4), 1,
               "rewards differ in 1 of 1 groups, but all completions with a non-zero advantage were truncated",
               "algorithm.overlong"),
    "estimator": (task_of(), (*made([[0.0] * 4, [0, 1, 0, 0]])[:2], np.zeros((2, 4))), 4,
                  "rewards differ in 1 of 2 groups, but the estimator 'maxpo' gives every completion the advantage 0",
                  "algorithm.k"),
    "solved": (task_of(), made([[NAN] * 4, [NAN, 1.0, 1.0, 1.0], [1.0] * 4]), 5,
               "all 2 groups are solved by all of their scored completions", "data.path"),
    "divided": (task_of(), made([[NAN] * 4, [1.0, 1.0, 1.0, NAN], [NAN, 0.0, 0.0, 0.0]]), 9,
                "1 of 2 groups are solved by all of their scored completions, the others by none",
                "algorithm.dynamic_sampling=true"),
    "refused": (task_of(), made(TIED, ["no", " 40\n", "40", "40.", "no", "no", "no", "41"], finished=False), 1,
                "of 8 scored completions 8 were truncated at the length limit, 3 are identical to the row's `answer`",
                "rewards.success_threshold"),
    "truncated": (task_of("gsm8k"), made([[0.0] * 10], finished=[True] + [False] * 9), 1,
                  "of 10 scored completions 9 were truncated at the length limit", "rollout.max_tokens_to_generate"),
    "unparsable": (task_of("gsm8k"), made([[0.0] * 10], ["#### 7"] + ["no"] * 9), 1,
                   "in 9 no answer is found", "data.system_prompt"),
    "wrong": (task_of("gsm8k"),
              made([*TIED, [NAN] * 4], ["no", *["#### 7"] * 11], finished=[True, True, True, False]), 1,
              "of 8 scored completions 2 were truncated at the length limit, in 1 no answer is found.",
              "algorithm.num_generations"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CASES)
def test_diagnosis_names_counts_completion_and_existing_keys(cause):
    who, step, sample, counts, advice = CASES[cause]
    found = diagnose(who, *step)
    assert found.sample == sample and counts in found.reason and advice in found.advice
    named = {word.strip(".,;()").partition("=")[0] for word in found.advice.split() if word.count(".") and "_" in word}
    assert named <= {key.name for key in keys()}


def test_failures_of_an_environment_name_its_keys():
    rollout, *rest = made([[NAN] * 4, [NAN] * 4], late=1, failed=7)
    episodes = [Episode([], 1, False, 0, NAN, {}, ["error", "why"])] * 8
    found = diagnose(task_of(), rollout._replace(episodes=episodes), *rest)
    assert "(1 because a reward function or the environment timed out, 7 because it failed)" in found.reason
    assert found.advice.endswith("raise rewards.timeout_seconds or environment.timeout_seconds.")


def test_a_step_with_a_signal():
    assert has_signal(*made([[0.0] * 4, [0, 1, 0, 0]])[1:])
    assert has_signal(*made([[0, 1, 0, 0]], trained=[True, True, False, False])[1:])
    assert not has_signal(*made([[0, 1, 0, 0]], trained=[False] * 4)[1:])
    assert not has_signal(*made(TIED)[1:])


def test_missing_answers_are_not_reported_without_an_answer_extractor():
    found = diagnose(task_of(), *made(TIED))
    assert "too hard" in found.advice and "no answer" not in found.reason


def test_diagnosis_is_logged_at_step_1_and_every_ten_steps_in_a_row(caplog):
    watch, nothing, something = SignalWatch(task_of()), made(TIED, "a\x1bb" + "c" * 900), made([[0, 1, 0, 0]])
    said = []
    for step in range(1, 35):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tunix_like"):
            watch(step, *(something if step == 13 else nothing))
        said += [step] if caplog.messages else []
    assert said == [1, REPEAT_AFTER, 13 + REPEAT_AFTER, 13 + 2 * REPEAT_AFTER]

    caplog.clear()
    SignalWatch(task_of())(1, *nothing)
    SignalWatch(task_of())(2, *nothing)  # a later step may lack a signal by chance
    assert len(caplog.messages) == 1
    paragraph = caplog.messages[0]
    assert paragraph.startswith("no training signal in step 1: no group is solved") and (
        'prompt "prompt 0\\x1b[2J", answer "40", completion 0 with reward 0.2, 5 tokens): "a\\x1bbccc' in paragraph
    )
    assert "[503 characters]" in paragraph and "\x1b" not in paragraph and "\n" not in paragraph


def test_other_terms_of_the_loss_are_named(caplog):
    SignalWatch(task_of())(1, *made(TIED))
    SignalWatch(task_of(), other_terms=True)(1, *made(TIED))
    SignalWatch(task_of(), other_terms=True)(1, *made([[0, 1, 0, 0]]))
    alone, beside = caplog.messages
    assert "KL" not in alone and "KL" in beside and not beside.startswith("no training signal")


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "trains"), [({}, False), ({"beta": 0.1}, True), ({"entropy_coef": 0.1}, True)])
def test_a_run_without_a_signal_says_whether_it_trains(settings, trains, caplog):
    """The step changes weights only if the loss has a term without rewards."""
    learner = make(AlgorithmConfig(num_generations=4, advantage_estimator="grpo", **settings), learner=GRPOLearner,
                   reward=lambda prompts, completions, **columns: [0.0] * len(prompts), max_steps=1,
                   ref_model=make_model(1) if "beta" in settings else None)  # fmt: skip
    before = jax.tree.map(np.array, learner.params)
    collect(learner)
    assert differ(before, learner.params) == trains
    (text,) = [text for text in caplog.messages if "no training signal" in text]
    assert ("KL" in text) == trains


def test_failed_answer_extraction_is_reported_in_the_message(caplog, monkeypatch):
    asked = []

    def extract_answers(*args):
        asked.append(args)
        raise IndexError("no \x1b answer")

    monkeypatch.setattr(diagnosis, "extract_answers", extract_answers)
    watch = SignalWatch(task_of())
    for step in range(1, REPEAT_AFTER + 2):
        watch(step, *made(TIED))
    assert len(asked) == 2
    assert caplog.messages == [
        f'no training signal in {since}, and the search for the cause failed (IndexError: "no \\x1b answer").'
        for since in ("step 1", f"the last {REPEAT_AFTER} steps")
    ]


def test_samples_are_best_and_worst_of_a_group_with_different_rewards():
    rewards = [[0.0] * 4, [0.5, NAN, 1, 0]]
    found = pick_samples(*(made(rewards, list("abcdefgh"), lengths=[[3] * 4, [6, 7, 8, 9]])[i] for i in (0, 2)))
    assert (found.prompt, found.scored, found.size) == ("prompt 1\x1b[2J", 3, 4)
    assert found.best == ("g", 1.0, 0.5, 8, True) and found.worst == ("h", 0.0, -0.5, 9, True)
    alike = pick_samples(*(made([[0.0] * 4])[i] for i in (0, 2)))
    assert alike.best.reward == alike.worst.reward == 0


@pytest.mark.parametrize(
    ("rewards", "known", "lines"),
    [
        ([0.0] * 4, "", ["4 equal rewards, 0"]),
        ([NAN] * 4, ", 0 of 4 completions scored", ["none scored, -"]),
        ([NAN, NAN, 1, NAN], ", 1 of 4 completions scored", ["one scored, 1"]),
        ([NAN, 1, 1, 1], ", 3 of 4 completions scored", ["3 scored, equal rewards, 1"]),
        ([NAN, 0, 1, 1], ", 3 of 4 completions scored", ["best, 1", "worst, 0"]),
        ([0, 0, 1, 1], "", ["best, 1", "worst, 0"]),
    ],
)
def test_table_of_samples_has_the_number_of_scored_completions(capsys, rewards, known, lines):
    rollout, _, advantages = made([rewards])
    display.show_samples(3, pick_samples(rollout, advantages))
    title, *table = capsys.readouterr().out.splitlines()
    assert title == f'step 3, prompt "prompt 0\\x1b[2J"{known}'
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in table if "│" in line]
    assert [", ".join(row) for row in cells] == lines


def test_samples_of_trajectories_contain_all_turns():
    rollout, _, advantages = made([[1.0, 0.0]])
    turns = [{"role": "assistant", "content": "go\nassistant: on"}, {"role": "tool", "content": "4", "name": "add"}]
    episodes = [Episode(turns[: i + 1], 1, False, 0, 0.0, {}, None) for i in range(2)]
    found = pick_samples(rollout._replace(episodes=episodes), advantages)
    assert found.best.text == "assistant: go\n  assistant: on"
    assert found.worst.text == "assistant: go\n  assistant: on\ntool: 4"


def test_samples_are_printed_after_the_line_of_their_step(capsys):
    lines, (rollout, _, advantages) = display.StepLines(), made(TIED)
    run = run_control(2, step=1)
    lines.on_row(run, {"step": 1})
    lines.on_samples(run, pick_samples(rollout, advantages))
    lines.on_row(run, {"step": 2})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("train", "step"))]
    assert [line.split(",")[0] for line in said] == ["train 1/2", "step 1", "train 2/2"]
