"""Explains steps without a training signal (all advantages are 0).

The explanation states the cause, an example completion and the config key to change.
"""

from __future__ import annotations

import itertools
import logging
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.evaluation.evaluate import extract_answers
from tunix_like.rollout.environments.episodes import failure_kinds
from tunix_like.rollout.rollouts import Rollout, Task, mixed_groups, succeeds
from tunix_like.runtime.console import excerpt
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")

REPEAT_AFTER = 10
"""Number of consecutive steps without a training signal after which the warning is repeated."""

CAUSE_SHARE = 0.9
"""Fraction of the completions that must have a property (for example, truncation) so that this property is reported as
the cause of a missing training signal."""


class Diagnosis(NamedTuple):
    """The reason why all trained completions of a step have the advantage 0.

    Attributes:
      cause: name of the cause: `unscored`, `masked`, `estimator`, `solved`, `divided`, `refused`, `truncated`,
        `unparsable` or `wrong`.
      found: a sentence that describes the cause.
      advice: a sentence with the remedy.
      sample: index of an example completion in the flat list of completions, which is ordered by group.
    """

    cause: str
    found: str
    advice: str
    sample: int


class SignalWatch:
    """Warns of a missing training signal (all trained completions have the advantage 0): in step 1, and after every
    `REPEAT_AFTER` consecutive steps without a signal."""

    def __init__(self, task: Task) -> None:
        self.task, self.steps_without = task, 0

    def __call__(self, step: int, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> None:
        self.steps_without = 0 if has_signal(batch, advantages) else self.steps_without + 1
        if not self.steps_without or not (step == 1 or self.steps_without % REPEAT_AFTER == 0):
            return
        try:
            diagnosis = diagnose(self.task, rollout, batch, advantages)
            text = format_diagnosis(diagnosis, step, self.steps_without, rollout)
        except Exception as error:  # a function of the user that extracts answers can fail
            text = f"no training signal in {_since(step, self.steps_without)}, and the search for the cause failed "
            text += f"({type(error).__name__}: {_quoted(str(error), 300)})."
        logger.warning("%s", text)


def has_signal(batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> bool:
    """Returns whether any trained completion has a non-zero advantage."""
    trained = batch.scored if batch.trained is None else batch.scored & batch.trained
    return bool((trained & (advantages != 0)).any())


def format_diagnosis(diagnosis: Diagnosis, step: int, without: int, rollout: Rollout) -> str:
    """Formats the reason for a missing training signal as one paragraph.

    Args:
      without: number of consecutive steps without a training signal, up to and including `step`.
    """
    group, number = divmod(diagnosis.sample, rollout.completions.lengths.shape[1])
    text, reward = rollout.texts[diagnosis.sample], rollout.scores.total[diagnosis.sample]
    expected = rollout.problems[group].columns.get("answer")
    answer = f", answer {_quoted(str(expected), 80)}" if isinstance(expected, str | int | float) else ""
    return (
        f"no training signal in {_since(step, without)}: {diagnosis.found} {diagnosis.advice} Example "
        f"(prompt {_quoted(rollout.problems[group].text, 160)}{answer}, completion {number} with reward {reward:g}, "
        f"{rollout.completions.lengths[group, number]} tokens): {_quoted(text, 400)}"
    )


def diagnose(task: Task, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> Diagnosis:
    """Finds the reason why every trained completion of a step has the advantage 0 (`has_signal` is False)."""
    mixed = mixed_groups(batch.rewards, batch.scored)
    if mixed.any():
        return _unused(task, rollout, batch, advantages, mixed)
    several = batch.scored.sum(axis=1) > 1
    if several.mean() < 0.5 or batch.scored.mean() < 0.5:
        return _unscored(rollout, several)
    return _tied(task, rollout, batch)


def _unscored(rollout: Rollout, several: np.ndarray) -> Diagnosis:
    scores, size = rollout.scores, len(rollout.texts)
    compared = "no group has two scored completions"
    if several.any():
        compared = f"{int(several.sum())} of {several.size} groups have two scored completions, with equal rewards"
    causes, key = _failures(rollout)
    return Diagnosis(
        "unscored",
        f"{compared}; {int((~scores.scored).sum())} of {size} completions have no reward ({causes}).",
        f"`tunix-like check-rewards CONFIG` shows what the reward functions return; for timeouts raise {key}.",
        int(np.argmin(scores.scored)),
    )


def _failures(rollout: Rollout) -> tuple[str, str]:
    """Describes how many completions are unscored because a reward function or the environment failed.

    Also returns the config keys that set the time limits of reward functions and of the environment.
    """
    scores, parts = rollout.scores, []
    kinds = np.array([kind or "" for kind in failure_kinds(rollout.episodes or [])] or [""] * len(rollout.texts))
    outside = kinds == ""  # the environment did not fail
    late, wrong = scores.timeouts & outside, scores.errors & outside
    if rollout.episodes is None or late.any() or wrong.any():
        parts.append(f"{int(late.sum())} because a reward function timed out, {int(wrong.sum())} because one failed")
    keys = ["rewards.timeout_seconds"] * len(parts)
    if rollout.episodes is not None:
        late = kinds == "timeout"
        parts.append(
            f"{int(late.sum())} because a call of the environment timed out, {int((~outside & ~late).sum())} because "
            "the environment failed"
        )
        keys.append("environment.timeout_seconds")
    return ", ".join(parts), " or ".join(keys)


def _unused(task: Task, rollout: Rollout, batch: GroupBatch, advantages: np.ndarray, mixed: np.ndarray) -> Diagnosis:
    """Diagnoses a step whose trained completions all have the advantage 0, although rewards differ within groups.

    `mixed` marks the groups whose rewards differ.
    """
    differ = f"rewards differ in {int(mixed.sum())} of {len(mixed)} groups, but"
    if batch.trained is not None and (advantages != 0).any():
        sample = int(np.argmax(~rollout.completions.finished & (advantages != 0)))
        return Diagnosis(
            "masked",
            f"{differ} all completions with a non-zero advantage were truncated at the length limit, and "
            "algorithm.overlong=mask excludes these.",
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}), or unset algorithm.overlong.",
            sample,
        )
    name = task.algo.advantage_estimator
    return Diagnosis(
        "estimator",
        f"{differ} the estimator '{name}' gives every completion the advantage 0.",
        "`tunix-like advantages` shows the advantages of a group's rewards; change the parameters of the estimator "
        "(for example a smaller algorithm.k), or algorithm.advantage_estimator.",
        int(np.argmax(np.repeat(mixed, batch.rewards.shape[1]))),
    )


def _tied(task: Task, rollout: Rollout, batch: GroupBatch) -> Diagnosis:
    """Diagnoses a step in which all rewards of each group are equal. Unscored completions are ignored."""
    scored = batch.scored
    total = rollout.scores.total.reshape(scored.shape)
    known = scored.any(axis=1)
    solved = succeeds(np.where(scored, total, -np.inf), task.success_threshold).any(axis=1)
    groups, members = int(known.sum()), f"{scored.shape[1]} completions" if scored.all() else "scored completions"
    if solved.any() and solved.sum() == groups:
        return Diagnosis(
            "solved",
            f"all {groups} groups are solved by all of their {members}{_unscored_note(scored)}.",
            "Use harder problems (data.path), or stop the training and evaluate the model with tunix-like eval.",
            int(np.argmax(scored)),
        )
    if solved.any():
        return Diagnosis(
            "divided",
            f"{int(solved.sum())} of {groups} groups are solved by all of their {members}, the others by "
            f"none{_unscored_note(scored)}.",
            "Raise algorithm.num_generations or rollout.temperature, so that completions of a prompt differ, or set "
            "algorithm.dynamic_sampling=true to sample further prompts.",
            int(np.argmax(scored & ~solved.reshape(-1, 1))),
        )
    return _failed(task, rollout, scored)


def _failed(task: Task, rollout: Rollout, scored: Bool[np.ndarray, "P G"]) -> Diagnosis:
    """Diagnoses a step in which no group is solved and all rewards of each group are equal."""
    cut, unparsed = scored & ~rollout.completions.finished, _without_answer(task, rollout)
    unread = None if unparsed is None else scored & unparsed.reshape(scored.shape)
    size, aside = int(scored.sum()), _unscored_note(scored)
    right = scored & _equal_answers(rollout).reshape(scored.shape)
    if right.any():
        return Diagnosis(
            "refused",
            f"no group is solved, although {int(right.sum())} of {size} completions are identical to the row's "
            f"`answer`{aside}.",
            "Check the rewards with `tunix-like check-rewards CONFIG`, and check "
            f"rewards.success_threshold ({task.success_threshold:g}).",
            int(np.argmax(right)),
        )
    if cut.sum() >= CAUSE_SHARE * size:
        return Diagnosis(
            "truncated",
            f"no group is solved, and {int(cut.sum())} of {size} completions were truncated at the length "
            f"limit{aside}.",
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}); if completions never end, check "
            "rollout.eos_tokens and data.apply_chat_template, or fine-tune on answers first (sft.max_steps).",
            int(np.argmax(cut)),
        )
    if unread is not None and unread.sum() >= CAUSE_SHARE * size:
        return Diagnosis(
            "unparsable",
            f"no group is solved, and in {int(unread.sum())} of {size} completions no answer is found{aside}.",
            "Describe the format of the answer in data.system_prompt, or fine-tune on answers first (sft.max_steps).",
            int(np.argmax(unread)),
        )
    known = "" if unread is None else f", in {int(unread.sum())} no answer is found"
    return Diagnosis(
        "wrong",
        f"no group is solved, and all rewards of each group are equal; of {size} completions {int(cut.sum())} "
        f"were truncated at the length limit{known}{aside}.",
        "Check the rewards (`tunix-like check-rewards CONFIG`). If they are right, the problems are too hard: use "
        "easier ones, raise algorithm.num_generations, fine-tune on answers first (sft.max_steps), or give partial "
        "credit (rewards.functions).",
        int(np.argmax(_best_example(scored, cut, unread))),
    )


def _equal_answers(rollout: Rollout) -> Bool[np.ndarray, "PG"]:
    """Returns a mask of the completions that equal the `answer` of their row. Surrounding white space is ignored."""
    size = rollout.completions.lengths.shape[1]
    answers = (problem.columns.get("answer") for problem in rollout.problems for _ in range(size))
    return np.array([text.strip() == str(answer).strip() for text, answer in zip(rollout.texts, answers, strict=True)])


def _best_example(scored: np.ndarray, cut: np.ndarray, unread: np.ndarray | None) -> Bool[np.ndarray, "P G"]:
    """Returns a mask of the completions that can serve as the example of a diagnosis: completions that are scored, are
    not truncated and have an answer. If there are no such completions, returns `scored`.

    Args:
      scored, cut: masks of the scored and of the truncated completions.
      unread: mask of the completions without an answer; None if answers are not considered.
    """
    whole = scored & ~cut if unread is None else scored & ~cut & ~unread
    return whole if whole.any() else scored


def _unscored_note(scored: Bool[np.ndarray, "P G"]) -> str:
    """Returns a note in parentheses, which says that unscored completions are not counted.

    The note states the number of unscored completions, and the number of groups in which no completion is scored. The
    note is empty if all completions are scored.
    """
    if scored.all():
        return ""
    none = int((~scored.any(axis=1)).sum())
    groups = f", including all completions of {none} groups" if none else ""
    return f" ({int((~scored).sum())} completions without a reward are not counted{groups})"


def _without_answer(task: Task, rollout: Rollout) -> np.ndarray | None:
    """Returns a mask of the completions in which the reward functions find no answer.

    Returns None if there is a problem for which no reward function extracts answers.
    """
    size = rollout.completions.lengths.shape[1]
    texts = [rollout.texts[i : i + size] for i in range(0, len(rollout.texts), size)]
    answers = extract_answers(task.rewards, rollout.problems, texts)
    if any(group is None for group in answers):
        return None
    flat = itertools.chain.from_iterable(group for group in answers if group is not None)
    return np.array([answer is None or answer == "" for answer in flat])


def _since(step: int, without: int) -> str:
    return f"the last {without} steps" if without > 1 else f"step {step}"


def _limit(task: Task) -> str:
    return f"now {task.rollout_config.max_tokens_to_generate}"


def _quoted(text: str, most: int) -> str:
    """Returns the text, shortened by `excerpt` (`runtime/console.py`), in quotes and on one line."""
    return '"' + excerpt(text, most).replace("\n", "\\n") + '"'
