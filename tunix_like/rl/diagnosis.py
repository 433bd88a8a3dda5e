"""A step that taught nothing, explained: which of the reasons it is, one completion, and which key to change.

It reads what the step sampled, scored and weighed; it changes nothing.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from tunix_like.console import excerpt
from tunix_like.evaluate import told_answers
from tunix_like.rl.rollouts import Rollout, mixed_groups, succeeds
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.rl.learner import Learner

logger = logging.getLogger("tunix_like")

AGAIN = 10
"""After so many steps in a row without a signal it is said again."""

MOST = 0.9
"""Share of the completions above which one thing is taken for the reason."""


class Diagnosis(NamedTuple):
    """Why no completion of a step has an advantage.

    `cause` is one of `unscored`, `masked`, `estimator`, `solved`, `divided`, `truncated`, `unparsable`, `wrong`;
    `sample` is a completion that shows it, counted group after group.
    """

    cause: str
    found: str
    advice: str
    sample: int


class SignalWatch:
    """Warns after the first step of a run if it had no signal, and after every `AGAIN` such steps in a row."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.without = learner, 0

    def __call__(self, step: int, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]) -> None:
        found = diagnose(self.learner, rollout, batch, advantages)
        self.without = 0 if found is None else self.without + 1
        if found is not None and (step == 1 or self.without % AGAIN == 0):
            logger.warning("%s", told(found, step, self.without, rollout))


def told(found: Diagnosis, step: int, without: int, rollout: Rollout) -> str:
    """The diagnosis as one paragraph."""
    group, number = divmod(found.sample, rollout.completions.lengths.shape[1])
    since = f"the last {without} steps" if without > 1 else f"step {step}"
    text, reward = rollout.texts[found.sample], rollout.scores.total[found.sample]
    expected = rollout.problems[group].columns.get("answer")
    answer = f", answer {_line(str(expected), 80)}" if isinstance(expected, str | int | float) else ""
    return (
        f"nothing was learnt from the rewards of {since}: {found.found} {found.advice} For example (prompt "
        f"{_line(rollout.problems[group].text, 160)}{answer}, completion {number} with reward {reward:g}, "
        f"{rollout.completions.lengths[group, number]} tokens): {_line(text, 400)}"
    )


def diagnose(
    learner: Learner, rollout: Rollout, batch: GroupBatch, advantages: Float[np.ndarray, "P G"]
) -> Diagnosis | None:
    """The reason why every completion that is trained on has advantage 0, or None where one has another."""
    trained = batch.scored if batch.trained is None else batch.scored & batch.trained
    if (trained & (advantages != 0)).any():
        return None
    several = (batch.scored.sum(axis=1) > 1).any()
    if not several:
        return _unscored(rollout)
    mixed = mixed_groups(batch.rewards, batch.scored)
    if mixed.any():
        return _unused(learner, rollout, batch, advantages, mixed)
    return _tied(learner, rollout, batch)


def _unscored(rollout: Rollout) -> Diagnosis:
    scores, size = rollout.scores, len(rollout.texts)
    return Diagnosis(
        "unscored",
        f"no group has two rewards to compare; {int((~scores.scored).sum())} of {size} completions have none "
        f"({int(scores.timeouts.sum())} for which a reward function was late, {int(scores.errors.sum())} for which "
        "one failed).",
        "`tunix-like check-rewards CONFIG` shows what the functions give; for late ones raise rewards.timeout_seconds.",
        int(np.argmin(scores.scored)),
    )


def _unused(
    learner: Learner, rollout: Rollout, batch: GroupBatch, advantages: np.ndarray, mixed: np.ndarray
) -> Diagnosis:
    """Rewards differ, and yet nothing came of it."""
    differ = f"rewards differ in {int(mixed.sum())} of {len(mixed)} groups, but"
    if batch.trained is not None and (advantages != 0).any():
        sample = int(np.argmax(~rollout.completions.finished & (advantages != 0)))
        return Diagnosis(
            "masked",
            f"{differ} all completions with an advantage were cut at the limit, and algorithm.overlong=mask leaves "
            "these out.",
            f"Raise rollout.max_tokens_to_generate ({_limit(learner)}), or unset algorithm.overlong.",
            sample,
        )
    name = learner.algo.advantage_estimator
    return Diagnosis(
        "estimator",
        f"{differ} the estimator '{name}' gives every completion the advantage 0.",
        "`tunix-like advantages` shows what an estimator makes of a group's rewards; change its parameters (a smaller "
        "algorithm.k), or algorithm.advantage_estimator.",
        int(np.argmax(np.repeat(mixed, batch.rewards.shape[1]))),
    )


def _tied(learner: Learner, rollout: Rollout, batch: GroupBatch) -> Diagnosis:
    """In every group all rewards are the same."""
    scored, finished = batch.scored, rollout.completions.finished
    total = rollout.scores.total.reshape(scored.shape)
    solved = succeeds(np.where(scored, total, -np.inf), learner.success_threshold).any(axis=1)
    groups, size = scored.shape
    if solved.all():
        return Diagnosis(
            "solved",
            f"all {groups} groups are solved: each of their {size} completions succeeds.",
            "Take harder problems (data.path), or end here; tunix-like eval says how good the model is.",
            0,
        )
    if solved.any():
        return Diagnosis(
            "divided",
            f"{int(solved.sum())} of {groups} groups are solved by all of their {size} completions, the others by "
            "none.",
            "Raise algorithm.num_generations or rollout.temperature, so that completions of a prompt differ, or set "
            "algorithm.dynamic_sampling=true to draw further prompts.",
            int(np.argmin(solved)) * size,
        )
    cut, unread = ~finished, _unread(learner, rollout)
    if cut.mean() >= MOST:
        return Diagnosis(
            "truncated",
            f"no group is solved, and {int(cut.sum())} of {cut.size} completions were cut at the limit.",
            f"Raise rollout.max_tokens_to_generate ({_limit(learner)}); if they never end, look at "
            "rollout.eos_tokens and data.apply_chat_template, or teach how answers end by sft.max_steps.",
            int(np.argmax(cut)),
        )
    if unread is not None and unread.mean() >= MOST:
        return Diagnosis(
            "unparsable",
            f"no group is solved, and in {int(unread.sum())} of {unread.size} completions no answer is found.",
            "Say in data.system_prompt how the answer is to be written, or teach it by sft.max_steps.",
            int(np.argmax(unread)),
        )
    known = "" if unread is None else f", in {int(unread.sum())} no answer is found"
    return Diagnosis(
        "wrong",
        f"no group is solved, and within each all rewards are the same; of {cut.size} completions {int(cut.sum())} "
        f"were cut at the limit{known}.",
        "The problems are too hard as yet: take easier ones, raise algorithm.num_generations, teach by sft.max_steps, "
        "or give partial credit (rewards.functions).",
        int(np.argmin(cut | (False if unread is None else unread.reshape(cut.shape)))),
    )


def _unread(learner: Learner, rollout: Rollout) -> np.ndarray | None:
    """Which completions hold no answer; None where no reward tells the answers of all problems."""
    size = rollout.completions.lengths.shape[1]
    texts = [rollout.texts[i : i + size] for i in range(0, len(rollout.texts), size)]
    answers = told_answers(learner.rewards, rollout.problems, texts)
    if any(own is None for own in answers):
        return None
    flat = itertools.chain.from_iterable(own for own in answers if own is not None)
    return np.array([answer is None or answer == "" for answer in flat])


def _limit(learner: Learner) -> str:
    return f"now {learner.rollout_config.max_tokens_to_generate}"


def _line(text: str, most: int) -> str:
    """In quotes on one line."""
    return '"' + excerpt(text, most).replace("\n", "\\n") + '"'
