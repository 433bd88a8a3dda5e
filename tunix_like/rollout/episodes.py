"""Defines `Episode`, the record of a trajectory without its tokens, and computes the rewards and metrics of
environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tunix_like.rewards import Scores
from tunix_like.runtime.visible import visible

MOST_TURN_METRICS = 16
"""Turns up to this number have a metric of their rewards."""

REWARD = "environment"
"""Name of the environment's reward in `Scores.by_function`, which also has the names of the reward functions."""


class Episode(NamedTuple):
    """The record of one trajectory, without its tokens.

    Attributes:
      messages: the turns and the observations, `{"role": "assistant" | "user" | "tool" | ..., "content": text}`, oldest
        first.
      turns: number of turns of the policy.
      limited: whether the limit `environment.max_turns` ended the trajectory.
      cut: number of observations that were shortened.
      reward: the sum of the rewards of the environment and of functions for turns; NaN if one of them failed.
      info: the last value of each number that the environment returned in `info`, by name.
      failure: kind and reason of the environment's `Failure`; None if the environment did not fail.
      rewritten: number of times that the chat template has rewritten earlier turns; None with
        `environment.history=sampled`.
      turn_rewards: the reward after each turn: that of the environment, whose reward at the end is added to the last,
        and weighted ones of reward functions for turns.
      turn_tokens: number of tokens that the policy sampled in each turn.
      turn_states: key of the state in which each turn begins; None in the first turn, or if there is no key.
      turn_potentials: potential of this state.
    """

    messages: list[dict[str, str]]
    turns: int
    limited: bool
    cut: int
    reward: float
    info: dict[str, float]
    failure: list[str] | None
    rewritten: int | None = None
    turn_rewards: Sequence[float] = ()
    turn_tokens: Sequence[int] = ()
    turn_states: Sequence[str | float | None] = ()
    turn_potentials: Sequence[float] = ()


def failure_kinds(episodes: Sequence[Episode]) -> list[str | None]:
    """Returns the `FailureKind` of each trajectory; None without a failure."""
    return [None if episode.failure is None else episode.failure[0] for episode in episodes]


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Formats messages as `role: content`, with the second and later lines indented by two spaces."""
    return "\n".join(f"{message['role']}: {message['content']}".replace("\n", "\n  ") for message in messages)


def with_environment(scores: Scores, episodes: Sequence[Episode]) -> Scores:
    """Adds the rewards of the environments to the scores of the reward functions; NaN if an environment failed."""
    rewards = np.array([episode.reward for episode in episodes])
    kinds = failure_kinds(episodes)
    first = next((episode for episode in episodes if episode.failure is not None), None)
    failure = scores.first_failure
    if failure is None and first is not None and first.failure is not None:
        failure = f"{visible(first.failure[1])}\nTurns: {first.messages!r}"
    return dataclasses.replace(
        scores,
        total=np.where(scores.scored, scores.total, np.where(scores.failed, np.nan, 0.0)) + rewards,
        by_function=scores.by_function | {REWARD: rewards},
        failed=scores.failed | np.isnan(rewards),
        timeouts=scores.timeouts | np.array([kind == "timeout" for kind in kinds]),
        errors=scores.errors | np.array([kind not in (None, "timeout") for kind in kinds]),
        first_failure=failure,
    )


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Computes the metrics of trajectories: statistics of the turns, and the means of the numbers in `Episode.info`."""
    turns = np.array([episode.turns for episode in episodes])
    metrics = {
        "turns/mean": float(turns.mean()),
        "turns/max": float(turns.max()),
        "turns/limited_frac": float(np.mean([episode.limited for episode in episodes])),
        "turns/cut_observations": float(np.mean([episode.cut for episode in episodes])),
        "turns/unavailable_frac": float(np.mean([kind == "unavailable" for kind in failure_kinds(episodes)])),
    }
    if episodes[0].rewritten is not None:
        metrics["turns/rewritten"] = float(np.mean([episode.rewritten for episode in episodes]))
    known = [episode for episode in episodes if np.isfinite(episode.reward)]
    rewards = [episode.turn_rewards for episode in known]
    if any(any(row[:-1]) for row in rewards):
        for turn in range(min(MOST_TURN_METRICS, max(map(len, rewards)))):
            metrics[f"turns/reward/{turn + 1}"] = float(np.mean([row[turn] for row in rewards if len(row) > turn]))
    names = sorted({name for episode in episodes for name in episode.info})
    for name in names:
        metrics[f"environment/{name}"] = float(np.mean([e.info[name] for e in episodes if name in e.info]))
    return metrics
