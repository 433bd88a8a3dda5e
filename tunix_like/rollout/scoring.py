"""Scores a rollout: its completions by the reward functions, and the turns of its trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix_like.errors import UserError
from tunix_like.rewards import Scores
from tunix_like.rewards.turns import CONVERSATION, TurnReward
from tunix_like.rollout.episodes import Episode, transcript, with_environment
from tunix_like.rollout.rollouts import WeightedReward, score_completions
from tunix_like.types import Problem


def score_trajectories(
    rewards: Sequence[WeightedReward],
    problems: Sequence[Problem],
    texts: Sequence[str],
    size: int,
    episodes: Sequence[Episode] | None,
    environments: Sequence[Any] | None,
) -> tuple[Scores, list[Episode] | None]:
    """Returns the scores of `size` completions of each problem, and their episodes with the rewards and potentials of
    functions for turns.

    Args:
      episodes: None without an environment.
      environments: those of the trajectories, for reward functions (see `RolloutTrajectories.environments`).

    Raises:
      UserError: a function scores turns, and there is no environment.
    """
    whole = [reward for reward in rewards if not isinstance(reward[1], TurnReward)]
    of_turns = [reward for reward in rewards if isinstance(reward[1], TurnReward)]
    scores = score_completions(whole, problems, texts, size, environments)
    if episodes is None:
        if of_turns:
            raise UserError(f"reward function '{of_turns[0][0]}': it scores turns, and there is no environment.")
        return scores, None
    scores = with_environment(scores, episodes)
    for reward in of_turns:
        scores, episodes = _with_turns(reward, problems, size, scores, episodes, environments)
    return scores, list(episodes)


def _with_turns(
    reward: WeightedReward,
    problems: Sequence[Problem],
    size: int,
    scores: Scores,
    episodes: Sequence[Episode],
    environments: Sequence[Any] | None,
) -> tuple[Scores, list[Episode]]:
    """Calls a reward function for all turns. Adds its values to the rewards of the turns, or to their potentials."""
    name, function, _ = reward
    assert isinstance(function, TurnReward)
    turns: list[Problem] = []
    texts: list[str] = []
    played: list[Any] = []
    for number, episode in enumerate(episodes):
        for place, message in enumerate(episode.messages):
            if message["role"] == "assistant":
                turns.append(_before(problems[number // size], episode, place))
                texts.append("" if function.potential else message["content"])
                played.append(None if environments is None else environments[number])
    found = score_completions([reward], turns, texts, 1, None if environments is None else played)
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
    given = problem.source if problem.opened is None else problem.opened
    if CONVERSATION in problem.columns:
        raise UserError(
            f"A data column must not be called '{CONVERSATION}': reward functions of turns receive the messages before "
            "a turn under that name; rename the column."
        )
    if isinstance(given, str):
        text = "\n".join([given, *(message["content"] for message in earlier)])
        source: Any = text
        conversation: list[Any] = [{"role": "user", "content": given}, *earlier]
    else:
        conversation = [*given, *earlier]
        text = transcript(conversation)
        source = conversation
    return dataclasses.replace(
        problem, text=text, source=source, columns={**problem.columns, CONVERSATION: conversation}
    )
