"""A step that taught nothing, explained: which of the reasons it is, one completion, and which key to change.

It reads what the step sampled, scored and weighed; it changes nothing.
"""

from __future__ import annotations

import itertools
import logging
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.evaluation.evaluate import told_answers
from tunix_like.rollout.rollouts import Rollout, Task, mixed_groups, succeeds
from tunix_like.runtime.console import excerpt
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")

AGAIN = 10
"""After so many steps in a row without a signal it is said again."""

MOST = 0.9
"""Share of the completions above which one thing is taken for the reason."""


class Diagnosis(NamedTuple):
    """Why no completion of a step has an advantage.

    `cause` is one of `unscored`, `masked`, `estimator`, `solved`, `divided`, `refused`, `truncated`, `unparsable`,
    `wrong`; `sample` is a completion that shows it, counted group after group.
    """

    cause: str
    found: str
    advice: str
    sample: int


class SignalWatch:
    """Warns after the first step of a run if it had no signal, and after every `AGAIN` such steps in a row."""

    def __init__(self, task: Task) -> None:
        self.task, self.without = task, 0

    def __call__(self, step: int, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> None:
        self.without = 0 if has_signal(batch, advantages) else self.without + 1
        if not self.without or not (step == 1 or self.without % AGAIN == 0):
            return
        try:
            found = diagnose(self.task, rollout, batch, advantages)
            said = told(found, step, self.without, rollout)
        except Exception as error:  # the functions that tell answers may be the user's
            said = f"nothing was learnt from the rewards of {_since(step, self.without)}, and looking for the reason "
            said += f"failed ({type(error).__name__}: {_line(str(error), 300)})."
        logger.warning("%s", said)


def has_signal(batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> bool:
    """Whether a completion that is trained on has an advantage other than 0."""
    trained = batch.scored if batch.trained is None else batch.scored & batch.trained
    return bool((trained & (advantages != 0)).any())


def told(found: Diagnosis, step: int, without: int, rollout: Rollout) -> str:
    """The diagnosis as one paragraph."""
    group, number = divmod(found.sample, rollout.completions.lengths.shape[1])
    text, reward = rollout.texts[found.sample], rollout.scores.total[found.sample]
    expected = rollout.problems[group].columns.get("answer")
    answer = f", answer {_line(str(expected), 80)}" if isinstance(expected, str | int | float) else ""
    return (
        f"nothing was learnt from the rewards of {_since(step, without)}: {found.found} {found.advice} For example "
        f"(prompt {_line(rollout.problems[group].text, 160)}{answer}, completion {number} with reward {reward:g}, "
        f"{rollout.completions.lengths[group, number]} tokens): {_line(text, 400)}"
    )


def diagnose(task: Task, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> Diagnosis:
    """The reason why every completion that is trained on has advantage 0; that it is so must be known
    (`has_signal`)."""
    mixed = mixed_groups(batch.rewards, batch.scored)
    if mixed.any():
        return _unused(task, rollout, batch, advantages, mixed)
    several = batch.scored.sum(axis=1) > 1
    if several.mean() < 0.5 or batch.scored.mean() < 0.5:
        return _unscored(rollout, several)
    return _tied(task, rollout, batch)


def _unscored(rollout: Rollout, several: np.ndarray) -> Diagnosis:
    scores, size = rollout.scores, len(rollout.texts)
    compared = "no group has two rewards to compare"
    if several.any():
        compared = f"{int(several.sum())} of {several.size} groups have two rewards to compare, and no two differ"
    return Diagnosis(
        "unscored",
        f"{compared}; {int((~scores.scored).sum())} of {size} completions have none "
        f"({int(scores.timeouts.sum())} for which a reward function was late, {int(scores.errors.sum())} for which "
        "one failed).",
        "`tunix-like check-rewards CONFIG` shows what the functions give; for late ones raise rewards.timeout_seconds.",
        int(np.argmin(scores.scored)),
    )


def _unused(task: Task, rollout: Rollout, batch: GroupBatch, advantages: np.ndarray, mixed: np.ndarray) -> Diagnosis:
    """Rewards differ, and yet nothing came of it."""
    differ = f"rewards differ in {int(mixed.sum())} of {len(mixed)} groups, but"
    if batch.trained is not None and (advantages != 0).any():
        sample = int(np.argmax(~rollout.completions.finished & (advantages != 0)))
        return Diagnosis(
            "masked",
            f"{differ} all completions with an advantage were cut at the limit, and algorithm.overlong=mask leaves "
            "these out.",
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}), or unset algorithm.overlong.",
            sample,
        )
    name = task.algo.advantage_estimator
    return Diagnosis(
        "estimator",
        f"{differ} the estimator '{name}' gives every completion the advantage 0.",
        "`tunix-like advantages` shows what an estimator makes of a group's rewards; change its parameters (a smaller "
        "algorithm.k), or algorithm.advantage_estimator.",
        int(np.argmax(np.repeat(mixed, batch.rewards.shape[1]))),
    )


def _tied(task: Task, rollout: Rollout, batch: GroupBatch) -> Diagnosis:
    """In every group all rewards are the same. What is not scored is not counted."""
    scored = batch.scored
    total = rollout.scores.total.reshape(scored.shape)
    known = scored.any(axis=1)
    solved = succeeds(np.where(scored, total, -np.inf), task.success_threshold).any(axis=1)
    groups, each = int(known.sum()), f"{scored.shape[1]} completions" if scored.all() else "scored completions"
    if solved.any() and solved.sum() == groups:
        return Diagnosis(
            "solved",
            f"all {groups} groups are solved: each of their {each} succeeds{_left_out(scored)}.",
            "Take harder problems (data.path), or end here; tunix-like eval says how good the model is.",
            int(np.argmax(scored)),
        )
    if solved.any():
        return Diagnosis(
            "divided",
            f"{int(solved.sum())} of {groups} groups are solved by all of their {each}, the others by "
            f"none{_left_out(scored)}.",
            "Raise algorithm.num_generations or rollout.temperature, so that completions of a prompt differ, or set "
            "algorithm.dynamic_sampling=true to draw further prompts.",
            int(np.argmax(scored & ~solved.reshape(-1, 1))),
        )
    return _failed(task, rollout, scored)


def _failed(task: Task, rollout: Rollout, scored: Bool[np.ndarray, "P G"]) -> Diagnosis:
    """No group is solved."""
    cut, found = scored & ~rollout.completions.finished, _unread(task, rollout)
    unread = None if found is None else scored & found.reshape(scored.shape)
    size, aside = int(scored.sum()), _left_out(scored)
    right = scored & _equal_answers(rollout).reshape(scored.shape)
    if right.any():
        return Diagnosis(
            "refused",
            f"no group is solved, although {int(right.sum())} of {size} completions are the row's `answer` word for "
            f"word{aside}.",
            "See by `tunix-like check-rewards CONFIG` whether the reward is what it should be, and look at "
            f"rewards.success_threshold ({task.success_threshold:g}).",
            int(np.argmax(right)),
        )
    if cut.sum() >= MOST * size:
        return Diagnosis(
            "truncated",
            f"no group is solved, and {int(cut.sum())} of {size} completions were cut at the limit{aside}.",
            f"Raise rollout.max_tokens_to_generate ({_limit(task)}); if they never end, look at "
            "rollout.eos_tokens and data.apply_chat_template, or teach how answers end by sft.max_steps.",
            int(np.argmax(cut)),
        )
    if unread is not None and unread.sum() >= MOST * size:
        return Diagnosis(
            "unparsable",
            f"no group is solved, and in {int(unread.sum())} of {size} completions no answer is found{aside}.",
            "Say in data.system_prompt how the answer is to be written, or teach it by sft.max_steps.",
            int(np.argmax(unread)),
        )
    known = "" if unread is None else f", in {int(unread.sum())} no answer is found"
    return Diagnosis(
        "wrong",
        f"no group is solved, and within each all rewards are the same; of {size} completions {int(cut.sum())} "
        f"were cut at the limit{known}{aside}.",
        "Either the reward is not what it should be (`tunix-like check-rewards CONFIG`), or the problems are too hard "
        "as yet: take easier ones, raise algorithm.num_generations, teach by sft.max_steps, or give partial credit "
        "(rewards.functions).",
        int(np.argmax(_best_example(scored, cut, unread))),
    )


def _equal_answers(rollout: Rollout) -> Bool[np.ndarray, "PG"]:
    """Which completions are what the row's column `answer` holds, but for white space at the ends."""
    size = rollout.completions.lengths.shape[1]
    answers = (problem.columns.get("answer") for problem in rollout.problems for _ in range(size))
    return np.array([text.strip() == str(answer).strip() for text, answer in zip(rollout.texts, answers, strict=True)])


def _best_example(scored: np.ndarray, cut: np.ndarray, unread: np.ndarray | None) -> Bool[np.ndarray, "P G"]:
    """Which completions are scored, ended by themselves and hold an answer; where none does, those that are scored."""
    whole = scored & ~cut if unread is None else scored & ~cut & ~unread
    return whole if whole.any() else scored


def _left_out(scored: Bool[np.ndarray, "P G"]) -> str:
    """How many completions and groups have no reward, and are not in the counts."""
    if scored.all():
        return ""
    none = int((~scored.any(axis=1)).sum())
    groups = f", all those of {none} groups among them" if none else ""
    return f" ({int((~scored).sum())} completions without a reward are not counted{groups})"


def _unread(task: Task, rollout: Rollout) -> np.ndarray | None:
    """Which completions hold no answer; None where no reward tells the answers of all problems."""
    size = rollout.completions.lengths.shape[1]
    texts = [rollout.texts[i : i + size] for i in range(0, len(rollout.texts), size)]
    answers = told_answers(task.rewards, rollout.problems, texts)
    if any(own is None for own in answers):
        return None
    flat = itertools.chain.from_iterable(own for own in answers if own is not None)
    return np.array([answer is None or answer == "" for answer in flat])


def _since(step: int, without: int) -> str:
    return f"the last {without} steps" if without > 1 else f"step {step}"


def _limit(task: Task) -> str:
    return f"now {task.rollout_config.max_tokens_to_generate}"


def _line(text: str, most: int) -> str:
    """In quotes on one line."""
    return '"' + excerpt(text, most).replace("\n", "\\n") + '"'
