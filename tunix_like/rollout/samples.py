"""Of a step one prompt, with its best and its worst completion: what a model writes is soon seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tunix_like.rollout.rollouts import Rollout, mixed_groups


class Sample(NamedTuple):
    """A completion: its reward by the functions (NaN: none), advantage, length in tokens, and whether it ended by
    itself."""

    text: str
    reward: float
    advantage: float
    length: int
    finished: bool


class Samples(NamedTuple):
    """A prompt with the best and the worst of its `size` completions, of which `scored` have a reward."""

    prompt: str
    best: Sample
    worst: Sample
    scored: int
    size: int


def pick_samples(rollout: Rollout, advantages: Float[np.ndarray, "P G"]) -> Samples:
    """Those of the first prompt whose rewards differ, else of the first; an unscored completion is neither, where
    another one is scored."""
    shape = rollout.completions.lengths.shape
    total, scored = (each.reshape(shape) for each in (rollout.scores.total, rollout.scores.scored))
    group = int(np.argmax(mixed_groups(total, scored)))
    best, worst = (int(np.argmax(np.nan_to_num(sign * total[group], nan=-np.inf))) for sign in (1, -1))

    def sample(place: int) -> Sample:
        out = rollout.completions
        return Sample(
            rollout.texts[group * shape[1] + place],
            float(total[group, place]),
            float(advantages[group, place]),
            int(out.lengths[group, place]),
            bool(out.finished[group, place]),
        )

    return Samples(rollout.problems[group].text, sample(best), sample(worst), int(scored[group].sum()), shape[1])
