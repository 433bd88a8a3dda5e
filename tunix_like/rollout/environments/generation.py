"""Samples completions of problems, with or without environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from tunix_like.rollout.environments.trajectories import Player, Trajectories
from tunix_like.rollout.requests import collect, requests_of
from tunix_like.types import Completions, Engine, Problem, SamplingParams


def generate(
    engine: Engine,
    player: Player | None,
    params: Any,
    problems: Sequence[Problem],
    size: int,
    key: Array,
    sampling: SamplingParams,
) -> tuple[list[Problem], Completions, Trajectories | None]:
    """Samples `size` completions of each problem. If `player` is not None, environments answer each turn of the policy.

    Returns:
      the problems, with the first observations of the environments added to their prompts; the completions; and the
      trajectories, or None if `player` is None.
    """
    trajectories = None if player is None else player.start(problems, size, engine.max_prompt_length)
    if trajectories is not None:
        problems = trajectories.problems
    requests = requests_of(problems, size)
    given = params, requests, key, sampling
    # An engine that supports only single turns may lack the parameter `responder`.
    samples = engine.generate(*given) if trajectories is None else engine.generate(*given, trajectories)
    out = collect(samples, requests)
    if trajectories is not None and player is not None and player.rewrites:
        while isinstance(inner := getattr(engine, "engine", None), Engine):  # the error message names the inner engine
            engine = inner
        trajectories.check_rows(out, type(engine).__name__)
    return list(problems), out, trajectories
