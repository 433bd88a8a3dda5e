"""Explains steps without a training signal (all advantages are 0): the cause, a config key to change, an example."""

from __future__ import annotations

import itertools
import logging
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.evaluation.evaluate import extract_answers
from tunix_like.rollout.rollouts import Rollout, Task, mixed_groups, succeeds
from tunix_like.runtime.console import excerpt
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")

REPEAT_AFTER = 10
"""Number of consecutive steps without a training signal after which the warning is repeated."""

CAUSE_SHARE = 0.9
"""Fraction of the completions that must have a property (for example, truncation) so that the advice is about it."""


class Diagnosis(NamedTuple):
    """The reason why all trained completions of a step have the advantage 0, and the remedy.

    `sample` is the index of an example in the flat list of completions, which is ordered by group.
    """

    reason: str
    advice: str
    sample: int


class SignalWatch:
    """Warns of a missing training signal (all trained completions have the advantage 0): in step 1, and after every
    `REPEAT_AFTER` consecutive steps without a signal.

    `other_terms` is whether the loss has terms without the advantage (`Objective.extra_term`), which then still train.
    """

    def __init__(self, task: Task, other_terms: bool = False) -> None:
        self.task = task
        self.other_terms = other_terms
        self.steps_without = 0

    def __call__(self, step: int, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> None:
        self.steps_without = 0 if has_signal(batch, advantages) else self.steps_without + 1
        if not self.steps_without or not (step == 1 or self.steps_without % REPEAT_AFTER == 0):
            return
        since = f"the last {self.steps_without} steps" if self.steps_without > 1 else f"step {step}"
        text = f"no training signal in {since}"
        try:
            text += f": {_formatted(diagnose(self.task, rollout, batch, advantages), rollout)}"
        except Exception as error:  # a function of the user that extracts answers can fail
            text += f", and the search for the cause failed ({type(error).__name__}: {_quoted(str(error), 300)})."
        if self.other_terms:
            text = (
                f"the rewards give {text} Only the terms of the loss without rewards (such as the KL) train the model."
            )
        logger.warning("%s", text)


def has_signal(batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> bool:
    """Returns whether any trained completion has a non-zero advantage."""
    trained = batch.scored if batch.trained is None else batch.scored & batch.trained
    return bool((trained & (advantages != 0)).any())


def _formatted(diagnosis: Diagnosis, rollout: Rollout) -> str:
    group, number = divmod(diagnosis.sample, rollout.completions.lengths.shape[1])
    expected = rollout.problems[group].columns.get("answer")
    answer = f", answer {_quoted(str(expected), 80)}" if isinstance(expected, str | int | float) else ""
    return (
        f"{diagnosis.reason} {diagnosis.advice} Example (prompt {_quoted(rollout.problems[group].text, 160)}{answer}, "
        f"completion {number} with reward {rollout.scores.total[diagnosis.sample]:g}, "
        f"{rollout.completions.lengths[group, number]} tokens): {_quoted(rollout.texts[diagnosis.sample], 400)}"
    )


def diagnose(task: Task, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> Diagnosis:
    """Finds the reason why every trained completion of a step has the advantage 0 (`has_signal` is False)."""
    scored = batch.scored
    mixed = mixed_groups(batch.rewards, scored)
    if mixed.any():
        return _without_advantage(task, rollout, batch, advantages, mixed)
    if (scored.sum(axis=1) > 1).mean() < 0.5 or scored.mean() < 0.5:
        return _unscored(rollout, scored)
    total = rollout.scores.total.reshape(scored.shape)
    known = int(scored.any(axis=1).sum())
    solved = succeeds(np.where(scored, total, -np.inf), task.success_threshold).any(axis=1)
    if not solved.any():
        return _unsolved(task, rollout, scored)
    if solved.sum() == known:
        reason = f"all {known} groups are solved by all of their scored completions."
        example = scored
        advice = "Use harder problems (data.path), or stop the training and evaluate the model with tunix-like eval."
    else:
        reason = f"{int(solved.sum())} of {known} groups are solved by all of their scored completions, the others by "
        reason = f"{reason}none."
        example = scored & ~solved.reshape(-1, 1)
        advice = (
            "Raise algorithm.num_generations or rollout.temperature, so that completions of a prompt differ, or set "
            "algorithm.dynamic_sampling=true to sample further prompts."
        )
    return Diagnosis(reason, advice, int(np.argmax(example)))


def _without_advantage(
    task: Task, rollout: Rollout, batch: GroupBatch, advantages: np.ndarray, mixed: Bool[np.ndarray, "P"]
) -> Diagnosis:
    """Diagnoses a step without advantages although rewards differ within the groups that `mixed` marks."""
    differ = f"rewards differ in {int(mixed.sum())} of {len(mixed)} groups, but"
    if batch.trained is not None and (advantages != 0).any():
        return Diagnosis(
            f"{differ} all completions with a non-zero advantage were truncated at the length limit, and "
            "algorithm.overlong=mask excludes these.",
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}), or unset algorithm.overlong.",
            int(np.argmax(~rollout.completions.finished & (advantages != 0))),
        )
    return Diagnosis(
        f"{differ} the estimator '{task.algo.advantage_estimator}' gives every completion the advantage 0.",
        "`tunix-like advantages` shows the advantages of a group's rewards; change the parameters of the estimator "
        "(for example a smaller algorithm.k), or algorithm.advantage_estimator.",
        int(np.argmax(np.repeat(mixed, batch.rewards.shape[1]))),
    )


def _unscored(rollout: Rollout, scored: Bool[np.ndarray, "P G"]) -> Diagnosis:
    late = int(rollout.scores.timeouts.sum())
    failed = int(rollout.scores.errors.sum())
    source = "a reward function"
    keys = "rewards.timeout_seconds"
    if rollout.episodes is not None:
        source = f"{source} or the environment"
        keys = f"{keys} or environment.timeout_seconds"
    return Diagnosis(
        f"{int((~scored).sum())} of {scored.size} completions have no reward ({late} because {source} timed out, "
        f"{failed} because it failed), and rewards differ in no group.",
        f"`tunix-like check-rewards CONFIG` shows what the reward functions return; for timeouts raise {keys}.",
        int(np.argmin(scored)),
    )


def _unsolved(task: Task, rollout: Rollout, scored: Bool[np.ndarray, "P G"]) -> Diagnosis:
    """Diagnoses a step in which no group is solved and all rewards of each group are equal."""
    size = int(scored.sum())
    cut = scored & ~rollout.completions.finished
    right = scored & _equal_answers(rollout)
    unread = _without_answer(task, rollout)
    counts = f"of {size} scored completions {int(cut.sum())} were truncated at the length limit"
    whole = scored & ~cut  # for the example
    if unread is not None:
        unread, whole = scored & unread, whole & ~unread
        counts += f", in {int(unread.sum())} no answer is found"
    if right.any():
        counts += f", {int(right.sum())} are identical to the row's `answer`"
        example = right
        advice = (
            "Check the rewards with `tunix-like check-rewards CONFIG`, and check "
            f"rewards.success_threshold ({task.success_threshold:g})."
        )
    elif cut.sum() >= CAUSE_SHARE * size:
        example = cut
        advice = (
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}); if completions never end, check "
            "rollout.eos_tokens and data.apply_chat_template, or fine-tune on answers first (sft.max_steps)."
        )
    elif unread is not None and unread.sum() >= CAUSE_SHARE * size:
        example = unread
        advice = (
            "Describe the format of the answer in data.system_prompt, or fine-tune on answers first (sft.max_steps)."
        )
    else:
        example = whole if whole.any() else scored
        advice = (
            "Check the rewards (`tunix-like check-rewards CONFIG`). If they are right, the problems are too hard: use "
            "easier ones, raise algorithm.num_generations, fine-tune on answers first (sft.max_steps), or give partial "
            "credit (rewards.functions)."
        )
    reason = f"no group is solved, and all rewards of each group are equal; {counts}."
    return Diagnosis(reason, advice, int(np.argmax(example)))


def _equal_answers(rollout: Rollout) -> Bool[np.ndarray, "P G"]:
    """Returns a mask of the completions that equal the `answer` of their row, apart from surrounding white space."""
    shape = rollout.completions.lengths.shape
    answers = (problem.columns.get("answer") for problem in rollout.problems for _ in range(shape[1]))
    equal = [text.strip() == str(answer).strip() for text, answer in zip(rollout.texts, answers, strict=True)]
    return np.array(equal).reshape(shape)


def _without_answer(task: Task, rollout: Rollout) -> Bool[np.ndarray, "P G"] | None:
    """Returns a mask of the completions in which the reward functions find no answer; None if there is a problem for
    which no reward function extracts answers."""
    shape = rollout.completions.lengths.shape
    texts = [rollout.texts[i : i + shape[1]] for i in range(0, len(rollout.texts), shape[1])]
    answers = extract_answers(task.rewards, rollout.problems, texts)
    if any(group is None for group in answers):
        return None
    flat = itertools.chain.from_iterable(group for group in answers if group is not None)
    return np.array([answer is None or answer == "" for answer in flat]).reshape(shape)


def _limit(task: Task) -> str:
    return f"now {task.rollout_config.max_tokens_to_generate}"


def _quoted(text: str, most: int) -> str:
    """Returns the text, shortened by `excerpt` (`runtime/console.py`), in quotes and on one line."""
    return '"' + excerpt(text, most).replace("\n", "\\n") + '"'
