"""Tests that the tables of the studies with SmolLM2 in docs/studies.md have the stored results."""

from __future__ import annotations

import collections
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.special

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


@pytest.fixture
def study():
    spec = importlib.util.spec_from_file_location("smollm2_study", ROOT / "examples" / "smollm2" / "study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["sums", "letters", "gsm8k"])
def test_the_table_of_the_documentation_has_the_stored_results(study, task):
    expected = {study.BEFORE, *study.TASKS[task].learners}
    expected |= {study.SUPERVISED} if study.TASKS[task].supervised else set()
    assert study.results(task).keys() == expected and study.table(task) in PAGE


def test_signal_on_gsm8k_is_as_documented(study):
    (run,) = study.results("gsm8k")["maxrl"]
    solved = [sum(step["train/pass_rate/drawn"][1:]) for step in run["steps"]]
    right = round(sum(step["train/rewards/mean"] for step in run["steps"]) * 8 * 16)
    assert (len(solved), solved.count(0), sum(solved), right) == (16, 8, 14, 15)


def test_replies_of_the_documentation_beside_the_best_distribution_of_each_objective(study):
    """The optimum of each objective over distributions of answers, by a numerical search."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    problems = reasoning_gym.create_dataset("letter_counting", size=5000, seed=1, min_words=3, max_words=8)
    found = collections.Counter(problem["answer"] for problem in problems)
    answers, shares = zip(*sorted(found.items()), strict=True)
    shares = np.array(shares) / 5000
    objectives = {
        "RLOO, mean reward": ("rloo", lambda p: p),
        "MaxRL, log-likelihood of success up to order 15": (
            "maxrl",
            lambda p: -sum((1 - p) ** k / k for k in range(1, 16)),
        ),
        "MaxPO, max@4": ("maxpo", lambda p: 1 - (1 - p) ** 4),
    }
    for label, (learner, objective) in objectives.items():

        def loss(logits, objective=objective):
            return -shares @ objective(scipy.special.softmax(logits))

        search = scipy.optimize.minimize(loss, np.zeros(len(shares)))
        best = dict(zip(answers, scipy.special.softmax(search.x), strict=True))
        runs = [run["replies"] for run in study.results("letters")[learner]]
        drawn = 64 * 64
        rows = [best, *({answer: run.get(answer, 0) / drawn for answer in "123"} for run in runs)]
        cells = [" / ".join(f"{100 * row[answer]:.0f}" for answer in "123") for row in rows]
        assert f"| {label} | {cells[0]} | {', '.join(cells[1:])} |" in PAGE
