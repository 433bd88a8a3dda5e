"""Scores a rollout: its completions by the reward functions, and the turns of its trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_like.rewards import Scores
from tunix_like.rewards.turns import CONVERSATION, TurnReward
from tunix_like.rollout.episodes import Episode, transcript, with_environment
from tunix_like.rollout.rollouts import Rollout, WeightedReward, score_completions
from tunix_like.types import Completions, Problem


def scored_rollout(
    rewards: Sequence[WeightedReward],
    problems: Sequence[Problem],
    texts: Sequence[str],
    completions: Completions,
    episodes: Sequence[Episode] | None,
    environments: Sequence[Any] | None,
) -> Rollout:
    """Scores completions and the turns of their trajectories.

    Args:
      episodes: None without an environment.
      environments: those of the trajectories, for reward functions (see `RolloutTrajectories.environments`).
    """
    size = completions.lengths.shape[1]
    whole = [reward for reward in rewards if not isinstance(reward[1], TurnReward)]
    of_turns = [reward for reward in rewards if isinstance(reward[1], TurnReward)]
    scores = score_completions(whole, problems, texts, size, environments)
    if episodes is not None:
        scores = with_environment(scores, episodes)
        for reward in of_turns:
            scores, episodes = _with_turns(reward, problems, size, scores, episodes)
    return Rollout(list(problems), list(texts), completions, scores, None if episodes is None else list(episodes))


def _with_turns(
    reward: WeightedReward, problems: Sequence[Problem], size: int, scores: Scores, episodes: Sequence[Episode]
) -> tuple[Scores, list[Episode]]:
    """Calls a reward function for all turns. Adds its values to the rewards of the turns, or to their potentials."""
    name, function, weight = reward
    assert isinstance(function, TurnReward)
    turns: list[Problem] = []
    texts: list[str] = []
    for number, episode in enumerate(episodes):
        for place, message in enumerate(episode.messages):
            if message["role"] == "assistant":
                turns.append(_before(problems[number // size], episode, place))
                texts.append("" if function.potential else message["content"])
    found = score_completions([(name, function, weight)], turns, texts, 1)
    ends = np.cumsum([episode.turns for episode in episodes])[:-1]
    values = np.split(np.where(found.failed, np.nan, np.nan_to_num(found.total)), ends)
    failed = np.array([bool(np.isnan(row).any()) for row in values])
    scores = dataclasses.replace(
        scores,
        total=np.where(failed, np.nan, scores.total),
        failed=scores.failed | failed,
        timeouts=scores.timeouts | [bool(row.any()) for row in np.split(found.timeouts, ends)],
        errors=scores.errors | [bool(row.any()) for row in np.split(found.errors, ends)],
        first_failure=scores.first_failure or found.first_failure,
    )
    if function.potential:
        shaped = [
            episode._replace(turn_potentials=(np.array(episode.turn_potentials) + row).tolist())
            for episode, row in zip(episodes, values, strict=True)
        ]
        return scores, shaped
    rewarded = [
        episode._replace(
            turn_rewards=(np.array(episode.turn_rewards) + row).tolist(), reward=episode.reward + row.sum()
        )
        for episode, row in zip(episodes, values, strict=True)
    ]
    sums = np.array([np.nan_to_num(row).sum() for row in np.split(found.by_function[name], ends)])
    by_function = scores.by_function | {name: np.where(failed, np.nan, sums)}
    total = scores.total + [row.sum() for row in values]
    return dataclasses.replace(scores, total=total, by_function=by_function), rewarded


def _before(problem: Problem, episode: Episode, place: int) -> Problem:
    """Returns the conversation before the turn that is the message `place`, as a problem."""
    earlier = episode.messages[:place]
    given = problem.source
    begin: list[Mapping[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    conversation = [*begin, *earlier]
    text = "\n".join([problem.text, transcript(earlier)]) if earlier else problem.text
    source = text if isinstance(given, str) else conversation
    return dataclasses.replace(
        problem, text=text, source=source, columns={**problem.columns, CONVERSATION: conversation}
    )
