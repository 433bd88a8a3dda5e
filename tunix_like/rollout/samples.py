"""Selects one prompt of a step with its best and its worst completion, to show them to the user."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tunix_like.rollout.episodes import transcript
from tunix_like.rollout.rollouts import Rollout, mixed_groups


class ScoredSample(NamedTuple):
    """A completion with its total reward (NaN if unscored), advantage and length in tokens.

    `text` has the turns with their roles if there is an environment. `finished` is True if the completion ended with an
    end-of-sequence token.
    """

    text: str
    reward: float
    advantage: float
    length: int
    finished: bool


class Samples(NamedTuple):
    """A prompt with its best and its worst completion. `size` is the number of completions of the prompt, and `scored`
    is the number of these completions that have a reward."""

    prompt: str
    best: ScoredSample
    worst: ScoredSample
    scored: int
    size: int


def pick_samples(rollout: Rollout, advantages: Float[np.ndarray, "P G"]) -> Samples:
    """Returns the best and the worst completion of the first prompt whose completions have different rewards.

    If there is no such prompt, the first prompt is used.

    An unscored completion is picked only if no completion of the prompt is scored.
    """
    shape = rollout.completions.lengths.shape
    total = rollout.scores.total.reshape(shape)
    scored = rollout.scores.scored.reshape(shape)
    group = int(np.argmax(mixed_groups(total, scored)))
    best, worst = (int(np.argmax(np.nan_to_num(sign * total[group], nan=-np.inf))) for sign in (1, -1))

    def sample(index: int) -> ScoredSample:
        out = rollout.completions
        row = group * shape[1] + index
        return ScoredSample(
            rollout.texts[row] if rollout.episodes is None else transcript(rollout.episodes[row].messages),
            float(total[group, index]),
            float(advantages[group, index]),
            int(out.lengths[group, index]),
            bool(out.finished[group, index]),
        )

    return Samples(rollout.problems[group].text, sample(best), sample(worst), int(scored[group].sum()), shape[1])
