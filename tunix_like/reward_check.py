"""`tunix-like check-rewards`: what the reward functions of a config give to gold answers and to wrong ones.

Knows rows, their `answer` column and reward functions. Does NOT know a model: nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_like import console
from tunix_like.config import Config
from tunix_like.data import load_source
from tunix_like.data.source import DataSource
from tunix_like.rewards.pool import close_pools
from tunix_like.rewards.scoring import Scores
from tunix_like.rl.rollouts import score_completions, succeeds
from tunix_like.runs import reward_functions
from tunix_like.types import Problem

ROWS = 256
"""Training rows that are looked at: the first."""

GOLD, OTHER = "gold answer", "another row's answer"
NONSENSE = "I do not know."

SAME = 0.1
"""Share of rows where another row's answer may succeed: two rows may have the same right answer."""


class Tried(NamedTuple):
    """What completions of one kind got."""

    kind: str
    texts: list[str]
    scores: Scores


def try_rewards(config: Config) -> tuple[list[Problem], list[Tried]]:
    """Scores completions of several kinds for the first training rows: each row's own `answer` (where rows have one),
    the next row's other answer, no text at all, the prompt itself, and a sentence.

    Raises:
      UserError: what is wrong with the data or the functions, as `tunix-like train` would say.
    """
    source = load_source(config.data)
    rewards = reward_functions(config, source)
    problems = [_problem(number, source) for number in range(min(ROWS, len(source.train)))]
    prompts = [problem.text for problem in problems]
    kinds = {"no text": [""] * len(prompts), "the prompt again": prompts, f"'{NONSENSE}'": [NONSENSE] * len(prompts)}
    answers = [str(problem.columns["answer"]) for problem in problems if isinstance(problem.columns.get("answer"), str)]
    if len(answers) == len(problems):
        others = [_other(answers, number) for number in range(len(answers))]
        kinds = {GOLD: answers} | ({OTHER: others} if len(set(answers)) > 1 else {}) | kinds
    try:
        return problems, [
            Tried(kind, texts, score_completions(rewards, problems, texts, 1)) for kind, texts in kinds.items()
        ]
    finally:
        close_pools(function for _, function, _ in rewards)


def _problem(number: int, source: DataSource) -> Problem:
    row: Mapping[str, Any] = source.train[number]
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])  # no tokenizer, no chat template
    return Problem(number, text, [], {name: value for name, value in row.items() if name != "prompt"})


def _other(answers: Sequence[str], number: int) -> str:
    """The next answer that differs, the first following the last; the same where all are equal."""
    following = (*answers[number + 1 :], *answers[:number])
    return next((answer for answer in following if answer != answers[number]), answers[number])


def print_report(config: Config) -> int:
    """Prints the table and what is suspicious in it; returns 1 where something is, else 0."""
    problems, tried = try_rewards(config)
    threshold = config.rewards.success_threshold
    names = list(tried[0].scores.by_function)
    columns = ["completion", "mean reward", "succeed", "unscored", *(names if len(names) > 1 else [])]
    console.table(
        f"{len(problems)} training rows; a completion succeeds when its reward reaches {threshold:g}",
        columns,
        [_row(each, threshold, names if len(names) > 1 else []) for each in tried],
    )
    wrong = [line for each in tried for line in _suspicions(each, problems, threshold)]
    for line in wrong:
        console.say(line)
    if not wrong:
        console.say("nothing suspicious: gold answers succeed, the others do not")
    return int(bool(wrong))


def _row(each: Tried, threshold: float, names: Sequence[str]) -> list[str]:
    scores = each.scores
    means = [_mean(scores.total), f"{_passed(scores, threshold).mean():.1%}", f"{1 - scores.scored.mean():.1%}"]
    return [each.kind, *means, *(_mean(scores.by_function[name]) for name in names)]


def _mean(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.3f}" if len(known) else "-"


def _passed(scores: Scores, threshold: float) -> np.ndarray:
    return scores.scored & succeeds(np.nan_to_num(scores.total, nan=-np.inf), threshold)


def _suspicions(each: Tried, problems: Sequence[Problem], threshold: float) -> list[str]:
    """What a user should look at, each with its first case."""
    scores, gold = each.scores, each.kind == GOLD
    found = [
        (scores.timeouts | scores.errors, "the function failed or was late"),
        (~scores.scored & ~scores.timeouts & ~scores.errors if gold else np.zeros(len(problems), bool), "not scored"),
        (
            scores.scored & ~_passed(scores, threshold) if gold else _passed(scores, threshold),
            "fails" if gold else "succeeds",
        ),
    ]
    lines = []
    for rows, what in found:
        if rows.mean() > (SAME if each.kind == OTHER and what == "succeeds" else 0):
            first = int(np.flatnonzero(rows)[0])
            lines.append(
                f"{each.kind}: {what} in {int(rows.sum())} of {len(rows)} rows. The first, row {first + 1}: prompt "
                f"{problems[first].text!r:.200}, completion {each.texts[first]!r:.200}, "
                f"reward {scores.total[first]:.3g}"
            )
    if scores.first_failure is not None:
        lines.append(scores.first_failure)
    return lines
