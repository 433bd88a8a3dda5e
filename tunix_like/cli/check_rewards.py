"""The command `check-rewards`: scores gold answers and wrong answers with the reward functions of a config.

No model is needed: the completions come from the data and are not sampled. `check_environment.py` checks environments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data import load_source
from tunix_like.data.source import DataSource
from tunix_like.rewards.pool import close_pools
from tunix_like.rewards.scoring import Scores
from tunix_like.rollout.rollouts import score_completions, succeeds
from tunix_like.runs.environments import has_environment
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runtime import console
from tunix_like.runtime.visible import visible
from tunix_like.types import Problem

ROWS = 256
"""Number of training rows that are checked, starting with the first row."""

GOLD, OTHER = "gold answer", "another row's answer"
NONSENSE = "I do not know."

SAME = 0.1
"""Share of rows in which the answer of another row is allowed to succeed. The share is not 0, because two different
texts can have the same final answer."""

PRINTED = 20
"""Maximum number of lines that are shown of the output of reward functions. Further lines are only counted."""


class Tried(NamedTuple):
    """The completions of one kind (such as gold answers), one per training row, and their scores."""

    kind: str
    texts: list[str]
    scores: Scores


def try_rewards(config: Config) -> tuple[list[Problem], list[Tried], dict[str, float]]:
    """Scores completions of several kinds for the first training rows.

    The kinds are: an empty text, the prompt itself and a nonsense sentence. If all rows have a text in the column
    `answer`, the answer of the row is a further kind. If, in addition, not all answers are equal, a different answer
    from another row is a further kind.

    Returns:
      the problems, the scored completions of each kind, and the weights of the reward functions by name.

    Raises:
      UserError: the data or the reward functions are invalid, as in `tunix-like train`.
    """
    source = load_source(config.data)
    rewards = reward_functions(config, source)
    problems = [problem_of(number, source) for number in range(min(ROWS, len(source.train)))]
    prompts = [problem.text for problem in problems]
    kinds = {"no text": [""] * len(prompts), "the prompt again": prompts, f"'{NONSENSE}'": [NONSENSE] * len(prompts)}
    answers = [str(problem.columns["answer"]) for problem in problems if isinstance(problem.columns.get("answer"), str)]
    if len(answers) == len(problems):
        others = [other_answer(answers, number) for number in range(len(answers))]
        kinds = {GOLD: answers} | ({OTHER: others} if len(set(answers)) > 1 else {}) | kinds
    with few_lines():  # includes `close_pools`, because workers write their last output when they exit
        try:
            tried = [
                Tried(kind, texts, score_completions(rewards, problems, texts, 1)) for kind, texts in kinds.items()
            ]
        finally:
            close_pools(function for _, function, _ in rewards)
    return problems, tried, {name: weight for name, _, weight in rewards}


class _Few(io.TextIOBase):
    """A text stream that writes the first `PRINTED` lines to standard error, escaped with `visible`, and counts all
    lines."""

    def __init__(self) -> None:
        self.to, self.lines = sys.stderr, 0

    def write(self, text: str) -> int:
        for part in visible(text).splitlines(keepends=True):
            if self.lines < PRINTED:
                self.to.write(part)
            self.lines += part.endswith("\n")
        return len(text)


@contextlib.contextmanager
def few_lines() -> Iterator[None]:
    """Context manager that redirects the output of reward functions and of their worker processes to standard error.
    Only the first `PRINTED` lines are written; at the end, the number of further lines is written."""
    few = _Few()
    try:
        with contextlib.redirect_stdout(few), contextlib.redirect_stderr(few):
            yield
    finally:
        if few.lines > PRINTED:
            print(f"({few.lines - PRINTED} more lines printed by the functions are not shown)", file=sys.stderr)


def problem_of(number: int, source: DataSource) -> Problem:
    """Returns training row `number` as a `Problem` whose prompt is not tokenised."""
    row: Mapping[str, Any] = source.train[number]
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])  # there is no chat template here
    return Problem(number, text, [], {name: value for name, value in row.items() if name != "prompt"})


def other_answer(answers: Sequence[str], number: int) -> str:
    """Returns the next answer in the list that differs from `answers[number]`. The search continues at the start of the
    list. Returns `answers[number]` if all answers are equal."""
    following = (*answers[number + 1 :], *answers[:number])
    return next((answer for answer in following if answer != answers[number]), answers[number])


def print_report(config: Config) -> int:
    """Scores gold answers and wrong answers, and prints a table of the scores and messages on suspicious results.
    Returns the exit status: 1 if a reward function is probably wrong, else 0."""
    problems, tried, weights = try_rewards(config)
    threshold = config.rewards.success_threshold
    names = list(weights)
    columns = ["completion", "mean reward", "succeed", "unscored", *(names if len(names) > 1 else [])]
    console.table(
        f"{len(problems)} training rows; a completion succeeds when its reward reaches {threshold:g}",
        columns,
        [_row(kind, threshold, names if len(names) > 1 else []) for kind in tried],
    )
    wrong = [line for kind in tried for line in _suspicions(kind, problems, threshold)] + _failures(tried)
    if tried[0].kind != GOLD:
        console.print_text(
            "no column `answer` with a text in every row: gold answers were not checked. data.answer_template builds "
            "the column from other columns."
        )
    if not any(passed(kind.scores, threshold).any() for kind in tried):
        wrong.append(f"nothing succeeds: no completion above reaches rewards.success_threshold={threshold:g}")
    cheap = _cheap(tried, weights)
    for line in wrong + cheap:
        console.print_text(line)
    if not wrong and not cheap:
        console.print_text("nothing suspicious: gold answers succeed, the others do not")
    return int(bool(wrong))


def _failures(tried: Sequence[Tried]) -> list[str]:
    """Returns the messages of failed reward functions. Each element of `tried` gives the message of its first failure.
    If several messages differ only in the prompt and the completion, only the first of them is returned."""
    failures: dict[str, str] = {}
    for kind in tried:
        if kind.scores.first_failure is not None:
            failures.setdefault(kind.scores.first_failure.rpartition("\nPrompt: ")[0], kind.scores.first_failure)
    return list(failures.values())


def _cheap(tried: Sequence[Tried], weights: Mapping[str, float]) -> list[str]:
    """Describes the reward functions that give their highest reward to a nonsense completion, at least in some rows.

    This can be intended, so it does not change the exit status of the command. If there is only one reward function,
    the result is empty.
    """
    lines = []
    nonsense = next(kind for kind in tried if NONSENSE in kind.kind)
    for name, weight in weights.items() if len(weights) > 1 else ():
        rewards = weight * np.concatenate([kind.scores.by_function[name] for kind in tried])
        most = np.nanmax(rewards, initial=0)
        rows = weight * nonsense.scores.by_function[name] >= most if most > 0 else np.zeros(1, bool)
        if rows.any():
            lines.append(
                f"{nonsense.kind}: gets the full reward of {name} in {int(rows.sum())} of {len(rows)} rows; a model "
                "can learn to exploit this instead of the task"
            )
    return lines


def _row(each: Tried, threshold: float, names: Sequence[str]) -> list[str]:
    scores = each.scores
    means = [_mean(scores.total), f"{passed(scores, threshold).mean():.1%}", f"{1 - scores.scored.mean():.1%}"]
    return [each.kind, *means, *(_mean(scores.by_function[name]) for name in names)]


def _mean(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.3f}" if len(known) else "-"


def passed(scores: Scores, threshold: float) -> np.ndarray:
    """Returns a boolean mask of the completions whose total reward is at least `threshold`. Unscored completions are
    False."""
    return scores.scored & succeeds(np.nan_to_num(scores.total, nan=-np.inf), threshold)


def _suspicions(each: Tried, problems: Sequence[Problem], threshold: float) -> list[str]:
    """Returns messages on suspicious scores of `each`, which has either the gold answers of all rows or wrong
    completions.

    Suspicious are reward functions that fail or time out, gold answers that are not scored or do not succeed, and wrong
    completions that succeed. Each message quotes the first row where the problem occurs.
    """
    scores, gold = each.scores, each.kind == GOLD
    checks = [
        (scores.timeouts | scores.errors, "the function failed or timed out"),
        (~scores.scored & ~scores.timeouts & ~scores.errors if gold else np.zeros(len(problems), bool), "not scored"),
        (
            scores.scored & ~passed(scores, threshold) if gold else passed(scores, threshold),
            "fails" if gold else "succeeds",
        ),
    ]
    lines = []
    for rows, what in checks:
        if rows.mean() > (SAME if each.kind == OTHER and what == "succeeds" else 0):
            first = int(np.flatnonzero(rows)[0])
            total = scores.total[first]
            lines.append(
                f"{each.kind}: {what} in {int(rows.sum())} of {len(rows)} rows. The first, row {first + 1}: prompt "
                f"{problems[first].text!r:.200}, completion {each.texts[first]!r:.200}, "
                + ("no reward" if np.isnan(total) else f"reward {total:.3g}")
            )
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Checks the environment of a config or, if it has none, its reward functions. Returns the exit status."""
    config = load(arguments.config, arguments.overrides)
    if not has_environment(config):
        return print_report(config)
    from tunix_like.cli import check_environment  # not at the top, because that module imports this one

    return check_environment.print_report(config)
